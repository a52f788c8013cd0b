"""Feeders on a simulated device with a simulated clock, and timelines of simulated loops."""

import math
from typing import Any

import numpy as np
from support.internals import counters_of

from pinfeed import ArrayStore, Feeder
from pinfeed.profiling.timeline import Timeline
from pinfeed.testing import SimDevice, favour, lazy


class Clock:
    """Clock whose time passes only when the test says so."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s

    def pass_s(self, seconds: float) -> None:
        self.s += seconds


class Slow(ArrayStore):
    """Rows that take time to read and to write."""

    def __init__(
        self, array: np.ndarray, clock: Clock, gather_s: float = 0.0, scatter_s: float = 0.0
    ) -> None:
        super().__init__(array)
        self._clock = clock
        self._gather_s = gather_s
        self._scatter_s = scatter_s

    def gather(self, rows: Any, out: Any) -> None:
        self._clock.pass_s(self._gather_s)
        super().gather(rows, out)

    def scatter(self, rows: Any, values: Any) -> None:
        self._clock.pass_s(self._scatter_s)
        super().scatter(rows, values)


def simulated(
    choose: Any = lazy, *, gather_s: float = 0.0, scatter_s: float = 0.0, n: int = 40, **kwargs: Any
) -> tuple[Feeder, Clock, Any]:
    """Return a feeder on a simulated device, its single clock, and the device."""
    clock = Clock()
    device = SimDevice(choose, now=clock)
    store = Slow(np.zeros((10 * n, 3), np.float32), clock, gather_s, scatter_s)
    feeder = Feeder(store, batch_size=10, device=device, **{"depth": 2, **kwargs})
    counters_of(feeder).now = clock
    return feeder, clock, device


def a_run(
    read_s: float,
    step_s: float,
    *,
    copy_s: float = 0.0,
    n_readers: int = 2,
    depth: int = 2,
    n: int = 200,
) -> Timeline:
    """Return the timeline of a loop with the given times; with ``copy_s``, of a loop on a GPU."""
    timeline = Timeline()
    timeline.begin(0.0, depth)
    device = SimDevice(favour("compute"), now=(clock := Clock()))

    def at(seconds: float) -> Any:
        clock.s = seconds
        return device.current_stream().record(timed=True)

    free = [0.0] * n_readers
    copied = 0.0
    computed = 0.0
    asked = 0.0
    asks = [0.0] * (depth + 1)
    for batch in range(n):
        reader = free.index(min(free))
        start = max(free[reader], asks[batch])
        free[reader] = end = start + read_s * (1 + 0.2 * math.sin(batch))
        timeline.add("read", batch, start, end)
        got = max(asked, end)
        lent = got + 1e-5
        timeline.add("wait", batch, asked, got)
        timeline.add("lend", batch, got, lent, 1, 256, 1 << 20)
        asked = lent + (1e-4 if copy_s else step_s)
        timeline.add("compute", batch, lent, asked)
        if copy_s:
            copied, begun = max(copied, end) + copy_s, max(copied, end)
            timeline.add_timed("copy", batch, at(begun), at(copied))
            begun, computed = max(computed, copied, lent), max(computed, copied, lent) + step_s
            timeline.add_timed("device", batch, at(begun), at(computed))
            timeline.add("write", batch, computed, computed + copy_s / 2)
        asks.append(asked)
    return timeline
