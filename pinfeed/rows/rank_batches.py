"""RankShard and RankBatches: the part of an epoch that one rank has, at any number of ranks."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import OrderBatches, RowBatches, RowIndices
from pinfeed.rows.orders import BlockShuffled, Order, PerRank
from pinfeed.rows.rank_partition import Progress, Uneven
from pinfeed.rows.rank_warnings import note_processes
from pinfeed.rows.ranks import Ranks, world
from pinfeed.rows.windows import Windows


@dataclass(frozen=True)
class RankShard:
    """The part of every epoch of an order that one rank has.

    Args:
        order: Order of all rows.
        ranks: The user's choice of how ranks share an epoch.
        rank: Number of the rank.
        world_size: Number of ranks.
        drop_last: Whether to leave out a last batch that is not full.
        size: Rows per batch, of each rank or, with ``ranks.split_batches``, of all ranks together.
    """

    order: Order
    ranks: Ranks
    rank: int
    world_size: int
    drop_last: bool
    size: int

    def of(self, rank: int, world_size: int) -> RankShard:
        """Return the part of another rank, possibly at another number of ranks."""
        return dataclasses.replace(self, rank=rank, world_size=world_size)

    @property
    def batch_size(self) -> int:
        """Rows per batch of this rank."""
        return self.size // self.world_size if self.ranks.split_batches else self.size

    def rows(self, done: Progress = ()) -> PerRank:
        """Return the order of this rank's rows.

        Args:
            done: Positions of the epoch that ranks have done before.
        """
        in_one = isinstance(self.order, BlockShuffled) and not self.ranks.split_batches
        return PerRank(
            self.order,
            self.rank,
            self.world_size,
            self.ranks.uneven,
            None if in_one else self.batch_size,
            done,
        )

    def batches(self, n_rows: int, done: Progress = ()) -> OrderBatches:
        """Return the batches of this rank.

        Args:
            n_rows: Number of rows in the stores.
            done: Positions of the epoch that ranks have done before.
        """
        return OrderBatches(self.rows(done), n_rows, self.batch_size, self.drop_last)


def shard_of_rank(
    ranks: Ranks | str | None,
    order: Any,
    drop_last: bool,
    size: int | None,
    size_name: str = "batch_size",
) -> RankShard | None:
    """Return the part of every epoch that this process has; None if it has all rows.

    Args:
        ranks: The user's argument ``ranks``.
        order: The user's argument ``rows``.
        drop_last: Whether to leave out a last batch that is not full.
        size: Rows per batch, of each rank or of all ranks together.
        size_name: Name of the argument that gave ``size``, for error messages.

    Raises:
        ArgumentError: If the arguments conflict, or ``order`` cannot be shared.
    """
    if ranks is None:
        note_processes(order)
    if ranks is None or ranks == "all":
        return None
    shared = _check_ranks(ranks, order, drop_last)
    if size is None:
        raise ArgumentError(
            "ranks= needs batches of one size on all ranks; give the config a preferred_batch_size "
            "(or give batch_size)"
        )
    if shared.rank is None or shared.world_size is None:
        rank, world_size = world()
    else:
        rank, world_size = shared.rank, shared.world_size
    if shared.split_batches:
        _check_divisible(size, size_name, world_size)
    return RankShard(
        order,
        shared,
        operator.index(rank),
        operator.index(world_size),
        drop_last,
        operator.index(size),
    )


def _check_ranks(ranks: Any, order: Any, drop_last: bool) -> Ranks:
    """Check that the arguments agree; return ``ranks`` as ``Ranks``."""
    if not isinstance(ranks, (str, Ranks)):
        raise ArgumentError(
            f"ranks={ranks!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
        )
    # Ranks checks the string.
    shared = ranks if isinstance(ranks, Ranks) else Ranks(cast(Uneven, ranks))
    if isinstance(order, PerRank):
        raise ArgumentError(
            "rows=per_rank(...) is the share of one rank already, and ranks= would share it again; "
            "give one of them"
        )
    if not isinstance(order, Order):
        raise ArgumentError(
            f"ranks={ranks!r} shares orders of pinfeed.rows, and rows is a {type(order).__name__}, "
            "which says itself what a process has; leave ranks= out (a DistributedSampler shares "
            "by itself; of an array, give rows=array[rank::world_size])"
        )
    if drop_last and shared.uneven == "join":
        raise ArgumentError(
            "ranks='join' gives every row once and drop_last=True leaves rows out; give one of "
            "them, or ranks='drop'"
        )
    return shared


def _check_divisible(size: int, name: str, world_size: int) -> None:
    """Check that the ranks can split a batch of all ranks into equal parts."""
    if size % world_size == 0:
        return
    below = size // world_size * world_size
    above = -(-size // world_size) * world_size
    raise ArgumentError(
        f"{name}={size} is to be split among {world_size} ranks; expected a multiple of that: "
        f"{below or above}" + (f" or {above}" if below else "")
    )


class RankBatches(RowBatches):
    """The batches of one rank.

    An epoch that other ranks have begun consists of the rows that they have left. A state of any
    rank is a state of all of them, and of any other number of ranks.

    Args:
        share: Part of the epochs that this rank has.
        n_rows: Number of rows in the stores.
    """

    kind = "a feeder with ranks="
    state_keys = ("ranks",)

    def __init__(self, share: RankShard, n_rows: int) -> None:
        self._share = share
        self._n_rows = n_rows
        # An epoch, and the positions of it that other ranks have done.
        self._begun: tuple[int, Progress] = (0, ())
        self.batch_size = share.batch_size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that fix the order of the rows; rank and world size are not among them."""
        share = self._share
        return {
            "order": repr(share.order),
            "n_rows": self._n_rows,
            "batch_size": share.size,
            "drop_last": share.drop_last,
            "ranks": share.ranks.uneven,
            "split_batches": share.ranks.split_batches,
        }

    def __len__(self) -> int:
        return len(self._share.batches(self._n_rows))

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

        An epoch that is over has the state of one that no other ranks had begun.
        """
        world_size = self._share.world_size
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
            ArgumentError: If ``theirs`` is no such entry.
        """
        world_size, done, n = self._read(batch, theirs)
        if batch == n:
            return len(self), ()
        if world_size == self._share.world_size or self._share.ranks.split_batches or batch == 0:
            return batch, done
        return 0, (*done, (world_size, batch * self.batch_size))

    def is_over(self, batch: int, theirs: Mapping[str, Any]) -> bool:
        """Tell whether no rank has a batch left of an epoch, given the position of other ranks.

        Args:
            batch: Number of batches that each of the other ranks has done.
            theirs: Entry ``"ranks"`` of their state.

        Raises:
            ArgumentError: If ``theirs`` is no such entry.
        """
        return 0 < batch == self._read(batch, theirs)[2]

    def _read(self, batch: int, theirs: Mapping[str, Any]) -> tuple[int, Progress, int]:
        """Read the entry ``"ranks"`` of a state.

        Returns:
            The number of ranks, the positions done before them, and the most batches that one of
            them has.
        """
        try:
            world_size = int(theirs["world_size"])
            done = tuple((int(a), int(n)) for a, n in theirs["done"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a feeder with ranks= ({error!r}); expected what state_dict() "
                "returned"
            ) from None
        if (
            world_size < 1
            or any(a < 1 or n < 0 for a, n in done)
            or (self._share.ranks.split_batches and self._share.size % world_size)
        ):
            raise ArgumentError(
                f"not a state of a feeder with ranks=: {dict(theirs)!r}; expected what "
                "state_dict() returned"
            )
        n = self._most(world_size, done)
        if not 0 <= batch <= n:
            raise ArgumentError(
                f"a state of batch {batch}; {world_size} ranks have {n} batches of what they were "
                "given in that epoch"
            )
        return world_size, done, n

    def _most(self, world_size: int, done: Progress = ()) -> int:
        """Return the most batches that a rank has."""
        # No rank has more than the first one.
        return len(self._share.of(0, world_size).batches(self._n_rows, done))

    def _batches(self, epoch: int) -> OrderBatches:
        return self._share.batches(self._n_rows, self._done(epoch))

    def _done(self, epoch: int) -> Progress:
        return self._begun[1] if epoch == self._begun[0] else ()
