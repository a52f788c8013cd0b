"""Spans in the Trace Event Format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinfeed.profiling.spans import THREADS, Span, clipped, ready, tracks

_PID = 1
# A reader more is one more.
_TIDS = {name: 100 * (i + 1) for i, name in enumerate(THREADS)}
_THREAD_OF = {lane: name for name, lanes in THREADS.items() for lane in lanes}


def trace(spans: Sequence[Span], start_s: float, end_s: float, verdict: str) -> dict[str, Any]:
    """Spans between two moments: complete events on named threads, and a counter of batches that were ready; times in microseconds."""
    within = clipped(spans, start_s, end_s)
    placed = list(zip(within, tracks(within), strict=True))
    tids = {(_THREAD_OF[span.lane], _tid(span, track)) for span, track in placed}
    several = {name for name, tid in tids if tid > _TIDS[name]}
    events = [_metadata("process_name", 0, name="pinfeed")]
    for name, tid in sorted(tids, key=lambda thread: thread[1]):
        events.append(
            _metadata(
                "thread_name",
                tid,
                name=f"{name} {tid - _TIDS[name] + 1}" if name in several else name,
            )
        )
        events.append(_metadata("thread_sort_index", tid, sort_index=tid))
    events += [_complete(span, track) for span, track in placed]
    for at_s, count in ready(spans):
        if start_s <= at_s <= end_s:
            events.append(
                {
                    "name": "batches ready",
                    "ph": "C",
                    "pid": _PID,
                    "tid": 0,
                    "ts": at_s * 1e6,
                    "args": {"batches": count},
                }
            )
    return {"displayTimeUnit": "ms", "otherData": {"verdict": verdict}, "traceEvents": events}


def _tid(span: Span, track: int) -> int:
    return _TIDS[_THREAD_OF[span.lane]] + (track if span.lane == "read" else 0)


def _metadata(what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PID, "tid": tid, "args": args}


def _complete(span: Span, track: int) -> dict[str, Any]:
    last = span.batch + span.n_batches - 1
    return {
        "name": f"{span.lane} {span.batch}" + (f"-{last}" if last > span.batch else ""),
        "cat": span.lane,
        "ph": "X",
        "pid": _PID,
        "tid": _tid(span, track),
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {
            "batch": span.batch,
            "batches": span.n_batches,
            "rows": span.rows,
            "bytes": span.bytes,
            "loop": span.loop,
        },
    }
