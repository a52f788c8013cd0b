"""Traces in the Trace Event Format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinfeed.profiling.spans import THREADS, CacheCounts, Span, by_thread, clipped, ready

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
