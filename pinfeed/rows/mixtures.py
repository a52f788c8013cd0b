"""mixed(): an order that draws rows from several sources by weight."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.rows.interleaving import Interleaving, ShuffledTurns, whole_weights
from pinfeed.rows.orders import At, KnownOrder, Order, Rows, Shuffled, by_window, check_n_rows
from pinfeed.rows.ranks import check_inner
from pinfeed.rows.windows import Interval, Window, Windows
from pinfeed.validation.arguments import check_flag, check_seed, whole_number

Until = Literal["first", "all"] | int
"""The end of an epoch."""


def mixed(
    sources: Mapping[str, object],
    weights: Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]] | None = None,
    *,
    until: Until = "first",
    order: Order | Mapping[str, Order] | None = None,
    batch_size: int | None = None,
    randomly: bool = False,
    seed: int = 0,
) -> Mixed:
    """Return an order that draws rows from several sources by weight.

    Give the feeder the same sources one after the other: ``pinfeed.concat(sources)``. Within a pass
    over a source, each row occurs once. The order of its next pass is that of its next epoch.

    The sources take turns as evenly as possible: any window of positions has less than
    ``ceil(log2(n_sources))`` rows of a source more or less than its exact share. Every batch
    therefore has the proportions of the weights, without the noise of random draws.

    The position in an epoch is the whole state. Any position is computed without the earlier ones.

    Args:
        sources: The sources by name, in the order in which they are concatenated: the number of
            rows, or an object with rows such as a store, an array or a structure of these.
        weights: Share of each source in the rows, in any unit. A sequence
            ``[(0, weights), (100_000, other), ...]`` changes them at these positions of an epoch
            or, if ``until`` is a number, of the run: of all epochs one after the other. None makes
            shares proportional to the numbers of rows.
        until: End of an epoch. ``"first"`` ends it before the first position for which its source
            has no unseen row. ``"all"`` ends it when all rows were seen; smaller sources begin new
            passes. A number is the number of rows of an epoch; the sources continue where the last
            epoch ended, so that short epochs use all rows of large sources.
        order: Order of the rows within each source, one for all or one for each name. None shuffles
            each with a seed of its own, ``seed + number``.
        batch_size: Number of consecutive rows from the same source. Give the batch size of the
            feeder, of each rank, for batches from one source each. By default, batches mix rows.
        randomly: Whether the turns are shuffled within windows of 4,096 turns, so that batches
            differ in their proportions as random draws do.
        seed: Seed of the default ``order``, and of ``randomly``.

    Raises:
        ArgumentError: If an argument is invalid, or an epoch would never end.

    Examples:
        >>> sources = {"web": np.arange(700), "code": np.arange(5000, 5300)}
        >>> order = pinfeed.rows.mixed(sources, weights={"web": 3, "code": 1}, until=400)
        >>> rows = order.bind(n_rows=1000, epoch=0)(np.arange(400))
        >>> names = [order.names[number] for number in order.source_of(rows)]
        >>> names.count("web"), names.count("code")
        (300, 100)
        >>> feeder = pinfeed.Feeder(pinfeed.concat(sources), batch_size=40, rows=order)
    """
    _check_sources(sources)
    check_flag(randomly, "randomly")
    seed = check_seed(seed)
    names = tuple(sources)
    sizes = tuple(n_rows_of(source, f"sources[{name!r}]") for name, source in sources.items())
    orders = _orders(order, names, seed)
    run = 1 if batch_size is None else whole_number(batch_size, "batch_size")
    n_draws = _n_draws(names, sizes, orders)
    given = dict(zip(names, n_draws, strict=True)) if weights is None else weights
    turns = Interleaving(_table(given, names, run))
    end: Until = until if until in ("first", "all") else _epoch_rows(until, run)
    made = Mixed(names, sizes, orders, n_draws, turns, end, run, seed if randomly else None)
    # An epoch must end, and have a whole turn of each source.
    made.length(sum(sizes))
    return made


@dataclass(frozen=True)
class Mixed(KnownOrder):
    """Rows of several sources that take turns by weight."""

    names: tuple[str, ...]
    """Names of the sources."""
    sizes: tuple[int, ...]
    """Number of rows of each source."""
    orders: tuple[KnownOrder, ...]
    """Order of the rows of each source."""
    n_draws: tuple[int, ...]
    """Number of rows of a pass over each source."""
    turns: Interleaving
    """The sources of turns, before these are shuffled."""
    until: Until
    batch_size: int
    """Number of consecutive rows from the same source, which are one turn."""
    seed: int | None
    """Seed of random turns; None for even turns."""

    def length(self, n_rows: int) -> int:
        self._require(n_rows)
        return self._length

    def bind(self, n_rows: int, epoch: int) -> At:
        self._require(n_rows)
        start = self._start(epoch)
        turns = self._turns_of(epoch)
        sources = [source.bind() for source in self._sources(epoch)]
        run = self.batch_size

        def at(positions: Rows) -> Rows:
            places = positions + start
            rows = np.empty(len(places), np.int64)
            if run == 1:
                for number, where, before in turns.groups(places):
                    rows[where] = sources[number](before)
                return rows
            turn = places // run
            offset = places - turn * run
            for number, where, before in turns.groups(turn):
                rows[where] = sources[number](before * run + offset[where])
            return rows

        return at

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        self._require(n_rows)
        sources = tuple(one for one in self._sources(epoch) if one.windows_of(0) is not None)
        if not sources:
            return None
        turns = self._turns_of(epoch)
        start = self._start(epoch)
        return MixedWindows(sources, turns, self.batch_size, start, self._length).windows()

    def source_of(self, rows: Rows) -> Rows:
        """Return the number of the source of each row index, a position in ``names``."""
        return self._ends.searchsorted(rows, side="right")

    @property
    def parts(self) -> tuple[KnownOrder, ...]:
        return self.orders

    @property
    def most_copies(self) -> int | None:
        most = 0
        for order, n, n_passes in zip(self.orders, self.n_draws, self._n_passes, strict=True):
            copies = order.most_copies
            if copies is None:
                return None
            # An epoch of a number of rows may begin and end within a pass.
            passes = -(-self.until // n) + 1 if isinstance(self.until, int) else n_passes
            most = max(most, copies * passes)
        return most

    @functools.cached_property
    def _ends(self) -> Rows:
        """Row after the last one of each source, shape (n_sources,)."""
        return np.cumsum(self.sizes)

    def _turns_of(self, epoch: int) -> Interleaving | ShuffledTurns:
        """Return the turns of an epoch."""
        if self.seed is None:
            return self.turns
        # Turns of an endless run do not depend on its division into epochs.
        if self._is_endless:
            return ShuffledTurns(self.turns, f"{self.seed}/turns", None)
        return ShuffledTurns(self.turns, f"{self.seed}/{epoch}/turns", self._n_turns)

    def _start(self, epoch: int) -> int:
        """Return the place of position 0 of an epoch in the sequence of all turns."""
        return epoch * self.until if isinstance(self.until, int) else 0

    @property
    def _is_endless(self) -> bool:
        """Whether the sources continue in the next epoch where they stopped."""
        return isinstance(self.until, int)

    @property
    def _length(self) -> int:
        """Number of rows of an epoch."""
        return self.until if isinstance(self.until, int) else self._n_turns * self.batch_size

    @functools.cached_property
    def _n_turns(self) -> int:
        """Number of turns of an epoch that the rows of the sources end."""
        run = self.batch_size
        if self.until == "first":
            short = min(self.n_draws)
            if short < run:
                raise ArgumentError(
                    f"until='first': source {self.names[self.n_draws.index(short)]!r} has {short} "
                    f"rows, fewer than batch_size={run}; give a smaller batch_size, or until='all'"
                )
            # A source with n rows cannot take turn n // run + 1.
            ends = [self.turns.place(i, n // run) for i, n in enumerate(self.n_draws)]
            return min(end for end in ends if end is not None)
        lasts = [self.turns.place(i, -(-n // run) - 1) for i, n in enumerate(self.n_draws)]
        for name, last in zip(self.names, lasts, strict=True):
            if last is None:
                raise ArgumentError(
                    f"until='all': the weights are 0 for source {name!r} before all of its rows "
                    "were seen, so an epoch would not end; expected a weight above 0; give one, or "
                    "leave out the source"
                )
        return max(last for last in lasts if last is not None) + 1

    @functools.cached_property
    def _n_passes(self) -> list[int]:
        """Number of passes over each source that an epoch begins; each has its own order."""
        if self._is_endless:
            return [1] * len(self.names)
        counts = [self.turns.before(i, self._n_turns) for i in range(len(self.names))]
        pairs = zip(counts, self.n_draws, strict=True)
        return [max(1, -(-count * self.batch_size // n)) for count, n in pairs]

    def _sources(self, epoch: int) -> list[MixedSource]:
        """Return the sources in an epoch.

        Pass ``k`` of a source has the order of epoch ``epoch * n_passes + k``, or of epoch ``k`` if
        the sources continue over epochs.
        """
        return [
            MixedSource(
                number,
                self.orders[number],
                size,
                first_row=self._ends.item(number) - size,
                n_draws=self.n_draws[number],
                first_pass=0 if self._is_endless else epoch * self._n_passes[number],
                is_repeated=self._is_endless or self._n_passes[number] > 1,
            )
            for number, size in enumerate(self.sizes)
        ]

    def _require(self, n_rows: int) -> None:
        sizes = ", ".join(f"{a} {n:,}" for a, n in zip(self.names, self.sizes, strict=True))
        text = f"mixed(...) has sources ({sizes}) of together"
        advice = "the same sources; give pinfeed.concat(sources) to the feeder"
        check_n_rows(n_rows, sum(self.sizes), text, advice)


def _check_sources(sources: Any) -> None:
    is_named = isinstance(sources, Mapping) and all(isinstance(name, str) for name in sources)
    if not is_named or not sources:
        raise ArgumentError(
            f"sources={sources!r}: expected {{name: source or number of rows, ...}}"
        )


def n_rows_of(source: Any, name: str) -> int:
    """Return the number of rows of a source, or the number that is given for it.

    Raises:
        ArgumentError: If it is neither, or has no rows.
    """
    if isinstance(source, (str, bytes)) or hasattr(source, "__fspath__"):
        raise ArgumentError(
            f"{name}={source!r}: expected a number of rows, a store or an array; open the file: "
            "pinfeed.NpyStore(path)"
        )
    if isinstance(source, (Mapping, tuple, list)) and not hasattr(source, "n_rows"):
        # A structure of sources, all of which have equally many rows.
        parts = list(source.values() if isinstance(source, Mapping) else source)
        if not parts:
            raise ArgumentError(f"{name}={source!r}: expected at least one source")
        return n_rows_of(parts[0], name)
    n = getattr(source, "n_rows", None)
    if n is None:
        n = len(source) if hasattr(source, "__len__") else source
    if not hasattr(n, "__index__"):
        raise ArgumentError(f"{name}={source!r}: expected a number of rows, a store or an array")
    return whole_number(n, f"{name}: n_rows")


def _orders(order: Any, names: Sequence[str], seed: int) -> tuple[KnownOrder, ...]:
    """Return the order of the rows of each source."""
    if order is None:
        # With equal seeds, sources of equal sizes would be shuffled alike.
        return tuple(Shuffled(seed + number) for number in range(len(names)))
    if not isinstance(order, Mapping):
        return (check_inner(order),) * len(names)
    if set(order) != set(names):
        raise ArgumentError(
            f"order has the names {', '.join(map(repr, order))}; expected an order for each of "
            f"{', '.join(map(repr, names))}"
        )
    return tuple(check_inner(order[name], f"order[{name!r}]") for name in names)


def _n_draws(
    names: Sequence[str], sizes: Sequence[int], orders: Sequence[KnownOrder]
) -> tuple[int, ...]:
    """Return the number of rows of a pass over each source."""
    found = []
    for name, size, order in zip(names, sizes, orders, strict=True):
        n = order.length(size)
        if n < 1:
            raise ArgumentError(
                f"source {name!r} has no rows in the order {order!r}; expected at least one row; "
                "leave out the source"
            )
        found.append(n)
    return tuple(found)


def _table(weights: Any, names: Sequence[str], run: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return turns of ``run`` rows, and the weights of the sources from there on."""
    if isinstance(weights, Mapping):
        return ((0, whole_weights(weights, names)),)
    try:
        parts = [(whole_number(start, "position", least=0), one) for start, one in weights]
    except (TypeError, ValueError):
        parts = []
    starts = [start for start, _ in parts]
    if not parts or starts[0] != 0 or sorted(set(starts)) != starts:
        raise ArgumentError(
            f"weights={weights!r}: expected {{name: weight}}, or a sequence of (position, "
            "{name: weight}) with ascending positions from 0 on"
        )
    if any(start % run for start in starts) or starts[-1] >= 1 << 60:
        raise ArgumentError(
            f"weights change at the positions {starts}; expected multiples of batch_size={run}, "
            "below 2**60"
        )
    return tuple((start // run, whole_weights(one, names)) for start, one in parts)


def _epoch_rows(until: Any, run: int) -> int:
    """Return the number of rows of an epoch, a multiple of ``run``."""
    if isinstance(until, str):
        raise ArgumentError(
            f"until={until!r}: expected 'first', 'all' or the number of rows of an epoch"
        )
    n = whole_number(until, "until", note=", or 'first' or 'all'")
    if n % run:
        raise ArgumentError(
            f"until={n} is not a multiple of batch_size={run}, so the next epoch would begin "
            f"within a batch; give {n - n % run or run}"
        )
    return n


# Orders of passes that are kept; a batch rarely needs more.
_N_KEPT = 64


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture in an epoch. Its draws are numbered through all of its passes."""

    number: int
    """Number of the source."""
    order: KnownOrder
    size: int
    """Number of rows of the source."""
    first_row: int
    """Row of the mixture that is the first row of the source."""
    n_draws: int
    """Number of rows of a pass."""
    first_pass: int
    """Epoch of ``order`` in the first pass."""
    is_repeated: bool
    """Whether an epoch may have rows of several passes."""

    def bind(self) -> At:
        """Return the function from draws to rows of the mixture."""

        def bind_pass(number: int) -> tuple[int, At]:
            at = self.order.bind(self.size, self.first_pass + number)
            return number * self.n_draws, lambda draws: at(draws) + self.first_row

        return by_window(lambda draws: draws // self.n_draws, bind_pass, _N_KEPT)

    def windows_of(self, number: int) -> Windows | None:
        """Return the windows of a pass, whose positions are draws of the pass; None without."""
        return self.order.windows(self.size, self.first_pass + number)

    @functools.cached_property
    def usual(self) -> Windows:
        """Windows of the first pass."""
        return self._windows(0)

    def most(self, n: int) -> int:
        """Return the most windows that ``n`` consecutive draws need."""
        if self.usual.is_single:
            return 1
        if not self.is_repeated:
            return self.usual.most(n)
        # As many draws as a pass has are in two passes, and the last window of the first one may be
        # short.
        n_spans = n // self.n_draws + 1
        return n_spans * (self.usual.most(min(n, self.n_draws)) + 1)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        """Yield the windows of the draws [start, stop); their positions are draws of all passes."""
        for number in range(start // self.n_draws, -(-stop // self.n_draws)):
            first = number * self.n_draws
            end = min(stop - first, self.n_draws)
            for window in self._windows(number).needed(max(0, start - first), end):
                yield Window(first + window.begin, first + window.end, self._shifted(window.runs))

    @property
    def all_runs(self) -> list[Interval]:
        """The rows of a source whose one window has all of them, and so serves all passes."""
        return self._shifted(next(self.usual.needed(0, 1)).runs)

    def _windows(self, number: int) -> Windows:
        found = self.windows_of(number)
        assert found is not None
        return found

    def _shifted(self, runs: Sequence[Interval]) -> list[Interval]:
        return [(self.first_row + start, self.first_row + stop) for start, stop in runs]


@dataclass(frozen=True)
class MixedWindows:
    """Windows of the sources of a mixture. Other sources have none."""

    sources: tuple[MixedSource, ...]
    """The sources with windows, at least one."""
    turns: Interleaving | ShuffledTurns
    batch_size: int
    """Number of consecutive rows from the same source."""
    start: int
    """Place of position 0 in the sequence of all turns."""
    length: int
    """Number of positions."""

    def windows(self) -> Windows:
        """Return the windows of the mixture."""
        usual = [source.usual for source in self.sources]
        return Windows(
            self._needed,
            self._most,
            max(one.window_rows for one in usual),
            min(one.block_rows for one in usual),
            n_ahead=sum(one.n_ahead for one in usual if not one.is_single),
        )

    def _most(self, n: int) -> int:
        return sum(source.most(min(n, self.length)) for source in self.sources)

    def _needed(self, start: int, stop: int) -> Iterator[Window]:
        stop = min(stop, self.length)
        streams = (self._of_source(source, start, stop) for source in self.sources)
        return heapq.merge(*streams, key=attrgetter("begin"))

    def _of_source(self, source: MixedSource, start: int, stop: int) -> Iterator[Window]:
        first, last = (self._n_draws(source.number, position) for position in (start, stop))
        if source.usual.is_single:
            if first < last:
                yield Window(0, self.length, source.all_runs)
            return
        for begin, end, runs in source.needed(first, last):
            yield Window(
                max(0, self._position(source.number, begin)),
                min(self.length, self._position(source.number, end - 1) + 1),
                runs,
            )

    def _n_draws(self, number: int, position: int) -> int:
        """Return the draws of a source before a position."""
        turn, offset = divmod(self.start + position, self.batch_size)
        before = self.turns.before(number, turn)
        # A turn that has begun is one of the source if there is one turn more after it.
        is_its = self.turns.before(number, turn + 1) > before
        return before * self.batch_size + offset * is_its

    def _position(self, number: int, draw: int) -> int:
        """Return the position of a draw; the length of the epoch if there is none."""
        turn, offset = divmod(draw, self.batch_size)
        place = self.turns.place(number, turn)
        if place is None:
            return self.length
        return place * self.batch_size + offset - self.start
