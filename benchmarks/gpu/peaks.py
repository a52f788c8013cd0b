"""Peaks of training steps: estimated, and measured by phase."""

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

_MORE_SIZES = {"LSTM": (256,)}
_N_STEPS = 3


def peaks(run: Run) -> list[Cell]:
    """Return cells of the models at up to three batch sizes."""
    # The first use of the libraries in a process takes memory that no later step takes.
    warm = functools.cache(functools.partial(measured, run.device, "MLP", 64))

    def compared(name: str, n: int) -> Fields:
        warm()
        found = measured(run.device, name, n)
        case = ZOO[name]
        estimate = pinfeed.estimate(case.make, n, **case.shapes, device=run.device)
        return {
            **found,
            "estimated": estimate.nbytes,
            "estimate_to_measured": round(estimate.nbytes / found["reserved_peak"], 3),
        }

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
    return [
        Cell({"model": name, "batch": n}, functools.partial(compared, name, n))
        for name, n in filter(None, itertools.chain(*rounds))
    ]


def measured(device: str, name: str, n: int) -> Fields:
    """Train some steps, and return the peaks of the last one in bytes, by phase.

    Args:
        device: A GPU.
        name: Name of the model.
        n: Batch size.
    """
    gc.collect()
    budget.clear_workspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    found = _trained(device, name, n)
    found["reserved_peak"] -= before
    return found


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
