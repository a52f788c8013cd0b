"""SharedBatches: batches of ragged rows that ranks share; and the batches of this process.

``batches_of_rank`` and ``shared_batches`` check the arguments of the user together, and return the
batches of this process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, cast, get_args

from pinfeed.errors import ArgumentError, logger
from pinfeed.rows.length_batches import START, LengthBatches, Mark
from pinfeed.rows.order_batches import RankBatches, RowBatches, RowIndices
from pinfeed.rows.orders import Order, UserOrder, known
from pinfeed.rows.packed import Packed
from pinfeed.rows.ranks import PerRank, RankPartition, Ranks, Uneven, world
from pinfeed.rows.sampler_batches import SamplerEpochs
from pinfeed.rows.windows import Windows

# A state that needs an older mark has none, and so plans the epoch from its beginning.
_MOST_MARKS = 1 << 14


@dataclass(eq=False)
class SharedBatches(SamplerEpochs, RowBatches):
    """The batches of one rank.

    The units of an epoch (sequences of ``packed``, or batches of ``element_batches``) are divided
    into steps of ``n_each`` units for each rank, by ascending rank. The units after the last whole
    step are divided by the rule ``uneven``. A state counts units, so any number of ranks continues
    with the next one. It also has a mark, so that the epoch is planned only from there on.

    Args:
        rows: The units.
        rank: Number of the rank.
        world_size: Number of ranks.
        uneven: Treatment of units that do not divide evenly.
        n_each: Units of a batch of each rank.
    """

    rows: LengthBatches[Any]
    rank: int
    world_size: int
    uneven: Uneven
    n_each: int
    # A state shows whether its epoch is over.
    continues_after_end = False

    # An epoch, the unit with which its batch 0 begins, and a mark at or before the position.
    _begun: tuple[int, int, Mark] = field(default=(0, 0, START), init=False)
    # Marks of the epoch that was begun last; the reader thread appends them.
    _marks: tuple[int, deque[Mark]] = field(default=(0, deque()), init=False)

    def __post_init__(self) -> None:
        self._name = f"rows={self.rows.name}(...)"
        self._samplers = (self.rows,)
        self.kind = f"a feeder with {self._name}"
        self.state_keys = (self.rows.units_name,)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {**self.rows.fingerprint, "ranks": self.uneven}

    def __len__(self) -> int:
        raise TypeError(
            f"{self._name} has no len(), because the number of batches depends on the epoch; "
            f"{self.rows.name} has count(epoch) instead"
        )

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        """Yield the batches of an epoch; the order determines them, so there is no checksum."""
        self.epoch_changed(number)
        begun, mark = self._position(number)
        first = begun + start * self._n_all
        marks: deque[Mark] = deque([mark], _MOST_MARKS)
        self._marks = number, marks
        units = self.rows.placed_units(number, mark, marks.append)
        position = self.rows.position_of(mark)
        for _, end in itertools.islice(units, first - mark.unit):
            position = end
        while step := list(itertools.islice(units, self._n_all)):
            begin = position
            _, position = step[-1]
            if share := self._share(number, [unit for unit, _ in step]):
                rows = self.rows.rows_of(share)
                places = self.rows.places_of(share)
                batches = [(len(rows), 0)]
                n = position - begin
                yield RowIndices(len(rows), batches, lambda rows=rows: rows, places, n)  # type: ignore[misc]

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        begun, mark = self._position(number)
        return self.rows.windows(number, begun + start * self._n_all, mark)

    def restart(self, epoch: int) -> None:
        self._begun = epoch, 0, START

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the units of all ranks that are done, and the mark to resume with."""
        # An epoch whose first batch is still to come may be one that runs again.
        begun, mark = self._position(epoch) if batch else (0, START)
        done = begun + batch * self._n_all
        number, marks = self._marks
        if number == epoch:
            # The copy is atomic; the reader thread may append at the same time.
            mark = next((one for one in reversed(marks.copy()) if one.unit <= done), mark)
        return {self.rows.units_name: {"done": done, "mark": list(mark)}}

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        epoch = int(state["epoch"])
        batch = int(state["batch"])
        try:
            theirs = state[self.rows.units_name]
            done = int(theirs["done"])
            mark = Mark(*(int(number) for number in theirs["mark"]))
            is_position = batch >= 0 and done >= 0 and (batch > 0) == (done > 0)
            if not is_position or min(mark) < 0 or mark.unit > done:
                raise ValueError(f"no position: {dict(theirs)!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of {self.kind} ({error!r}); expected the result of state_dict()"
            ) from None
        # The number of batches stays the same, whatever the number of units of a batch.
        self._begun = epoch, done - batch * self._n_all, mark
        return batch, batch > 0 and self._is_over(epoch, done, mark)

    def _is_over(self, epoch: int, done: int, mark: Mark) -> bool:
        """Return whether no rank has a batch of an epoch after ``done`` units."""
        units = self.rows.units(epoch, mark)
        step = list(itertools.islice(units, done - mark.unit, done - mark.unit + self._n_all))
        # Only with "join", a rank may have no batch although others have one.
        return not step or (self.uneven != "join" and not self._share(epoch, step))

    @property
    def _n_all(self) -> int:
        """Units of a batch of all ranks together."""
        return self.n_each * self.world_size

    def _position(self, epoch: int) -> tuple[int, Mark]:
        """Return the unit with which batch 0 of an epoch begins, and a mark before the run."""
        return self._begun[1:] if epoch == self._begun[0] else (0, START)

    def _share(self, epoch: int, step: list[Any]) -> list[Any]:
        """Return this rank's units of a step, which is shorter at the end of the epoch.

        They are none if the rank has no batch.
        """
        if len(step) == self._n_all:
            return step[self.rank * self.n_each :][: self.n_each]
        partition = RankPartition(self.world_size, self.uneven, self.n_each)
        if self.uneven == "pad" and len(step) % self.world_size:
            first = self.rows.units(epoch)
            n_more = self.world_size - len(step) % self.world_size
            # An epoch with few units repeats them more than once.
            repeated = list(itertools.islice(first, n_more))
            step = step + list(itertools.islice(itertools.cycle(repeated), n_more))
        pieces = partition.pieces([(0, len(step))], len(step), self.rank)
        share = [step[piece.at(i)] for piece in pieces for i in range(piece.n)]
        return [] if self.rows.drop_last and len(share) < self.n_each else share


def shared_batches(rows: LengthBatches[Any], ranks: Ranks | str | None) -> SharedBatches:
    """Return the batches of this process.

    Args:
        rows: The units.
        ranks: The user's argument ``ranks``.

    Raises:
        ArgumentError: If the ranks cannot share the units.
    """
    shared = check_ranks(ranks, rows, rows.drop_last)
    if shared is None:
        return SharedBatches(rows, 0, 1, "join", rows.n_units)
    rule, rank, world_size = shared
    n_each = rows.n_units
    if rule.split_batches:
        if not isinstance(rows, Packed):
            raise ArgumentError(
                f"Ranks(split_batches=True) was given with rows={rows.name}(...), whose batches "
                "are limited by elements and cannot be cut into equal parts; leave out "
                "split_batches, and give max_elements for the batch of one rank"
            )
        n_each = _split(n_each, world_size, "batch_size")
    return SharedBatches(rows, rank, world_size, rule.uneven, n_each)


def _split(size: int, world_size: int, name: str) -> int:
    """Return the size of the batches of each rank, given that of all ranks together.

    Raises:
        ArgumentError: If the size, which is the argument ``name``, cannot be split.
    """
    n_each, rest = divmod(size, world_size)
    if rest:
        below = n_each * world_size
        raise ArgumentError(
            f"{name}={size} cannot be split among {world_size} ranks; expected a multiple of "
            f"{world_size}: {f'{below} or ' if below else ''}{below + world_size}"
        )
    return n_each


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
    shared = check_ranks(ranks, order, drop_last)
    if shared is None:
        return None
    if size is None:
        raise ArgumentError(
            "ranks= needs batches of the same size on all ranks; set preferred_batch_size in the "
            "config, or give batch_size"
        )
    rule, rank, world_size = shared
    if rule.split_batches:
        _split(size, world_size, size_name)
    return RankBatches(order, 0, index(size), drop_last, rule, rank, world_size)


def check_ranks(ranks: Any, rows: Any, drop_last: bool) -> tuple[Ranks, int, int] | None:
    """Check that the arguments agree, and warn if processes may read the same rows by mistake.

    Args:
        ranks: The user's argument ``ranks``.
        rows: Order of the rows of all ranks, or batches of such an order.
        drop_last: Whether the batches leave out rows.

    Returns:
        The argument as ``Ranks``, the rank of this process, and the number of ranks. None if this
        process reads all rows.

    Raises:
        ArgumentError: If the arguments conflict, or the order cannot be shared.
    """
    if ranks is None:
        note_processes(rows)
    if ranks is None or ranks == "all":
        return None
    order = _order_of(rows)
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
    return not isinstance(known(_order_of(rows)), UserOrder | PerRank)


def _order_of(rows: Any) -> Any:
    return rows.order if isinstance(rows, LengthBatches) else rows


@functools.cache
def _warn_once(text: str, n: int) -> None:
    logger.warning(text, {"n": n})
