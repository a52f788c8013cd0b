"""Timeline: a span for everything that took time, recorded at little cost, saved as a picture or a trace."""

from __future__ import annotations

import io
import json
import os
import threading
from collections import deque

from pinfeed.devices.base import Event
from pinfeed.errors import ArgumentError, MissingDependency
from pinfeed.profiling import plot
from pinfeed.profiling.chrome_trace import trace
from pinfeed.profiling.spans import Lane, Span, extent, middle, totals
from pinfeed.validation.safe_repr import safe_repr

MOST_SPANS = 300_000
"""Those of some 50,000 batches."""
PICTURED_BATCHES = 30
"""So many a picture shows, if nobody says which."""


class Timeline:
    """What took time in the loops of a feeder.

    Args:
        most_spans: The last so many are kept.
    """

    def __init__(self, most_spans: int = MOST_SPANS) -> None:
        # As a Span; by the clock.
        self._taken: deque[tuple[Lane, int, float, float, int, int, int, int]] = deque(
            maxlen=most_spans
        )
        self._pending: deque[tuple[Lane, int, Event, Event, int, int]] = deque()
        # Whoever reads it may be another thread than the loop's: each pending pair is taken once.
        self._settling = threading.Lock()
        self._loop = -1
        self._zero_s = 0.0
        self._depth = 0
        self._n_readers = 1

    @safe_repr
    def __repr__(self) -> str:
        n_loops = self._loop + 1
        return f"<Timeline: {len(self._taken):,} spans of {n_loops:,} loop{'s' * (n_loops != 1)}>"

    def _repr_png_(self) -> bytes | None:
        """Return what a notebook shows: the picture; None without spans, or without matplotlib."""
        spans, file = self.spans, io.BytesIO()
        start, end = middle(spans, PICTURED_BATCHES) if spans else (0.0, 0.0)
        if not start < end:
            return None
        try:
            plot.draw(
                spans,
                start,
                end,
                totals(spans, start, end, depth=self._depth, n_readers=self._n_readers),
                file,
            )
        except MissingDependency:
            return None
        return file.getvalue()

    @property
    def spans(self) -> list[Span]:
        """All that have ended, in the order in which they began.

        Those of a device, as far as it is known to have come to their end.
        """
        self.settle()
        taken, zero = list(self._taken), self._zero_s
        sizes = {
            (loop, batch): (rows, nbytes)
            for lane, batch, _, _, loop, _, rows, nbytes in taken
            if lane == "lend"
        }
        found = []
        for lane, batch, start, end, loop, n, _, _ in taken:
            of_batches = [sizes.get((loop, batch + i), (0, 0)) for i in range(n)]
            rows, nbytes = (sum(numbers) for numbers in zip(*of_batches, strict=True))
            found.append(Span(lane, batch, start - zero, end - zero, loop, n, rows, nbytes))
        return sorted(found, key=lambda span: span.start_s)

    def begin(self, now: float, depth: int, n_readers: int) -> None:
        """A loop begins; the time of the first one is zero."""
        if self._loop < 0:
            self._zero_s = now
        self._loop = self._loop + 1
        self._depth = depth
        self._n_readers = n_readers

    def add(
        self,
        lane: Lane,
        batch: int,
        start: float,
        end: float,
        n_batches: int = 1,
        rows: int = 0,
        nbytes: int = 0,
    ) -> None:
        """Something that took time, by the clock, has ended. In any thread."""
        self._taken.append((lane, batch, start, end, self._loop, n_batches, rows, nbytes))

    def add_timed(
        self, lane: Lane, batch: int, start: Event, end: Event, n_batches: int = 1
    ) -> None:
        """Something takes the device time, from one timed event to another. In any thread."""
        self._pending.append((lane, batch, start, end, self._loop, n_batches))

    def settle(self) -> None:
        """Take the times of events that are done by now. In any thread; it waits for nothing."""
        with self._settling:
            while self._pending:
                lane, batch, start, end, loop, n = self._pending[0]
                if not (end.is_done() and start.is_done()):
                    return
                self._taken.append((lane, batch, start.at_s(), end.at_s(), loop, n, 0, 0))
                self._pending.popleft()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        first_s: float | None = None,
        last_s: float | None = None,
    ) -> None:
        """Write a picture (.png, .svg, .pdf; needs matplotlib) or a trace for Perfetto and chrome://tracing (.json).

        Args:
            path: Its ending decides.
            first_s: Only the first so many seconds. With neither, a trace has everything, and a
                picture 30 batches from the middle.
            last_s: Only the last so many seconds.

        Raises:
            MissingDependency: A picture was asked for and there is no matplotlib.
            ArgumentError: There is nothing to draw; or both ``first_s`` and ``last_s`` were given.
        """
        name, spans = os.fspath(path), self.spans
        if not spans:
            raise ArgumentError(
                "the timeline is empty: iterate a feeder made with timeline=True first"
            )
        if first_s is not None and last_s is not None:
            raise ArgumentError(
                "both first_s and last_s were given; a stretch is at the beginning or at the end of the run: give one of them"
            )
        start, end = extent(spans)
        if first_s is not None:
            end = start + first_s
        elif last_s is not None:
            start = end - last_s
        elif not name.endswith(".json"):
            start, end = middle(spans, PICTURED_BATCHES)
        if not start < end:
            raise ArgumentError(
                f"first_s={first_s}, last_s={last_s}: there is nothing to draw; expected more than 0 seconds"
            )
        found = totals(spans, start, end, depth=self._depth, n_readers=self._n_readers)
        if name.endswith(".json"):
            with open(name, "w") as file:
                json.dump(trace(spans, start, end, found.verdict), file)
        else:
            plot.draw(spans, start, end, found, name)
