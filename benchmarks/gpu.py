"""One command for a machine with a CUDA device: its tests, and what the feeder reaches there, as JSON under benchmarks/results/.

``--device cpu`` goes through the same measurements without a GPU, to see that they work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.environment import environment, save
from benchmarks.overhead import measure as measure_overhead
from benchmarks.rows import measure as measure_rows
from pinfeed import Feeder, PinnedStore, rows

BATCH_BYTES = 16 << 20
TABLE_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    print(environment())
    results: dict[str, Any] = {}
    if arguments.device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for the reader
    if not arguments.skip_tests:
        results["tests"] = run_tests()
        print(results["tests"])
    results["ceilings_gb_per_s"] = ceilings(arguments.device)
    print("ceilings", results["ceilings_gb_per_s"])
    results["stream"] = [
        stream(arguments.device, row_nbytes, order) for row_nbytes in (512, 4096, 614400) for order in ("sequential", "shuffled")
    ]
    results["overlap"] = [overlap(arguments.device, factor) for factor in (0.25, 0.5, 1, 2, 4)]
    for row in results["stream"] + results["overlap"]:
        print(row)
    results["overhead_us"] = measure_overhead(arguments.device)
    results["rows"] = measure_rows(arguments.device, quick=True)
    print(save("gpu" if arguments.device == "cuda" else "gpu-dry-run", results))


def run_tests() -> str:
    """The last line of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


def ceilings(device: str) -> dict[str, float]:
    """What the hardware does with blocks of one batch: copies in host memory, and by the copy engine from page-locked memory."""
    pin = device == "cuda"
    a, b = (torch.zeros(BATCH_BYTES, dtype=torch.uint8, pin_memory=pin) for _ in range(2))
    found = {"memcpy": BATCH_BYTES / best(lambda: b.copy_(a)) / 1e9}
    if pin:
        there = torch.zeros(BATCH_BYTES, dtype=torch.uint8, device=device)
        found["host to device"] = BATCH_BYTES / best(lambda: there.copy_(a, non_blocking=True)) / 1e9
        found["device to host"] = BATCH_BYTES / best(lambda: a.copy_(there, non_blocking=True)) / 1e9
    return {name: round(value, 2) for name, value in found.items()}


def best(work: Callable[[], object], n: int = 20) -> float:
    """Seconds of the fastest of ``n``."""
    times = []
    for _ in range(n):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def table(row_nbytes: int, device: str) -> PinnedStore:
    store = PinnedStore.zeros((TABLE_BYTES // row_nbytes, row_nbytes // 4), "int32", pin="auto" if device == "cuda" else False)
    store.array[:, 0] = np.arange(store.n_rows)
    return store


def stream(device: str, row_nbytes: int, order: str) -> dict[str, Any]:
    """An epoch of a loop that only receives: checked once, then timed."""
    store = table(row_nbytes, device)
    given = rows.shuffled(1) if order == "shuffled" else rows.sequential()
    with Feeder(store, batch_size=BATCH_BYTES // row_nbytes, rows=given, device=device) as feeder:
        for batch in feeder.batches():
            assert torch.equal(batch.data[:, 0].cpu().long(), torch.from_numpy(batch.rows))
        times = []
        for _ in range(3):
            synchronize()
            start = time.perf_counter()
            for _ in feeder:
                pass
            synchronize()
            times.append(time.perf_counter() - start)
        return {
            "row_nbytes": row_nbytes,
            "order": order,
            "route": feeder.plan.route,
            "gb_per_s": round(store.array.nbytes / min(times) / 1e9, 2),
        }


def overlap(device: str, factor: float) -> dict[str, Any]:
    """A loop with a step of ``factor`` times the transfer: seconds against the larger of both."""
    store = table(4096, device)
    with Feeder(store, batch_size=BATCH_BYTES // 4096, shuffle=True, device=device) as feeder:
        n = len(feeder)

        def epoch(n_steps: int) -> float:
            synchronize()
            start = time.perf_counter()
            for _ in feeder:
                for _ in range(n_steps):
                    step()
            synchronize()
            return time.perf_counter() - start

        step = step_of(device)
        epoch(0)
        transfer, one = min(epoch(0) for _ in range(3)) / n, best(step)
        n_steps = max(1, round(factor * transfer / one))
        compute = best(lambda: [step() for _ in range(n_steps)])
        both = min(epoch(n_steps) for _ in range(3)) / n
    return {
        "compute/transfer": round(compute / transfer, 2),
        "transfer_ms": round(transfer * 1e3, 3),
        "compute_ms": round(compute * 1e3, 3),
        "both_ms": round(both * 1e3, 3),
        "both/max": round(both / max(transfer, compute), 3),
    }


def step_of(device: str) -> Callable[[], object]:
    """A short piece of computation."""
    n = 2048 if device == "cuda" else 256
    a, b, c = (torch.zeros(n, n, device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
