"""One command for a machine with a CUDA device: its tests, and what the feeder reaches there, as JSON under benchmarks/results/.

``--device cpu`` goes through the same measurements without a GPU, to see that they work.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.big import errors as gradient_errors
from benchmarks.big import peaks as big_peaks
from benchmarks.budget import predicted_and_measured
from benchmarks.environment import environment, save
from benchmarks.gpureport import picture
from benchmarks.gpurows import Bench, beside_products, ceilings, loaders, small_batches, sweep
from benchmarks.overhead import measure as measure_overhead
from benchmarks.rows import measure as measure_rows
from benchmarks.zoo import ZOO
from pinfeed import Config, Feeder, MiB, PinnedStore, rows
from pinfeed.blocks import locked_bytes

BATCH_BYTES = 16 << 20
TABLE_BYTES = 1 << 30
SWEEP: dict[str, Any] = {
    "table_gb": (1, 8, 32),
    "sizes": (64, 128, 256, 512, 1024, 4096, 614_400),
    "counts": (1000, 8192, 65_536, 1 << 20),
}
SMALL_SWEEP: dict[str, Any] = {"table_gb": (0.25,), "sizes": (64, 512), "counts": (8192,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("parts", nargs="*", help="those whose names begin so; all, if none is named")
    arguments = parser.parse_args()
    print(environment())
    if arguments.device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for the reader
    results: dict[str, Any] = {"seconds": {}}
    for name, part in parts(arguments.device).items():
        if not arguments.parts or name.startswith(tuple(arguments.parts)):
            begin = time.perf_counter()
            found = results[name] = part()
            results["seconds"][name] = round(time.perf_counter() - begin)
            print(f"{name}, {results['seconds'][name]} s", *([found] if not isinstance(found, list) else found), sep="\n  ", flush=True)
            written = save("gpu" if arguments.device == "cuda" else "gpu-dry-run", results)  # at once: what is measured is not lost
    if {"ceilings, GB/s", "rows", "overlap"} <= set(results):
        picture(results, written.with_suffix(".png"), environment())


def parts(device: str) -> dict[str, Callable[[], Any]]:
    """What is measured, by name, in this order."""
    # A package that is missing stops those tests alone that import it.
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", "gpu")
    with_gpu = sorted(str(path) for path in Path("tests").glob("test_*.py") if "mark.gpu" in path.read_text())
    found: dict[str, Callable[[], Any]] = {}
    if device == "cuda":
        found["tests"] = lambda: run(*pytest, *with_gpu, seconds=300)
    if device == "cuda" and shutil.which("compute-sanitizer"):
        kernels = ("tests/test_cuda.py", "-k", "rows_of_every_size")
        found["compute-sanitizer"] = lambda: run("compute-sanitizer", "--tool", "memcheck", *pytest, *kernels, seconds=90)
    bench = functools.cache(lambda: Bench(device))
    limits = functools.cache(lambda: ceilings(bench()))
    return found | {
        "ceilings, GB/s": limits,
        "rows": lambda: sweep(bench(), limits(), **(SWEEP if device == "cuda" else SMALL_SWEEP)),
        "products beside the transfer": lambda: beside_products(bench()),
        "overlap": lambda: overlaps(device),
        "tables": lambda: measure_rows(device, quick=True),
        "stream": lambda: [stream(device, size, order) for size in (512, 4096, 614_400) for order in ("sequential", "shuffled")],
        "memory against the plan": lambda: [memory(device, size, route) for size in (16, 4096) for route in ("direct", "staged")],
        "6 x 3 float64, to and back, us": lambda: small_batches(device),
        "a DataLoader, ms per batch": lambda: loaders(device),
        "overhead, us": lambda: measure_overhead(device),
        "predicted peaks": lambda: [predicted_and_measured(name, case, n, device) for name, case in ZOO.items() for n in case.batch_sizes],
        "BigBatch": lambda: {"gradient error": gradient_errors(device), "peaks": big_peaks(device)},
    }


def run(*command: str, seconds: float) -> str:
    """The last line that a program printed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True) as program:
        try:
            said, _ = program.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # those that it started as well
            said = f"{program.communicate()[0]}\nnot done after {seconds} s"
    print(said[-6000:])
    return (said.strip().splitlines() or ["nothing was said"])[-1]


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


def table(row_nbytes: int, device: str, nbytes: int = TABLE_BYTES) -> PinnedStore:
    store = PinnedStore.zeros((nbytes // row_nbytes, row_nbytes // 4), "int32", pin="auto" if device == "cuda" else False)
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


def memory(device: str, row_nbytes: int, route: str) -> dict[str, Any]:
    """Bytes that a loop takes which writes, and those that were planned."""
    store, config = table(row_nbytes, device, TABLE_BYTES // 4), Config(cpu_memory_limit=MiB(256), gpu_memory_limit=MiB(256))
    gc.collect()  # what an earlier loop left
    before, allocated = locked_bytes(), 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    with Feeder(store, config=config, rows=rows.shuffled(2), device=device, route=route) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
            del batch
        return {
            "row_nbytes": row_nbytes,
            "route": feeder.plan.route,
            "batch": feeder.plan.batch_size,
            "planned on the device": feeder.plan.device_bytes,
            "on the device": torch.cuda.max_memory_allocated() - allocated if device == "cuda" else 0,
            "planned page-locked": feeder.plan.pinned_bytes,
            "page-locked by pinfeed": locked_bytes() - before,
        }


def overlaps(device: str) -> list[dict[str, Any]]:
    """Steps of a quarter of the transfer's time to four times that, in loops that read only and in those that write."""
    store = table(4096, device, (8 << 30) if device == "cuda" else TABLE_BYTES // 4)
    return [overlap(store, device, factor, write) for factor in (0.25, 0.5, 1, 2, 4) for write in (False, True)]


def overlap(store: PinnedStore, device: str, factor: float, write: bool) -> dict[str, Any]:
    """A loop with a step of ``factor`` times the transfer: seconds against the larger of both. ``write``: the rows go back as well."""
    batch_nbytes = store.array.nbytes // 128  # the first transfer of an epoch hides behind nothing
    with Feeder(store, batch_size=batch_nbytes // 4096, shuffle=True, device=device) as feeder:
        n = len(feeder)

        def epoch(n_steps: int) -> float:
            synchronize()
            start = time.perf_counter()
            for batch in feeder.batches():
                for _ in range(n_steps):
                    step()
                if write:
                    batch.write_back(batch.data)
            synchronize()
            return time.perf_counter() - start

        step = step_of(device)
        epoch(0)
        transfer, one = min(epoch(0) for _ in range(3)) / n, best(step)
        n_steps = max(1, round(factor * transfer / one))
        compute = best(lambda: [step() for _ in range(n_steps)])
        both = min(epoch(n_steps) for _ in range(3)) / n
    return {
        "write": write,
        "compute/transfer": round(compute / transfer, 2),
        "transfer_gb_per_s": round((1 + write) * batch_nbytes / transfer / 1e9, 2),
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
