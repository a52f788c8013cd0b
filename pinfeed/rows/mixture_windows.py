"""MixedWindows: the windows of the sources of a mixture, as the mixture needs them."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pinfeed.rows.interleaving import Interleaving, ShuffledTurns
from pinfeed.rows.ranks import Interval
from pinfeed.rows.windows import Window, Windows


@dataclass(frozen=True)
class SourceWindows:
    """The windows of one source of a mixture, pass by pass."""

    number: int
    """Number of the source."""
    first_row: int
    """Row of the mixture that is the first row of the source."""
    n_draws: int
    """Number of rows of a pass."""
    is_repeated: bool
    """Whether an epoch may have rows of several passes."""
    of_pass: Callable[[int], Windows]
    """Returns the windows of a pass; their positions are draws of the pass."""

    @functools.cached_property
    def usual(self) -> Windows:
        """Windows of the first pass."""
        return self.of_pass(0)

    @property
    def is_whole(self) -> bool:
        """Whether one window has all rows, and so serves all passes."""
        return self.usual.window_rows >= self.n_draws

    def most(self, n: int) -> int:
        """Return the most windows that ``n`` consecutive draws need."""
        if self.is_whole:
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
            for window in self.of_pass(number).needed(max(0, start - first), end):
                yield Window(first + window.begin, first + window.end, self._shifted(window.runs))

    @property
    def all_runs(self) -> list[Interval]:
        """The rows of a source whose one window has all of them."""
        return self._shifted(next(self.usual.needed(0, 1)).runs)

    def _shifted(self, runs: Sequence[Interval]) -> list[Interval]:
        return [(self.first_row + start, self.first_row + stop) for start, stop in runs]


@dataclass(frozen=True)
class MixedWindows:
    """Windows of the sources of a mixture. Other sources have none."""

    n_blocks = 0

    sources: tuple[SourceWindows, ...]
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
        return sum(source.usual.n_ahead for source in self.sources if not source.is_whole)

    def most(self, n: int) -> int:
        return sum(source.most(min(n, self.length)) for source in self.sources)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        streams = (self._of_source(source, start, stop) for source in self.sources)
        return heapq.merge(*streams, key=attrgetter("begin"))

    def _of_source(self, source: SourceWindows, start: int, stop: int) -> Iterator[Window]:
        first, last = (self._n_draws(source.number, position) for position in (start, stop))
        if source.is_whole:
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
        is_its = offset and self.turns.before(number, turn + 1) > before
        return before * self.batch_size + offset * bool(is_its)

    def _position(self, number: int, draw: int) -> int:
        """Return the position of a draw; the length of the epoch if there is none."""
        turn, offset = divmod(draw, self.batch_size)
        place = self.turns.place(number, turn)
        if place is None:
            return self.length
        return place * self.batch_size + offset - self.start
