"""MixedSource: a source of a mixture in one epoch, its rows and windows; MixedWindows."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pinfeed.rows.interleaving import Interleaving, ShuffledTurns
from pinfeed.rows.orders import At, KnownOrder, by_window
from pinfeed.rows.windows import Interval, Window, Windows

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

    n_blocks = 0
    # Other sources have no windows, and the windows of a mixture differ between epochs.
    is_single = False

    sources: tuple[MixedSource, ...]
    """The sources with windows, at least one."""
    turns: Interleaving | ShuffledTurns
    batch_size: int
    """Number of consecutive rows from the same source."""
    start: int
    """Place of position 0 in the sequence of all turns."""
    length: int
    """Number of positions."""

    @property
    def window_rows(self) -> int:
        return max(source.usual.window_rows for source in self.sources)

    @property
    def block_rows(self) -> int:
        return min(source.usual.block_rows for source in self.sources)

    @property
    def n_ahead(self) -> int:
        return sum(source.usual.n_ahead for source in self.sources if not source.usual.is_single)

    def most(self, n: int) -> int:
        return sum(source.most(min(n, self.length)) for source in self.sources)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
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
