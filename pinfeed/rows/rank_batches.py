"""RankBatches: the batches of one rank, which any number of ranks can resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import OrderBatches, RowBatches, RowIndices
from pinfeed.rows.rank_partition import Progress
from pinfeed.rows.rank_shard import RankShard
from pinfeed.rows.windows import Windows


class RankBatches(RowBatches):
    """The batches of one rank.

    If other ranks have read a part of an epoch, the epoch consists of the remaining rows. All
    ranks, and jobs with any number of ranks, can load the state of any rank.

    Args:
        shard: This rank's part of every epoch.
        n_rows: Number of rows in the stores.
    """

    kind = "a feeder with ranks="
    state_keys = ("ranks",)

    def __init__(self, shard: RankShard, n_rows: int) -> None:
        self._shard = shard
        self._n_rows = n_rows
        # An epoch, and its positions that other ranks have done.
        self._begun: tuple[int, Progress] = (0, ())
        self.batch_size = shard.batch_size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that determine the row order; rank and world size are not among them."""
        shard = self._shard
        return {
            "order": repr(shard.order),
            "n_rows": self._n_rows,
            "batch_size": shard.size,
            "drop_last": shard.drop_last,
            "ranks": shard.ranks.uneven,
            "split_batches": shard.ranks.split_batches,
        }

    def __len__(self) -> int:
        return len(self._shard.batches(self._n_rows))

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        return self._batches(number).epoch(number, start, checksum, batches_per_slot)

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return self._batches(number).windows(number, start)

    def begin(self, epoch: int, done: Progress) -> None:
        """Set the positions of an epoch that other ranks have done; no other epoch was begun."""
        self._begun = epoch, done

    def restart(self, epoch: int) -> None:
        self.begin(epoch, ())

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the position after ``batch`` batches of an epoch, as plain values.

        The state after the end of an epoch contains no positions of other ranks.
        """
        world_size = self._shard.world_size
        done = self._done(epoch)
        if done and batch == self._most(world_size, done):
            batch = self._most(world_size)
            done = ()
        return {
            "batch": batch,
            "ranks": {"world_size": world_size, "done": [list(part) for part in done]},
        }

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        epoch = int(state["epoch"])
        batch = int(state["batch"])
        theirs = state["ranks"]
        start, done = self.resumed(batch, theirs)
        is_over = self.is_over(batch, theirs)
        self.begin(epoch, done)
        return start, is_over

    def resumed(self, batch: int, theirs: Mapping[str, Any]) -> tuple[int, Progress]:
        """Translate the position of other ranks into a position of this rank.

        Args:
            batch: Number of batches that each of the other ranks has done.
            theirs: Entry ``"ranks"`` of their state.

        Returns:
            The batch of this rank to begin with, and the positions that were done before.

        Raises:
            ArgumentError: If ``theirs`` is not such an entry.
        """
        world_size, done, n = self._read(batch, theirs)
        if batch == n:
            return len(self), ()
        if world_size == self._shard.world_size or self._shard.ranks.split_batches or batch == 0:
            return batch, done
        return 0, (*done, (world_size, batch * self.batch_size))

    def is_over(self, batch: int, theirs: Mapping[str, Any]) -> bool:
        """Return whether all batches of an epoch are done, given the position of other ranks.

        Args:
            batch: Number of batches that each of the other ranks has done.
            theirs: Entry ``"ranks"`` of their state.

        Raises:
            ArgumentError: If ``theirs`` is not such an entry.
        """
        return 0 < batch == self._read(batch, theirs)[2]

    def _read(self, batch: int, theirs: Mapping[str, Any]) -> tuple[int, Progress, int]:
        """Read the entry ``"ranks"`` of a state.

        Returns:
            The number of ranks, the positions done before them, and the most batches of one rank.
        """
        try:
            world_size = int(theirs["world_size"])
            done = tuple((int(a), int(n)) for a, n in theirs["done"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a feeder with ranks= ({error!r}); expected the result of "
                "state_dict()"
            ) from None
        if (
            world_size < 1
            or any(a < 1 or n < 0 for a, n in done)
            or (self._shard.ranks.split_batches and self._shard.size % world_size)
        ):
            raise ArgumentError(
                f"not a state of a feeder with ranks=: {dict(theirs)!r}; expected the result of "
                "state_dict()"
            )
        n = self._most(world_size, done)
        if not 0 <= batch <= n:
            raise ArgumentError(
                f"the state is at batch {batch}; expected 0 to {n}, the number of batches of each "
                f"of the {world_size} ranks in that epoch"
            )
        return world_size, done, n

    def _most(self, world_size: int, done: Progress = ()) -> int:
        """Return the most batches that a rank has."""
        # No rank has more than the first one.
        return len(self._shard.of(0, world_size).batches(self._n_rows, done))

    def _batches(self, epoch: int) -> OrderBatches:
        return self._shard.batches(self._n_rows, self._done(epoch))

    def _done(self, epoch: int) -> Progress:
        return self._begun[1] if epoch == self._begun[0] else ()
