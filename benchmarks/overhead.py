"""The overhead of pinfeed per batch: the time between two batches, and the cost of write-backs.

Run it from the root:

    python -m benchmarks.overhead                       (three minutes)
    python -m benchmarks.overhead --before CHECKOUT     (write-backs by an earlier pinfeed, too)
    python -m benchmarks.overhead --parts write-backs --rows 1024 65536

The first part measures the time between two batches of an empty loop, whose source has nothing to
do. The goal is a median of at most 50 µs. The time of a bare executor that hands over nothing is
measured in the same run. The second part is ``benchmarks/forwarding.py``.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks import forwarding
from benchmarks.earlier import add_before, opened
from benchmarks.environment import environment, save
from pinfeed import ArrayStore, Feeder, wrap_loader

N = 5000
GOAL_US = 50


class Nothing(ArrayStore):
    """A store whose gather does nothing."""

    def gather(self, rows: Any, out: Any) -> None:
        pass


def gaps_us(batches: Iterable[Any], body: Callable[[Any], object] = lambda _: None) -> list[float]:
    gaps = []
    last = time.perf_counter()
    for batch in batches:
        now = time.perf_counter()
        gaps.append((now - last) * 1e6)
        body(batch)
        last = time.perf_counter()
    return gaps


def bare(depth: int, n: int) -> Iterator[None]:
    """Run the minimum of a prefetching loop: one future per batch."""
    with ThreadPoolExecutor(1) as executor:
        futures = deque(executor.submit(lambda: None) for _ in range(depth))
        for _ in range(n):
            futures.append(executor.submit(lambda: None))
            yield futures.popleft().result()


Ways = dict[str, Callable[[], dict[str, float]]]


def ways(device: str, depth: int, n: int = N) -> Ways:
    """Return the measurements at a depth, with ``n`` batches.

    Each is a function that returns percentiles in microseconds.
    """

    def fed(source: Any, *, write: bool = False) -> dict[str, float]:
        with Feeder(source, batch_size=16, depth=depth, device=device) as feeder:
            if write:
                return percentiles(
                    gaps_us(feeder.batches(), lambda batch: batch.write_back(batch.data))
                )
            return percentiles(gaps_us(feeder))

    def wrapped() -> dict[str, float]:
        with wrap_loader(
            [(torch.zeros(1), torch.zeros(1))] * n, depth=depth, device=device
        ) as loader:
            return percentiles(gaps_us(loader))

    array = np.zeros((n * 16, 4), np.float32)
    array.flags.writeable = False
    found: Ways = {"bare executor": lambda: percentiles(gaps_us(bare(depth, n)))} if depth else {}
    return found | {
        "empty source": lambda: fed(Nothing(array)),
        "16 rows of 16 B": lambda: fed(ArrayStore(array)),
        "four empty sources": lambda: fed((Nothing(array),) * 4),
        "wrap_loader": wrapped,
        "with write_back": lambda: fed(ArrayStore(np.zeros((n * 16, 4), np.float32)), write=True),
    }


def percentiles(gaps: list[float]) -> dict[str, float]:
    return dict(zip(("p50", "p90"), np.percentile(gaps, [50, 90]).round(1).tolist(), strict=True))


def measure(device: str) -> dict[str, dict[str, float]]:
    return {
        f"{name}, depth {depth}": way()
        for depth in (0, 1, 2, 4)
        for name, way in ways(device, depth).items()
    }


def loops() -> dict[str, Any]:
    """Measure and print the time between two batches on every device."""
    results = {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        results[device] = measure(device)
        for name, percentiles in results[device].items():
            p50, p90 = percentiles["p50"], percentiles["p90"]
            print(f"{device:5} {name:32} p50 {p50:6.1f} µs   p90 {p90:6.1f} µs")
        worst = max(
            p["p50"] for name, p in results[device].items() if name.startswith("empty source")
        )
        print(f"{device:5} worst median on an empty source: {worst} µs (goal: {GOAL_US})")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["loops", "write-backs"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--rows", nargs="+", type=int, default=list(forwarding.SIZES))
    parser.add_argument("--route", default="direct", choices=["direct", "staged"])
    add_before(parser)
    arguments = parser.parse_args()
    print(environment())
    results = loops() if "loops" in arguments.parts else {}
    if "write-backs" in arguments.parts:
        is_direct = arguments.route == "direct"
        with opened(arguments.before) as earlier:
            found = forwarding.measure(arguments.rows, earlier, direct=is_direct)
        results["write-backs"] = found
        print(forwarding.report(found))
    is_whole = arguments.parts == parts and tuple(arguments.rows) == forwarding.SIZES
    print(save("overhead" if is_whole else "overhead-part", results))


if __name__ == "__main__":
    main()
