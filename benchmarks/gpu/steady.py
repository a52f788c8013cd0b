"""The time of a batch in the steady state of a loop: of the device, and of the consumer thread."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.conditions import clocks, gpu_state
from benchmarks.gpu.recorder import Fields

N_WARM = 8
"""Batches before the time begins, because the first transfers of an epoch cannot be hidden."""
_N_ROUNDS = 3

Work = Callable[[Any], object]


@dataclass(frozen=True)
class Loop:
    """A loop to be timed.

    Args:
        batches: Function that begins an epoch.
        step: Queues the training step of a batch.
        write: Writes a batch back; None if the loop only reads.
        device: ``cuda`` or ``cpu``.
    """

    batches: Callable[[], Iterator[Any]]
    step: Work
    write: Work | None
    device: str


@dataclass(frozen=True)
class Timed:
    """Times of a batch in seconds.

    Attributes:
        batch_s: Mean time between two batches in the stream of the consumer thread.
        host_s: CPU time of the consumer thread in the loop's own calls, of each batch. The time in
            which the thread waits is not part of it.
    """

    batch_s: float
    host_s: list[float]


def timed(loop: Loop, n: int) -> Timed:
    """Time ``n`` batches of an epoch; the epoch needs at least ``N_WARM`` + 1 more."""
    host_s = []
    start = None
    with contextlib.closing(loop.batches()) as batches:  # type: ignore[type-var]  # a generator
        for i in range(N_WARM + n + 1):
            begin = time.thread_time()
            batch = next(batches)
            spent = time.thread_time() - begin
            if i == N_WARM:
                start = mark(loop.device)
            elif i == N_WARM + n:
                break
            loop.step(batch)
            if loop.write is not None:
                begin = time.thread_time()
                loop.write(batch)
                spent += time.thread_time() - begin
            if i >= N_WARM:
                host_s.append(spent)
        end = mark(loop.device)
    return Timed(between_s(start, end) / n, host_s)


def repeated_s(work: Callable[[], object], n: int, device: str) -> float:
    """Return the mean seconds of one call of work that is queued ``n`` times."""
    work()
    start = mark(device)
    for _ in range(n):
        work()
    end = mark(device)
    return between_s(start, end) / n


def mark(device: str) -> Any:
    """Mark a point in the current stream; on a CPU, it is the current time."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_s(start: Any, end: Any) -> float:
    """Return the seconds between two points, after the device has passed both."""
    if isinstance(end, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def rounds(transfer: Loop, both: Loop, compute: Callable[[], object], n: int) -> Fields:
    """Return milliseconds of a batch: the transfer, the computation, and both at the same time.

    They are timed in turn, so changing clock rates affect them equally.

    Args:
        transfer: Loop whose step does nothing.
        both: The same loop with its step.
        compute: The step alone, on a batch that is on the device already.
        n: Batches to time.
    """
    device = both.device
    found: dict[str, list[float]] = {"transfer": [], "compute": [], "both": []}
    host_s: list[float] = []
    conditions = []
    for i in range(1 + _N_ROUNDS):
        moved = timed(transfer, n).batch_s
        computed = repeated_s(compute, n, device)
        together = timed(both, n)
        # The first round loads code and touches memory.
        if i:
            found["transfer"].append(moved)
            found["compute"].append(computed)
            found["both"].append(together.batch_s)
            host_s += together.host_s
            conditions.append(clocks())
    medians = {name: statistics.median(times) for name, times in found.items()}
    longer = max(medians["transfer"], medians["compute"])
    return {
        **{f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in medians.items()},
        "both_rounds_ms": [round(seconds * 1e3, 4) for seconds in found["both"]],
        "clocks_of_rounds": conditions,
        "compute_to_transfer": round(medians["compute"] / medians["transfer"], 3),
        "both_to_longer": round(medians["both"] / longer, 4),
        "host_us": round(statistics.median(host_s) * 1e6, 1),
        "host_us_mean": round(statistics.fmean(host_s) * 1e6, 1),
        "host_us_p90": round(float(np.percentile(host_s, 90)) * 1e6, 1),
        "conditions": gpu_state(lambda: timed(both, n)),
    }
