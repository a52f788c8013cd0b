"""Shares: what one rank has of the epochs of an order, and where it goes on when there are more or fewer of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pinfeed.errors import ArgumentError, BudgetError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.epochs import EpochRunner, SamplerEpochRunner
from pinfeed.rows.batches import Draw, OrderBatches, RowBatches, SamplerBatches
from pinfeed.rows.orders import BlockShuffled, Order, PerRank, Sequential, Shuffled
from pinfeed.rows.rank_partition import Progress, Uneven
from pinfeed.rows.ranks import Ranks, world
from pinfeed.rows.windows import Windows

logger = logging.getLogger("pinfeed")


def share_of(
    ranks: Ranks | str | None,
    order: Any,
    drop_last: bool,
    batch_size: int | None,
    config: MemoryLimits | None,
) -> RankShard | None:
    """This process's share, as a user's argument says; None if it has all rows.

    Args:
        ranks: The argument.
        order: Which rows, as the user says.
        drop_last: Whether a last batch that is not full is left out.
        batch_size: Of each rank, or of all of them.
        config: Whose preferred batch size it is, without ``batch_size``.

    Raises:
        ArgumentError: It cannot be shared in this way.
    """
    if ranks is None:
        if isinstance(order, (Sequential, Shuffled, BlockShuffled)):
            _note_that_all_have_all()
        return None
    if ranks == "all":
        return None
    if not isinstance(ranks, (str, Ranks)):
        raise ArgumentError(
            f"ranks={ranks!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
        )
    # Which checks it
    wanted = ranks if isinstance(ranks, Ranks) else Ranks(cast(Uneven, ranks))
    if isinstance(order, PerRank):
        raise ArgumentError(
            "rows=per_rank(...) is the share of one rank already, and ranks= would share it again; give one of them"
        )
    if not isinstance(order, Order):
        raise ArgumentError(
            f"ranks={ranks!r} shares orders of pinfeed.rows, and rows is a {type(order).__name__}, which says itself what a process has; "
            "leave ranks= out (a DistributedSampler shares by itself; of an array, give rows=array[rank::world_size])"
        )
    if drop_last and wanted.uneven == "join":
        raise ArgumentError(
            "ranks='join' gives every row once and drop_last=True leaves rows out; give one of them, or ranks='drop'"
        )
    size, name = (
        (batch_size, "batch_size")
        if config is None
        else (config.preferred_batch_size, "preferred_batch_size")
    )
    if size is None:
        raise ArgumentError(
            "ranks= needs batches of one size on all ranks; give the config a preferred_batch_size (or give batch_size)"
        )
    rank, world_size = (
        world()
        if wanted.rank is None or wanted.world_size is None
        else (wanted.rank, wanted.world_size)
    )
    if wanted.split_batches and size % world_size:
        below, above = size // world_size * world_size, -(-size // world_size) * world_size
        raise ArgumentError(
            f"{name}={size} is to be split among {world_size} ranks; expected a multiple of that: {below or above}"
            + (f" or {above}" if below else "")
        )
    return RankShard(
        order,
        wanted,
        operator.index(rank),
        operator.index(world_size),
        drop_last,
        operator.index(size),
    )


@dataclass(frozen=True)
class RankShard:
    """What one rank has of the epochs of an order.

    Args:
        order: Of all rows.
        ranks: How it is shared.
        rank: Whose share it is.
        world_size: Ranks.
        drop_last: Whether a last batch that is not full is left out.
        size: Rows of a batch, of each rank or of all of them.
    """

    order: Order
    ranks: Ranks
    rank: int
    world_size: int
    drop_last: bool
    size: int

    def of(self, rank: int, world_size: int) -> RankShard:
        """The share of another rank, among others."""
        return dataclasses.replace(self, rank=rank, world_size=world_size)

    @property
    def batch_size(self) -> int:
        """Rows of this rank's batches."""
        return self.size // self.world_size if self.ranks.split_batches else self.size

    def config(self, config: MemoryLimits | None) -> MemoryLimits | None:
        """``config`` for this rank's batches; it may have found that smaller ones fit."""
        if config is None:
            return None
        return dataclasses.replace(
            config,
            preferred_batch_size=min(
                self.batch_size, config.preferred_batch_size or self.batch_size
            ),
        )

    def rows(self, done: Progress = ()) -> PerRank:
        """The rows of this rank, in its order."""
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
        """The batches of this rank."""
        return OrderBatches(self.rows(done), n_rows, self.batch_size, self.drop_last)

    def planned(self, plan: Plan, n_rows: int) -> Plan:
        """The plan of this rank, which says so.

        Raises:
            BudgetError: Its batches are smaller than those of other ranks.
        """
        mine, of_all = self.rows().length(n_rows), self.order.length(n_rows)
        if plan.batch_size < min(self.batch_size, mine):
            raise BudgetError(
                f"the limits of config hold batches of {plan.batch_size} rows on rank {self.rank}, and all ranks need batches of "
                f"{self.batch_size}; raise the limits or lower preferred_batch_size"
            )
        note = (
            f"rank {self.rank} of {self.world_size}: {mine} of {of_all} rows ({self.ranks.uneven})"
        )
        if self.ranks.split_batches:
            note += f", its part of global batches of {self.size} rows"
            if isinstance(self.order, BlockShuffled) and self.world_size > 1:
                note += "; every rank reads every block (without split_batches, each reads blocks of its own)"
        return dataclasses.replace(plan, notes=(note, *plan.notes))


class RankBatches:
    """The batches of one rank; those of an epoch that other ranks have begun are of the rest.

    Args:
        share: Whose they are.
        n_rows: Rows that there are.
    """

    def __init__(self, share: RankShard, n_rows: int) -> None:
        self._share = share
        self._n_rows = n_rows
        # An epoch, and what has been done of it by others.
        self._begun: tuple[int, Progress] = (0, ())
        self.batch_size = share.batch_size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What makes the order: rank and world size do not."""
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
    ) -> Iterator[Draw]:
        return self._batches(number).epoch(number, start, checksum, batches_per_slot)

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return self._batches(number).windows(number, start)

    def begin(self, epoch: int, done: Progress) -> None:
        """Let others have done what they have of an epoch; of all others nothing has been done."""
        self._begun = epoch, done

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """After ``batch`` batches of an epoch: that number and who has it, as plain values; done, it is as if nobody had begun it."""
        world_size, done = self._share.world_size, self._done(epoch)
        if done and batch == self._most(world_size, done):
            batch, done = self._most(world_size), ()
        return {
            "batch": batch,
            "ranks": {"world_size": world_size, "done": [list(part) for part in done]},
        }

    def resumed(self, batch: int, theirs: Mapping[str, Any]) -> tuple[int, Progress]:
        """Where to go on after ``batch`` batches of ranks whose state is ``theirs``: a batch of this rank's, and what was done before.

        Raises:
            ArgumentError: It is no such state.
        """
        world_size, done, n = self._read(batch, theirs)
        if batch == n:
            return len(self), ()
        if world_size == self._share.world_size or self._share.ranks.split_batches or batch == 0:
            return batch, done
        return 0, (*done, (world_size, batch * self.batch_size))

    def is_whole(self, batch: int, theirs: Mapping[str, Any]) -> bool:
        """Whether no rank has anything left of an epoch after ``batch`` batches of ranks whose state is ``theirs``.

        Raises:
            ArgumentError: If it is no such state.
        """
        return 0 < batch == self._read(batch, theirs)[2]

    def _read(self, batch: int, theirs: Mapping[str, Any]) -> tuple[int, Progress, int]:
        """Read a state: the number of ranks, what had been done before them, and the batches that each of them has, at most."""
        try:
            world_size, done = (
                int(theirs["world_size"]),
                tuple((int(a), int(n)) for a, n in theirs["done"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a feeder with ranks= ({error!r}); expected what state_dict() returned"
            ) from None
        if (
            world_size < 1
            or any(a < 1 or n < 0 for a, n in done)
            or (self._share.ranks.split_batches and self._share.size % world_size)
        ):
            raise ArgumentError(
                f"not a state of a feeder with ranks=: {dict(theirs)!r}; expected what state_dict() returned"
            )
        n = self._most(world_size, done)
        if not 0 <= batch <= n:
            raise ArgumentError(
                f"a state of batch {batch}; {world_size} ranks have {n} batches of what they were given in that epoch"
            )
        return world_size, done, n

    def _most(self, world_size: int, done: Progress = ()) -> int:
        """Batches of a rank, at most."""
        # The first has as many as any.
        return len(self._share.of(0, world_size).batches(self._n_rows, done))

    def _batches(self, epoch: int) -> OrderBatches:
        return self._share.batches(self._n_rows, self._done(epoch))

    def _done(self, epoch: int) -> Progress:
        return self._begun[1] if epoch == self._begun[0] else ()


class RankEpochRunner(EpochRunner):
    """The epochs of one rank's share: a state of any rank is one of all of them, and of other ranks, too."""

    def __init__(self, *args: Any, batches: RankBatches, **options: Any) -> None:
        super().__init__(*args, **options)
        self._batches = batches

    def _begin_at(self, epoch: int) -> None:
        super()._begin_at(epoch)
        self._batches.begin(epoch, ())

    def state(self) -> dict[str, Any]:
        state = super().state()
        return {**state, **self._batches.state(state["epoch"], state["batch"])}

    def load_state(self, state: Mapping[str, Any]) -> None:
        try:
            epoch = int(state["epoch"])
            batch = int(state["batch"])
            source = dict(state["source"])
            theirs = state["ranks"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a feeder with ranks= ({error!r}); expected what state_dict() returned"
            ) from None
        ours = source == dict(self.source.fingerprint)
        here, done = self._batches.resumed(batch, theirs) if ours else (batch, ())
        is_whole = ours and self._batches.is_whole(batch, theirs)
        if is_whole:
            epoch, here = epoch + 1, 0
        # Which refuses that of another source.
        super().load_state({**state, "epoch": epoch, "batch": here})
        self._whole = epoch - 1 if is_whole else None
        self._batches.begin(self.epoch, done)

    def _is_whole(self, n_batches: int) -> bool:
        # Others may have one more: that is told by the state.
        return False


def loop_over(batches: RowBatches) -> Callable[..., EpochRunner]:
    """What makes the loop of a source with these batches."""
    if isinstance(batches, RankBatches):
        return functools.partial(RankEpochRunner, batches=batches)
    return (
        functools.partial(SamplerEpochRunner, batches=batches)
        if isinstance(batches, SamplerBatches)
        else EpochRunner
    )


def note_workers(ranks: Ranks | str | None, order: Any) -> None:
    """Warn, once, where several worker processes of a DataLoader each loop over all rows.

    In the worker process, when a loop begins.

    Args:
        ranks: As the user gave it. ``"all"`` says that it is meant so; explicit ranks may be those
            of the workers.
        order: Which rows, as the user says; what is no order of all rows may be a worker's own.
    """
    # A worker process has loaded it.
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is None or info.num_workers < 2 or info.id != 0:
        return
    is_meant = ranks == "all" or (isinstance(ranks, Ranks) and ranks.rank is not None)
    if not is_meant and isinstance(order, (Sequential, Shuffled, BlockShuffled)):
        _warn_of_workers(info.num_workers)


@functools.cache
def _warn_of_workers(num_workers: int) -> None:
    logger.warning(
        "each of the %d worker processes of a DataLoader loops over all rows of its feeder: if these are the same rows, each comes %d "
        "times; give each worker its part, ranks=pinfeed.Ranks('join', rank=info.id, world_size=info.num_workers) with "
        "info = torch.utils.data.get_worker_info(), or loop over the feeder in the main process, where it reads ahead in threads; "
        "ranks='all' says that it is meant so",
        num_workers,
        num_workers,
    )


def _note_that_all_have_all() -> None:
    with contextlib.suppress(ArgumentError):
        # Nobody has asked for ranks.
        rank, world_size = world()
        if world_size > 1 and rank == 0:
            _warn_once(world_size)


@functools.cache
def _warn_once(world_size: int) -> None:
    logger.warning(
        "each of the %d processes iterates all rows; ranks='pad' (or 'drop', 'join') gives each its share, ranks='all' says it is meant so",
        world_size,
    )
