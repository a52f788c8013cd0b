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
from pinfeed import BigBatch, GiB
from pinfeed.training.offload.offload import Offload

_N_WORDS = 8192
_LENGTH = 256
_N_WARM = 2
_N_STEPS = 6
MODES = ("plain", "checkpointing", "Offload", "checkpointing and Offload")


def large_batches(run: Run) -> list[Cell]:
    """Return cells of a GPT with and without Offload, and of BigBatch's gradients and peaks."""
    # Deterministic matrix products need this variable, which is read when the first one begins.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = (64, 16) if run.cuda else (2,)
    cells = []
    for n in sizes:
        for mode in MODES:
            key = {"what": "Offload, step", "batch": n, "mode": mode}
            cells.append(Cell(key, functools.partial(step, run.device, n, mode)))
    cells += [
        Cell(
            {"what": "Offload, gradients", "batch": n}, functools.partial(gradients, run.device, n)
        )
        for n in sizes
    ]
    n_images = big.N if run.cuda else 4 * big.CHUNK
    n_seeds = 200 if run.cuda else 4
    return [
        *cells,
        Cell({"what": "two layers of dropout"}, lambda: dropout(run.device, n_seeds)),
        Cell({"what": "check(), attention with dropout"}, lambda: attention(run.device)),
        Cell({"what": "BigBatch, gradient errors"}, lambda: {"rows": big.errors(run.device)}),
        Cell({"what": "BigBatch, peaks"}, lambda: {"rows": big.peaks(run.device, n_images)}),
    ]


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


def step(device: str, n: int, mode: str) -> Fields:
    """Return milliseconds of a step, its peak memory beyond the model and gradients, and its moves.

    The host's time is that until everything is queued; moves are those of one step.
    """
    model, ids, targets = network(device, n, checkpointed="checkpointing" in mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    n_warm, n_steps = (_N_WARM, _N_STEPS) if device == "cuda" else (1, 1)
    times, host = [], []
    with offload_on(device) if "Offload" in mode else contextlib.nullcontext() as offload:
        work = functools.partial(_step, model, ids, targets, offload, optimizer)
        for _ in range(n_warm):
            work()
        before = offload.stats if offload else None
        for _ in range(n_steps):
            wait(device)
            begin = time.perf_counter()
            work()
            host.append(time.perf_counter() - begin)
            wait(device)
            times.append(time.perf_counter() - begin)
        found = {
            "step_ms": round(statistics.median(times) * 1e3, 2),
            "host_ms": round(statistics.median(host) * 1e3, 2),
        }
        if offload is not None and before is not None:
            after = offload.stats
            found |= {
                "out_mib": (after.offloaded_bytes - before.offloaded_bytes) // n_steps >> 20,
                "back_mib": (after.restored_bytes - before.restored_bytes) // n_steps >> 20,
                "missed": (after.n_missed - before.n_missed) / n_steps,
                "host_mib": after.blocks_bytes >> 20,
            }
        found["peak_mib"] = big.peak(device, work, 1) >> 20
        return found


def dropout(device: str, n_seeds: int) -> Fields:
    """Compare gradients of chunks and of the whole batch, with two layers of dropout.

    Chunks draw other masks than the whole batch, so single gradients differ and their means over
    seeds agree: as well as the means over two sets of seeds of the whole batch.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 64), nn.Dropout(0.3)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 5)).to(device)
    x, y = torch.randn(128, 64, device=device), torch.randint(5, (128,), device=device)

    def mean(backward: Callable[[], object], seeds: range) -> torch.Tensor:
        model.zero_grad()
        for seed in seeds:
            torch.manual_seed(seed)
            backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters()]  # type: ignore[union-attr]
        return torch.cat(gradients) / len(seeds)

    def whole() -> None:
        functional.cross_entropy(model(x), y).backward()

    loss = functional.cross_entropy
    with BigBatch(model, loss, chunk_size=16, strategy="accumulate") as big_batch:
        in_chunks = [mean(lambda: big_batch.backward(x, y), range(n)) for n in (1, n_seeds)]
    first, plain = (mean(whole, range(n)) for n in (1, n_seeds))
    other = mean(whole, range(n_seeds, 2 * n_seeds))
    return {
        "of_one_seed": _distance(in_chunks[0], first),
        "of_means": _distance(in_chunks[1], plain),
        "of_means_of_the_whole_batch": _distance(other, plain),
        "seeds": n_seeds,
    }


def attention(device: str) -> Fields:
    """Check a layer with attention and dropout, whose backward pass draws its masks again.

    ``check`` fixes the random numbers of both steps, which fused kernels may not allow.
    """
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True).to(device)
    x, y = torch.randn(8, 16, 64, device=device), torch.randn(8, 16, 64, device=device)
    loss = functional.mse_loss
    with BigBatch(model, loss, chunk_size=2, strategy="accumulate", verify=False) as big_batch:
        found = big_batch.check(x, y)
    return {"gradient_error": found.gradient_error, "fixed_numbers": found.has_fixed_numbers}


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return round(float((found - expected).norm() / expected.norm()), 4)


def offload_on(device: str) -> Offload:
    """Return an Offload whose limit is enough for the saved tensors of these batches."""
    return Offload(device, host_limit=GiB(24) if device == "cuda" else GiB(2))


def network(
    device: str, n: int, *, checkpointed: bool = False
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a GPT, larger on a GPU, and a batch of word numbers with the next words."""
    torch.manual_seed(0)
    width = 768 if device == "cuda" else 96
    model = GPT(n_words=_N_WORDS, n=width, length=_LENGTH, checkpointed=checkpointed).to(device)
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
