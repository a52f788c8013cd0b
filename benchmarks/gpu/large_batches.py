"""Batches that do not fit: saved tensors offloaded to the host, and batches in chunks."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks import big
from benchmarks.gpu.bench import wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.zoo import GPT
from pinfeed import GiB
from pinfeed.training.offload.offload import Offload

_N_WORDS = 8192
_LENGTH = 256
_N_WARM = 2
_N_STEPS = 6


def large_batches(run: Run) -> list[Cell]:
    """Return cells of a GPT with and without Offload, and of BigBatch's gradients and peaks."""
    # Deterministic matrix products need this variable, which is read when the first one begins.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = (16, 64) if run.cuda else (2,)
    cells = []
    for n in sizes:
        cells.append(
            Cell(
                {"what": "Offload, gradients", "batch": n},
                functools.partial(gradients, run.device, n),
            )
        )
        for mode in ("plain", "Offload"):
            key = {"what": "Offload, step", "batch": n, "mode": mode}
            cells.append(
                Cell(key, functools.partial(step, run.device, n, offloaded=mode == "Offload"))
            )
    n_images = big.N if run.cuda else 4 * big.CHUNK
    cells.append(
        Cell({"what": "BigBatch, gradient errors"}, lambda: {"rows": big.errors(run.device)})
    )
    cells.append(
        Cell({"what": "BigBatch, peaks"}, lambda: {"rows": big.peaks(run.device, n_images)})
    )
    return cells


def gradients(device: str, n: int) -> Fields:
    """Compare the gradients of two plain steps and one with Offload, with deterministic kernels."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model, ids, targets = network(device, n)
        plain = _gradients(model, ids, targets, None)
        again = _gradients(model, ids, targets, None)
        with offload_on(device) as offload:
            moved = _gradients(model, ids, targets, offload)
            n_bytes = offload.stats.offloaded_bytes
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "plain_equals_plain": all(map(torch.equal, plain, again)),
        "offload_equals_plain": all(map(torch.equal, plain, moved)),
        "parameters_that_differ": sum(
            not torch.equal(a, b) for a, b in zip(plain, moved, strict=True)
        ),
        "offloaded_mib": n_bytes >> 20,
    }


def step(device: str, n: int, *, offloaded: bool) -> Fields:
    """Return milliseconds of a step, and its peak memory beyond the model and gradients."""
    model, ids, targets = network(device, n)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    with offload_on(device) if offloaded else contextlib.nullcontext() as offload:
        work = functools.partial(_step, model, ids, targets, offload, optimizer)
        for _ in range(_N_WARM):
            work()
        for _ in range(_N_STEPS):
            wait(device)
            begin = time.perf_counter()
            work()
            wait(device)
            times.append(time.perf_counter() - begin)
        peak = big.peak(device, work, 1)
        found = {"step_ms": round(statistics.median(times) * 1e3, 2), "peak_mib": peak >> 20}
        if offload is not None:
            stats = offload.stats
            per_step = stats.offloaded_bytes // (_N_WARM + _N_STEPS + 1)
            found |= {
                "offloaded_mib": per_step >> 20,
                "host_mib": stats.blocks_bytes >> 20,
                "missed": stats.n_missed,
            }
        return found


def offload_on(device: str) -> Offload:
    """Return an Offload whose limit is enough for the saved tensors of these batches."""
    return Offload(device, host_limit=GiB(24) if device == "cuda" else GiB(2))


def network(device: str, n: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a GPT, larger on a GPU, and a batch of word numbers with the next words."""
    torch.manual_seed(0)
    model = GPT(n_words=_N_WORDS, n=768 if device == "cuda" else 96, length=_LENGTH).to(device)
    ids = torch.randint(_N_WORDS, (n, _LENGTH), device=device)
    return model, ids, ids.roll(-1, dims=1)


def _gradients(
    model: nn.Module, ids: torch.Tensor, targets: torch.Tensor, offload: Offload | None
) -> list[torch.Tensor]:
    model.zero_grad()
    _backward(model, ids, targets, offload)
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def _step(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    offload: Offload | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    optimizer.zero_grad(set_to_none=False)
    _backward(model, ids, targets, offload)
    optimizer.step()


def _backward(
    model: nn.Module, ids: torch.Tensor, targets: torch.Tensor, offload: Offload | None
) -> None:
    saved: Callable[..., contextlib.AbstractContextManager[None]] = (
        contextlib.nullcontext if offload is None else offload.step
    )
    with saved(model), torch.autocast(ids.device.type, torch.bfloat16):
        loss = functional.cross_entropy(model(ids), targets)
    loss.backward()
