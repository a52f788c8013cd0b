"""Draw the timelines of docs/profiling.md: a starved, a balanced and a computing loop.

A store that sleeps simulates a slow disk, and a step that sleeps simulates a slow step. The feeder
and its reader threads are real, so every run draws slightly different pictures.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed

HERE = Path(__file__).parent
N_ROWS = 40_000
WIDTH = 2048
BATCH_SIZE = 256
CASES = {
    "starved": (44.0, 4.0, 12.0),
    "balanced": (26.0, 8.0, 14.0),
    "computing": (11.0, 2.0, 20.0),
}
"""Mean time of a read, its standard deviation, and time of a step, in milliseconds."""


class SlowStore(pinfeed.ArrayStore):
    """Array store whose gathers take random times, in milliseconds."""

    def __init__(self, array: np.ndarray[Any, Any], milliseconds: float, spread: float) -> None:
        super().__init__(array)
        self._milliseconds = (
            np.random.default_rng(0).normal(milliseconds, spread, 10_000).clip(milliseconds / 2)
        )
        self._turn = 0

    def gather(self, rows: Any, out: Any) -> None:
        self._turn += 1
        time.sleep(self._milliseconds[self._turn] / 1e3)
        super().gather(rows, out)


def train(feeder: pinfeed.Feeder, step_ms: float) -> None:
    """Run steps of ``step_ms`` milliseconds, during which the CPU is mostly idle."""
    weight = torch.randn(WIDTH, 64)
    for x in feeder:
        end = time.perf_counter() + step_ms / 1e3
        (x @ weight).relu_().mean()
        time.sleep(max(0.0, end - time.perf_counter()))


def main() -> None:
    """Draw and save each timeline."""
    torch.set_num_threads(1)
    array = np.random.default_rng(0).normal(size=(N_ROWS, WIDTH)).astype(np.float32)
    array.flags.writeable = False
    for name, (read_ms, spread, step_ms) in CASES.items():
        store = SlowStore(array, read_ms, spread)
        with pinfeed.Feeder(
            store, batch_size=BATCH_SIZE, shuffle=True, device="cpu", timeline=True
        ) as feeder:
            for _ in range(2):
                train(feeder, step_ms)
            feeder.timeline.save(HERE / f"timeline-{name}.png")
            print(name, feeder.stats)


if __name__ == "__main__":
    main()
