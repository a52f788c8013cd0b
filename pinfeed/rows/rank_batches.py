"""RankBatches: the batches of one rank, which any number of ranks can resume."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, cast, get_args

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import OrderBatches, RowBatches, RowIndices, saved_size
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.orders import Order, UserOrder, known
from pinfeed.rows.ranks import PerRank, Progress, Ranks, Uneven, world
from pinfeed.rows.windows import Windows

logger = logging.getLogger("pinfeed")


@dataclass(eq=False)
class RankBatches(RowBatches):
    """The batches of one rank.

    If other ranks have read a part of an epoch, the epoch consists of the remaining rows. All
    ranks, and jobs with any number of ranks, can load the state of any rank.

    Args:
        order: Order of all rows.
        ranks: The user's choice of how ranks share an epoch.
        rank: Number of the rank.
        world_size: Number of ranks.
        drop_last: Whether to leave out a last batch that is not full.
        size: Rows per batch, of each rank or, with ``ranks.split_batches``, of all ranks together.
        n_rows: Number of rows in the stores; 0 before it is known.
    """

    order: Order
    ranks: Ranks
    rank: int
    world_size: int
    drop_last: bool
    size: int
    n_rows: int = 0
    # An epoch, and its positions that other ranks have done.
    _begun: tuple[int, Progress] = field(default=(0, ()), init=False)

    kind = "a feeder with ranks="
    state_keys = ("ranks",)
    changeable = ("batch_size",)

    @property
    def batch_size(self) -> int:
        """Rows per batch of this rank."""
        return self.size // self.world_size if self.ranks.split_batches else self.size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that determine the row order; rank and world size are not among them."""
        return {
            "order": repr(self.order),
            "n_rows": self.n_rows,
            "batch_size": self.size,
            "drop_last": self.drop_last,
            "ranks": self.ranks.uneven,
            "split_batches": self.ranks.split_batches,
        }

    def rows(self, done: Progress = ()) -> PerRank:
        """Return the order of this rank's rows.

        Args:
            done: Positions of the epoch that are already done.
        """
        order = known(self.order)
        in_one = order.in_blocks and not self.ranks.split_batches
        chunk = None if in_one else self.batch_size
        return PerRank(order, self.rank, self.world_size, self.ranks.uneven, chunk, done)

    def batches(self, done: Progress = ()) -> OrderBatches:
        """Return the batches of an epoch of which the positions ``done`` are already done."""
        return OrderBatches(self.rows(done), self.n_rows, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        return len(self.batches())

    def n_batches(self, epoch: int) -> int:
        return len(self.batches(self._done(epoch)))

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        return self.batches(self._done(number)).epoch(number, start, checksum, batches_per_slot)

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return self.batches(self._done(number)).windows(number, start)

    def begin(self, epoch: int, done: Progress) -> None:
        """Set the positions of an epoch that other ranks have done; no other epoch was begun."""
        self._begun = epoch, done

    def restart(self, epoch: int) -> None:
        self.begin(epoch, ())

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the position after ``batch`` batches of an epoch, as plain values.

        The state after the end of an epoch contains no positions of other ranks.
        """
        world_size = self.world_size
        done = self._done(epoch)
        if done and batch == self._most(world_size, done):
            batch = self._most(world_size)
            done = ()
        return {
            "batch": batch,
            "ranks": {"world_size": world_size, "done": [list(part) for part in done]},
        }

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        size = saved_size(state)
        batch, done, is_over = self.resumed(int(state["batch"]), state["ranks"], size)
        self.begin(int(state["epoch"]), done)
        return batch, is_over

    def resumed(
        self, batch: int, theirs: Mapping[str, Any], size: int
    ) -> tuple[int, Progress, bool]:
        """Translate the position of other ranks into a position of this rank.

        Args:
            batch: Number of batches that each of the other ranks has done.
            theirs: Entry ``"ranks"`` of their state.
            size: Their ``size``.

        Returns:
            The batch of this rank to begin with, the positions that were done before, and whether
            the epoch is over.

        Raises:
            ArgumentError: If ``theirs`` is not such an entry, or their epoch has no such batch.
        """
        world_size, done = self._read(theirs, size)
        n = dataclasses.replace(self, size=size)._most(world_size, done)
        if not 0 <= batch <= n:
            raise ArgumentError(
                f"the state is at batch {batch}; expected 0 to {n}, the number of batches of each "
                f"of the {world_size} ranks in that epoch"
            )
        if batch == n:
            return len(self), (), bool(batch or done)
        is_split = self.ranks.split_batches
        same_batches = size == self.size and (world_size == self.world_size or is_split)
        if batch and not same_batches:
            # The rows of a global batch are all read, by however many ranks.
            done = (*done, (1 if is_split else world_size, batch * size))
            batch = 0
        if (batch or done) and batch == self._most(self.world_size, done):
            # Too few rows are left for a batch of every rank.
            return len(self), (), True
        return batch, done, False

    def _read(self, theirs: Mapping[str, Any], size: int) -> tuple[int, Progress]:
        """Read the entry ``"ranks"`` of a state: the ranks, and the positions done before them."""
        try:
            world_size = int(theirs["world_size"])
            done = tuple((int(a), int(n)) for a, n in theirs["done"])
            if world_size < 1 or any(a < 1 or n < 0 for a, n in done):
                raise ValueError("negative numbers")
            if self.ranks.split_batches and size % world_size:
                raise ValueError(f"{size} rows for {world_size} ranks")
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a feeder with ranks= ({error!r}): {theirs!r}; expected the result "
                "of state_dict()"
            ) from None
        return world_size, done

    def _most(self, world_size: int, done: Progress = ()) -> int:
        """Return the most batches that a rank has."""
        # No rank has more than the first one.
        return len(dataclasses.replace(self, rank=0, world_size=world_size).batches(done))

    def _done(self, epoch: int) -> Progress:
        return self._begun[1] if epoch == self._begun[0] else ()


def batches_of_rank(
    ranks: Ranks | str | None, order: Any, drop_last: bool, size: int | None, size_name: str
) -> RankBatches | None:
    """Return the batches of this process, without ``n_rows``; None if it reads all rows.

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
    shared, rank, world_size = check_ranks(ranks, order, drop_last)
    if size is None:
        raise ArgumentError(
            "ranks= needs batches of the same size on all ranks; set preferred_batch_size in the "
            "config, or give batch_size"
        )
    if shared.split_batches and size % world_size:
        below = size // world_size * world_size
        above = below + world_size
        raise ArgumentError(
            f"{size_name}={size} cannot be split among {world_size} ranks; expected a multiple of "
            f"{world_size}: {f'{below} or ' if below else ''}{above}"
        )
    return RankBatches(order, shared, rank, world_size, drop_last, index(size))


def check_ranks(ranks: Any, order: Any, drop_last: bool) -> tuple[Ranks, int, int]:
    """Check that the arguments agree.

    Args:
        ranks: The user's argument ``ranks``, neither None nor ``"all"``.
        order: Order of the rows of all ranks.
        drop_last: Whether the batches leave out rows.

    Returns:
        The argument as ``Ranks``, the rank of this process, and the number of ranks.

    Raises:
        ArgumentError: If the arguments conflict, or ``order`` cannot be shared.
    """
    is_name = isinstance(ranks, str) and ranks in get_args(Uneven)
    if not is_name and not isinstance(ranks, Ranks):
        raise ArgumentError(
            f"ranks={ranks!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
        )
    shared = ranks if isinstance(ranks, Ranks) else Ranks(cast(Uneven, ranks))
    if isinstance(order, PerRank):
        raise ArgumentError(
            "per_rank(...) is already the share of one rank, and ranks= would divide it again; "
            "give one of them"
        )
    if not isinstance(order, Order):
        raise ArgumentError(
            f"ranks={ranks!r} divides orders of pinfeed.rows, but rows is a "
            f"{type(order).__name__}, which decides on its own what a process reads; leave ranks= "
            "out, and give an array as rows[rank::world_size]"
        )
    if drop_last and shared.uneven == "join":
        raise ArgumentError(
            "ranks='join' reads every row once, but drop_last=True leaves rows out; give one of "
            "them, or ranks='drop'"
        )
    rank, world_size = shared.rank, shared.world_size
    if rank is None or world_size is None:
        rank, world_size = world()
    return shared, index(rank), index(world_size)


def note_workers(ranks: Ranks | str | None, order: Any) -> None:
    """Warn, once, if several worker processes of a DataLoader each loop over all rows.

    Called in the worker process when a loop begins.

    Args:
        ranks: The user's argument. ``"all"`` requests all rows in every process. Explicit ranks may
            be those of the worker processes.
        order: The user's argument ``rows``. Anything but an order of all rows may be a worker's
            own.
    """
    # A worker process has imported this module.
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is None or info.num_workers < 2 or info.id != 0:
        return
    is_meant = ranks == "all" or (isinstance(ranks, Ranks) and ranks.rank is not None)
    if not is_meant and _has_all_rows(order):
        _warn_once(
            "each of the %(n)d worker processes of a DataLoader loops over all rows of its feeder; "
            "if these are the same rows, each row occurs %(n)d times. Give each worker its part "
            "with ranks=pinfeed.Ranks('join', rank=info.id, world_size=info.num_workers) and info "
            "= torch.utils.data.get_worker_info(), or loop over the feeder in the main process, "
            "where it prefetches with threads. If this is intended, give ranks='all'",
            info.num_workers,
        )


def note_processes(order: Any) -> None:
    """Warn, once, if several processes of a job each loop over all rows and no ranks were given."""
    if not _has_all_rows(order):
        return
    # The user has not requested ranks, so an invalid environment is no error.
    with contextlib.suppress(ArgumentError):
        rank, world_size = world()
        if world_size > 1 and rank == 0:
            _warn_once(
                "each of the %(n)d processes iterates the same rows. ranks='pad' (or 'drop', "
                "'join') gives each process its share. If this is intended, give ranks='all'",
                world_size,
            )


def _has_all_rows(rows: Any) -> bool:
    """Return whether every process has the same rows of an order, or of batches of an order.

    An order of the user may be the share of one process.
    """
    order = rows.order if isinstance(rows, LengthBatches) else rows
    return not isinstance(known(order), UserOrder | PerRank)


@functools.cache
def _warn_once(text: str, n: int) -> None:
    logger.warning(text, {"n": n})
