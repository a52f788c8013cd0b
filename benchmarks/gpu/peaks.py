"""Peaks of training steps: estimated, measured by phase, and under a limit of torch's allocator."""

from __future__ import annotations

import functools
import gc
import itertools
import time

import torch

import pinfeed
from benchmarks import budget
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.zoo import ZOO
from pinfeed.training.memory_model.cuda_memory import clear_workspaces

_MORE_SIZES = {"LSTM": (256,)}
_N_STEPS = 3
_CAPPED = (("UNet", 16), ("GPT", 16), ("LSTM", 64))
_CAPS = (1.0, 0.9, 0.8)


def peaks(run: Run) -> list[Cell]:
    """Return cells of the models at up to three batch sizes, and of limits below their peaks."""
    reserved: dict[tuple[str, int], int] = {}
    # The first use of the libraries in a process takes memory that no later step takes.
    warm = functools.cache(functools.partial(measured, run.device, "MLP", 64))

    def compared(name: str, n: int) -> Fields:
        warm()
        found = measured(run.device, name, n)
        case = ZOO[name]
        estimate = pinfeed.estimate(case.make, n, **case.shapes, device=run.device)
        reserved[name, n] = found["reserved_peak"]
        return {
            **found,
            "estimated_reserved": estimate.reserved_bytes,
            "estimate_to_measured": round(estimate.reserved_bytes / found["reserved_peak"], 3),
            "confidence": estimate.confidence,
        }

    def capped(name: str, n: int, share: float) -> Fields:
        run.require_cuda("a limit of the allocator")
        if (name, n) not in reserved:
            reserved[name, n] = measured(run.device, name, n)["reserved_peak"]
        return measured(run.device, name, n, int(share * reserved[name, n]))

    sizes = {
        name: (*case.batch_sizes, *_MORE_SIZES.get(name, ()))[::-1] if run.cuda else (1,)
        for name, case in ZOO.items()
    }
    if not run.cuda:
        return [
            Cell(
                {"model": name, "batch": 1},
                functools.partial(budget.predicted_and_measured, name, ZOO[name], 1, run.device),
            )
            for name in sizes
        ]
    # Every model is measured once before any is measured with another batch size.
    rounds = itertools.zip_longest(*([(name, n) for n in sizes[name]] for name in sizes))
    cells = [
        Cell({"model": name, "batch": n}, functools.partial(compared, name, n))
        for name, n in filter(None, itertools.chain(*rounds))
    ]
    caps = [
        Cell({"model": name, "batch": n, "limit": share}, functools.partial(capped, name, n, share))
        for name, n in _CAPPED
        for share in _CAPS
    ]
    return [*cells[: len(sizes)], *caps, *cells[len(sizes) :]]


def measured(device: str, name: str, n: int, limit: int | None = None) -> Fields:
    """Train some steps, and return the peaks of the last one in bytes, by phase.

    Args:
        device: A GPU.
        name: Name of the model.
        n: Batch size.
        limit: Bytes that torch's allocator may reserve; None for no limit.
    """
    gc.collect()
    # The workspaces of earlier models would not count as growth.
    clear_workspaces()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_reserved()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (before + limit) / total)
    try:
        found = _trained(device, name, n)
        found["reserved_peak"] -= before
    except torch.cuda.OutOfMemoryError as error:
        found = {"out_of_memory": str(error).splitlines()[0]}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    return {**found, "limit": limit, "retries": retries}


def _trained(device: str, name: str, n: int) -> Fields:
    case = ZOO[name]
    torch.manual_seed(0)
    model = case.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (tensor.to(device) for tensor in budget.batch(case, n))
    start = torch.cuda.memory_allocated()
    allocated: dict[str, int] = {}
    reserved: list[int] = []

    def end_phase(phase: str) -> None:
        torch.cuda.synchronize()
        # The allocator has one peak of each kind for the time since it was reset.
        allocated[phase] = torch.cuda.max_memory_allocated()
        reserved.append(torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(_N_STEPS):
        begin = time.perf_counter()
        loss = case.loss(model(x), y)
        end_phase("forward")
        loss.backward()
        end_phase("backward")
        # Its graph is free, and its value is not needed.
        del loss
        optimizer.step()
        end_phase("optimizer")
        optimizer.zero_grad()
        step_s = time.perf_counter() - begin
    return {
        "model_and_batch": start,
        "allocated_peaks": allocated,
        "reserved_peak": max(reserved),
        "reserved_after_first_step": reserved[2],
        "step_ms": round(step_s * 1e3, 3),
    }
