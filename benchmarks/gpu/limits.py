"""Limits: whether batch sizes that ``Config`` chooses hold, and whether larger ones would fit."""

from __future__ import annotations

import functools
import gc
import time

import torch

import pinfeed
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.zoo import MORE, ZOO

_SHARES = (0.25, 0.5, 0.9)
"""Limits of the process, relative to the memory of the card."""
_LARGER = (1.1, 1.2, 1.4)
_N_STEPS = 3
_MODELS = ZOO | MORE
_GPU = torch.device("cuda", 0)


def limits(run: Run) -> list[Cell]:
    """Return a cell for each model and limit; the first cells have every model and every limit."""
    rounds = [
        (name, _SHARES[(i + place) % len(_SHARES)])
        for i in range(len(_SHARES))
        for place, name in enumerate(_MODELS)
    ]
    return [
        Cell({"model": name, "limit": share}, functools.partial(chosen, run, name, share))
        for name, share in rounds
    ]


def chosen(run: Run, name: str, share: float) -> Fields:
    """Let ``Config`` choose a batch size, train with it, and try larger ones under the same cap."""
    run.require_cuda("a limit of the allocator")
    begin = time.perf_counter()
    free, total = torch.cuda.mem_get_info(_GPU)
    case = _MODELS[name]
    config = pinfeed.Config(
        gpu_memory_limit=int(share * total),
        device=_GPU,
        model=case.make,
        optimizer=torch.optim.AdamW,
        **case.shapes,
        preferred_batch_size=1 << 24,
    )
    try:
        found = config.budget
        seconds = time.perf_counter() - begin
        n = found.batch_size
        ahead = found.feeder.device_bytes // n
        held = trained(name, n, ahead)
        larger = {}
        for factor in _LARGER:
            larger[factor] = trained(name, int(factor * n), ahead)["fits"]
            if not larger[factor]:
                break
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, _GPU)
    return {
        "batch_size": n,
        "limit_bytes": found.gpu_memory_limit,
        "measured_bytes": found.gpu_bytes,
        "said": found.step.notes[-1],
        "choice_s": round(seconds, 2),
        "held": held,
        "larger_fit": larger,
        "free_before": free,
    }


def trained(name: str, n: int, ahead_per_sample: int) -> Fields:
    """Train some steps under the current cap, and return whether they fitted."""
    gc.collect()
    torch.cuda.empty_cache()
    found: Fields = {}
    try:
        found["retries"] = _train(name, n, ahead_per_sample)
    except RuntimeError as error:
        found["error"] = str(error).splitlines()[0]
    free, total = torch.cuda.mem_get_info(_GPU)
    found["reserved"] = torch.cuda.memory_reserved(_GPU)
    found["device_used"] = total - free
    found["fits"] = found.get("retries") == 0
    return found


def _train(name: str, n: int, ahead_per_sample: int) -> int:
    """Train some steps; return how often the allocator's cache was emptied after the first."""
    case = _MODELS[name]
    model = case.make().to(_GPU)
    optimizer = torch.optim.AdamW(model.parameters())
    shapes = ((case.input_shape, case.input_dtype), (case.output_shape, case.output_dtype))
    x, y = (
        torch.zeros((n, *shape), dtype=getattr(torch, dtype), device=_GPU)
        for shape, dtype in shapes
    )
    # The batch of the step is one of the feeder's.
    nbytes = n * ahead_per_sample - x.nbytes - y.nbytes
    ahead = torch.empty(nbytes, dtype=torch.uint8, device=_GPU)
    retries = []
    for _ in range(_N_STEPS):
        outputs = model(x)
        loss = case.loss(outputs, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        retries.append(torch.cuda.memory_stats(_GPU)["num_alloc_retries"])
    torch.cuda.synchronize(_GPU)
    del ahead
    return retries[-1] - retries[0]
