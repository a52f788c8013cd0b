"""What pinfeed itself costs per batch: the time between two batches of a loop that does nothing, from a source that has nothing to do.

The goal is a median of 50 µs at most. What a bare executor takes to hand nothing over, in the same run, stands beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.environment import environment, save
from pinfeed import ArrayStore, Feeder, wrap_loader

N = 5000
GOAL_US = 50


class Nothing(ArrayStore):
    """Rows that cost nothing to gather."""

    def gather(self, rows: Any, out: Any) -> None:
        pass


def gaps_us(batches: Iterable[Any], body: Callable[[Any], object] = lambda _: None) -> list[float]:
    gaps, last = [], time.perf_counter()
    for batch in batches:
        now = time.perf_counter()
        gaps.append((now - last) * 1e6)
        body(batch)
        last = time.perf_counter()
    return gaps


def bare(depth: int) -> Iterator[None]:
    """The least that a prefetching loop can do: one future per batch."""
    with ThreadPoolExecutor(1) as executor:
        futures = deque(executor.submit(lambda: None) for _ in range(depth))
        for _ in range(N):
            futures.append(executor.submit(lambda: None))
            yield futures.popleft().result()


def measure(device: str) -> dict[str, dict[str, float]]:
    array = np.zeros((N * 16, 4), np.float32)
    array.flags.writeable = False
    results = {}
    for depth in (0, 1, 2, 4):
        if depth:
            results[f"bare executor, depth {depth}"] = gaps_us(bare(depth))
        for name, store in (("empty source", Nothing(array)), ("16 rows of 16 B", ArrayStore(array))):
            with Feeder(store, batch_size=16, depth=depth, device=device) as feeder:
                results[f"{name}, depth {depth}"] = gaps_us(feeder)
        with Feeder((Nothing(array),) * 4, batch_size=16, depth=depth, device=device) as feeder:
            results[f"four empty sources, depth {depth}"] = gaps_us(feeder)
        with wrap_loader([(torch.zeros(1), torch.zeros(1))] * N, depth=depth, device=device) as loader:
            results[f"wrap_loader, depth {depth}"] = gaps_us(loader)
        table = ArrayStore(np.zeros((N * 16, 4), np.float32))
        with Feeder(table, batch_size=16, depth=depth, device=device) as feeder:
            results[f"with write_back, depth {depth}"] = gaps_us(feeder.batches(), lambda batch: batch.write_back(batch.data))
    return {name: dict(zip(("p50", "p90"), np.percentile(gaps, [50, 90]).round(1).tolist(), strict=True)) for name, gaps in results.items()}


def main() -> None:
    print(environment())
    results = {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        results[device] = measure(device)
        for name, percentiles in results[device].items():
            print(f"{device:5} {name:32} p50 {percentiles['p50']:6.1f} µs   p90 {percentiles['p90']:6.1f} µs")
        worst = max(p["p50"] for name, p in results[device].items() if name.startswith("empty source"))
        print(f"{device:5} worst median on an empty source: {worst} µs (goal: {GOAL_US})")
    print(save("overhead", results))


if __name__ == "__main__":
    main()
