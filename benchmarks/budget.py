"""Predicted and measured peaks of training steps, and training under a memory limit.

On the CPU, the bytes requested from its allocator are measured. On a GPU, the bytes that torch's
allocator reserves are measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

import pinfeed
from benchmarks.environment import environment, save
from benchmarks.zoo import MORE, ZOO, Case
from pinfeed.memory.host import resident_bytes

LIMIT = pinfeed.GiB(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--kept", help="train this model under a limit and print its memory as JSON"
    )
    parser.add_argument("--more", action="store_true", help="measure more models, peaks only")
    arguments = parser.parse_args()
    if arguments.kept:
        print(json.dumps(trained_under_a_limit(ZOO[arguments.kept])))
        return
    print(environment())
    if arguments.more:
        print(save("budget-more", {"peaks": peaks_of(MORE, arguments.device)}))
    else:
        print(save("budget", measure(arguments.device)))


def peaks_of(zoo: Mapping[str, Case], device: str) -> list[dict[str, Any]]:
    """Return predicted and measured peaks of each model at each of its batch sizes."""
    peaks = [
        predicted_and_measured(name, case, n, device)
        for name, case in zoo.items()
        for n in case.batch_sizes
    ]
    columns = ("model", "batch", "measured_mib", "ratio", "seconds")
    print(tabulate([[peak[column] for column in columns] for peak in peaks], headers=columns))
    return peaks


def measure(device: str) -> dict[str, Any]:
    """Run all measurements and return them as plain values."""
    results: dict[str, Any] = {"peaks": peaks_of(ZOO, device)}
    if device == "cpu":
        results["kept"] = []
        for name in ZOO:
            run = subprocess.run(
                [sys.executable, "-m", "benchmarks.budget", "--kept", name],
                capture_output=True,
                text=True,
                check=True,
            )
            results["kept"].append({"model": name} | json.loads(run.stdout))
        print(tabulate(results["kept"], headers="keys"))
    return results


def predicted_and_measured(name: str, case: Case, n: int, device: str) -> dict[str, Any]:
    begin = time.perf_counter()
    estimate = pinfeed.estimate(case.make, n, **case.shapes, device=device)  # type: ignore[arg-type]
    seconds = time.perf_counter() - begin
    measured = on_cpu(lambda: steps(case, n, device)) if device == "cpu" else on_gpu(case, n)
    return {
        "model": name,
        "batch": n,
        "predicted_mib": round(estimate.nbytes / 2**20, 1),
        "measured_mib": round(measured / 2**20, 1),
        "ratio": round(estimate.nbytes / measured, 3),
        "seconds": round(seconds, 2),
    }


def steps(case: Case, n: int, device: str) -> None:
    torch.manual_seed(0)
    model = case.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x, y = batch(case, n)
        x, y = x.to(device), y.to(device)
        outputs = model(x)
        loss = case.loss(outputs, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def batch(case: Case, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    def made(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros((n, *shape), dtype=getattr(torch, dtype))

    return made(case.input_shape, case.input_dtype), made(case.output_shape, case.output_dtype)


def on_cpu(work: Callable[[], object]) -> int:
    """Return the peak of the bytes that some work allocates with torch's CPU allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    events = (
        event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


def on_gpu(case: Case, n: int) -> int:
    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    steps(case, n, "cuda")
    return torch.cuda.max_memory_reserved() - before


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS, which would not count as growth of the next step."""
    # This is torch's own function for its tests of memory.
    torch._C._cuda_clearCublasWorkspaces()


def trained_under_a_limit(case: Case) -> dict[str, Any]:
    """Train in a process of its own, and compare its growth with ``cpu_memory_limit``."""
    # This loads the libraries, whose memory is not counted.
    torch.ones(64, 64) @ torch.ones(64, 64)
    # Larger batches would take too long on two cores.
    most = case.batch_sizes[-1] * 2
    config = pinfeed.Config(
        cpu_memory_limit=LIMIT,
        device="cpu",
        model=case.make,
        optimizer=torch.optim.AdamW,
        **case.shapes,
        preferred_batch_size=most,
    )
    # Six batches, so that all slots are in use.
    x, y = (values.numpy() for values in batch(case, 6 * config.batch_size))
    gc.collect()
    before = resident_bytes()["anonymous"]
    # This resets the peak of resident memory, see proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters())
    with pinfeed.Feeder((x, y), config=config, device="cpu") as feeder:
        for _ in range(2):
            for inputs, targets in feeder:
                loss = case.loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    now = resident_bytes()
    grown = now["peak"] - now["file"] - now["shared"] - before
    return {
        "batch": config.batch_size,
        "limit_mib": LIMIT >> 20,
        "grown_mib": grown >> 20,
        "kept": grown <= LIMIT,
    }


if __name__ == "__main__":
    main()
