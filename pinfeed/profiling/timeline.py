"""Timeline: spans of all work on batches, saved as a picture or a trace."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pinfeed.devices.device import Event
from pinfeed.errors import ArgumentError, MissingDependency
from pinfeed.profiling import plot
from pinfeed.profiling.spans import (
    THREADS,
    CacheCounts,
    Lane,
    Span,
    by_thread,
    clipped,
    extent,
    middle,
    ready,
)

MOST_SPANS = 300_000
"""Number of spans that are kept by default, for some 50,000 batches."""
PICTURED_BATCHES = 30
"""Number of batches that a picture shows by default."""


class Timeline:
    """Spans of all work on batches in the loops of a feeder: reading, copying, waits, steps.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100, timeline=True)
        >>> for batch in feeder:
        ...     loss = batch.mean()
        >>> feeder.timeline.save("trace.json")
        >>> len(feeder.timeline.spans) > 10
        True

    Args:
        most_spans: Number of spans that are kept; older ones are dropped.
    """

    def __init__(self, most_spans: int = MOST_SPANS) -> None:
        # Fields of a Span, with times of the clock.
        self._taken: deque[tuple[Lane, int, float, float, int, int, int, int]] = deque(
            maxlen=most_spans
        )
        # The same for work of the device, with timed events that may not have completed yet.
        self._pending: deque[tuple[Lane, int, Event, Event, int, int]] = deque()
        # Any thread may read the timeline, and each pending span must be taken once.
        self._settling = threading.Lock()
        self.loop = -1
        """Number of the loop that has begun last; -1 if none has."""
        # Loop for which the current thread works; None if that is the loop that has begun last.
        self._of_thread = threading.local()
        self._zero_s = 0.0
        self._caches: deque[tuple[float, CacheCounts]] = deque(maxlen=most_spans)
        # Number of batches that the last loop prefetches.
        self._depth = 0

    def __repr__(self) -> str:
        n_loops = self.loop + 1
        return f"<Timeline: {len(self._taken):,} spans of {n_loops:,} loop{'s' * (n_loops != 1)}>"

    def _repr_png_(self) -> bytes | None:
        """Return the picture that a notebook shows; None without spans or without matplotlib."""
        spans = self.spans
        if not spans:
            return None
        start, end = middle(spans, PICTURED_BATCHES)
        if not start < end:
            return None
        file = io.BytesIO()
        try:
            plot.draw(spans, start, end, self._depth, file)
        except MissingDependency:
            return None
        return file.getvalue()

    @property
    def spans(self) -> list[Span]:
        """All spans that have ended, in the order in which they began.

        A span of the device is included once its events have completed.
        """
        self.settle()
        # Reader threads may add spans now. A copy is atomic. Without the interpreter's lock,
        # iterating over the deque itself is not.
        taken = self._taken.copy()
        zero = self._zero_s
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

    @property
    def caches(self) -> list[tuple[float, CacheCounts]]:
        """Rows of each batch in each table with a cache, as pairs of a time and the counts.

        Times are in seconds since the request for the first batch. Old batches are dropped, like
        spans.
        """
        return [(at_s - self._zero_s, counts) for at_s, counts in self._caches.copy()]

    def begin(self, now: float, depth: int) -> None:
        """Record that a loop begins; times count from the beginning of the first loop.

        Args:
            now: Time of the clock.
            depth: Number of batches that are prefetched.
        """
        if self.loop < 0:
            self._zero_s = now
        self.loop += 1
        self._depth = depth

    @contextlib.contextmanager
    def work_for(self, loop: int) -> Iterator[None]:
        """Record the spans of the current thread for a loop that may not have begun yet."""
        earlier = getattr(self._of_thread, "loop", None)
        self._of_thread.loop = loop
        try:
            yield
        finally:
            self._of_thread.loop = earlier

    def _loop_of_thread(self) -> int:
        loop: int | None = getattr(self._of_thread, "loop", None)
        return self.loop if loop is None else loop

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
        """Record work that has ended, with times of the clock. Any thread may call this."""
        loop = self._loop_of_thread()
        self._taken.append((lane, batch, start, end, loop, n_batches, rows, nbytes))

    def add_cache(self, now: float, counts: CacheCounts) -> None:
        """Record the rows of a batch in a table with a cache; called by the consumer thread."""
        self._caches.append((now, counts))

    def add_timed(
        self, lane: Lane, batch: int, start: Event, end: Event, n_batches: int = 1
    ) -> None:
        """Record work of the device between two timed events. Any thread may call this."""
        loop = self._loop_of_thread()
        self._pending.append((lane, batch, start, end, loop, n_batches))

    def settle(self) -> None:
        """Read the times of the events that have completed, without waiting for others.

        Any thread may call this.
        """
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
        """Write a picture or a trace.

        A picture (.png, .svg, .pdf) needs matplotlib. A trace (.json) is for Perfetto and
        chrome://tracing.

        Args:
            path: Path of the file; its ending decides the format.
            first_s: Number of seconds to show from the beginning of the run. Without ``first_s``
                and ``last_s``, a trace shows the whole run, and a picture 30 batches from its
                middle.
            last_s: Number of seconds to show before the end of the run.

        Raises:
            MissingDependency: If ``path`` is a picture and matplotlib is not installed.
            ArgumentError: If the timeline has nothing to draw, or both ``first_s`` and ``last_s``
                were given.
        """
        name = os.fspath(path)
        is_trace = name.endswith(".json")
        spans = self.spans
        if not spans:
            raise ArgumentError(
                "the timeline is empty; first iterate over a feeder made with timeline=True"
            )
        if first_s is not None and last_s is not None:
            raise ArgumentError(
                "both first_s and last_s were given; give first_s for the beginning of the run, or "
                "last_s for its end"
            )
        start, end = extent(spans)
        if first_s is not None:
            end = min(end, start + first_s)
        elif last_s is not None:
            start = max(start, end - last_s)
        elif not is_trace:
            start, end = middle(spans, PICTURED_BATCHES)
        if not start < end:
            raise ArgumentError(
                f"first_s={first_s}, last_s={last_s} leaves nothing to draw; expected more than 0 "
                "seconds"
            )
        if not is_trace:
            plot.draw(spans, start, end, self._depth, name)
            return
        made = trace(spans, self.caches, start, end)
        with open(name, "w") as file:
            json.dump(made, file)


_PID = 1
# Thread ids; each further thread of a shared lane has the next one.
_TIDS = {name: 100 * (i + 1) for i, name in enumerate(THREADS)}


def trace(
    spans: Sequence[Span], caches: Sequence[tuple[float, CacheCounts]], start_s: float, end_s: float
) -> dict[str, Any]:
    """Return what happened between two moments as a trace.

    The trace has complete events on named threads, a counter of the batches that were ready, and
    counters for each table of the rows that were in its cache, and that were read. Times are in
    microseconds.

    Args:
        spans: Spans of the whole run.
        caches: Times in seconds, each with the counts of a batch in a table.
        start_s: First moment.
        end_s: Last moment.
    """
    threads = by_thread(clipped(spans, start_s, end_s))
    events = _thread_names(
        {(name, _TIDS[name] + track) for name, row in threads.items() for _, track in row}
    )
    events += [
        _complete(span, _TIDS[name] + track) for name, row in threads.items() for span, track in row
    ]
    counts = [("batches ready", at_s, {"batches": count}) for at_s, count in ready(spans)]
    for at_s, cache in caches:
        rows = {"hits": cache.hits, "read": cache.lookups - cache.hits}
        counts.append((f"cache of {cache.table}, rows", at_s, rows))
    events += [
        {"name": what, "ph": "C", "pid": _PID, "tid": 0, "ts": at_s * 1e6, "args": args}
        for what, at_s, args in counts
        if start_s <= at_s <= end_s
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _thread_names(threads: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the events that name the process and its threads, given names and ids of these."""
    numbered = {name for name, tid in threads if tid > _TIDS[name]}
    events = [_metadata("process_name", 0, name="pinfeed")]
    for name, tid in sorted(threads, key=lambda thread: thread[1]):
        shown = f"{name} {tid - _TIDS[name] + 1}" if name in numbered else name
        events.append(_metadata("thread_name", tid, name=shown))
        events.append(_metadata("thread_sort_index", tid, sort_index=tid))
    return events


def _metadata(what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PID, "tid": tid, "args": args}


def _complete(span: Span, tid: int) -> dict[str, Any]:
    return {
        "name": f"{span.lane} {span.numbers}",
        "cat": span.lane,
        "ph": "X",
        "pid": _PID,
        "tid": tid,
        "ts": span.start_s * 1e6,
        "dur": span.seconds * 1e6,
        "args": {
            "batch": span.batch,
            "batches": span.n_batches,
            "rows": span.rows,
            "bytes": span.bytes,
            "loop": span.loop,
        },
    }
