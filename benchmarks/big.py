"""BigBatch: its memory, and the distance of its gradients from those of the plain batch."""

from __future__ import annotations

import argparse
import functools
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional

import pinfeed
from benchmarks.budget import on_cpu
from benchmarks.environment import environment, save

STRATEGIES = ("accumulate", "two_pass", "checkpoint", "offload")
CHUNK = 32
N = 64 * CHUNK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    print(environment())
    results = measure(arguments.device)
    print(save("big", results))


def measure(device: str) -> dict[str, Any]:
    """Run all measurements and return them as plain values."""
    results: dict[str, Any] = {"gradient error": errors(device)}
    print(tabulate(results["gradient error"], headers="keys"))
    results["peaks"] = peaks(device)
    print(tabulate(results["peaks"], headers="keys"))
    return results


def contrastive(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    unit = functional.normalize(outputs, dim=1)
    same = (labels[:, None] == labels[None]).float()
    return -(functional.log_softmax(unit @ unit.T / 0.1, 1) * same).sum(1).div(same.sum(1)).mean()


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), *middle, nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def dropouts() -> nn.Module:
    """Return a network with two layers of dropout."""
    return nn.Sequential(nn.Dropout(0.3), network(nn.Dropout(0.3)))


def errors(device: str) -> list[dict[str, str]]:
    """Return the relative error of all gradients to the plain step, or that it is refused.

    Both steps draw random numbers from the same seed. ``check`` fixes the numbers instead.
    """
    torch.manual_seed(0)
    x, y = torch.randn(100, 128), torch.randint(10, (100,))
    ignored = torch.where(torch.rand(100) < 0.4, -100, y)
    cases: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor]] = {
        "plain": (network, functional.cross_entropy, y),
        "BatchNorm": (lambda: network(nn.BatchNorm1d(256)), functional.cross_entropy, y),
        "dropout": (dropouts, functional.cross_entropy, y),
        "dropout, by `check`": (dropouts, functional.cross_entropy, y),
        "ignore_index": (network, functional.cross_entropy, ignored),
        "contrastive": (network, contrastive, y),
    }
    rows = []
    for name, (make, loss, targets) in cases.items():
        row = {"model": name}
        for strategy in (*STRATEGIES, "auto"):
            model, other = make().to(device), make().to(device)
            with (
                warnings.catch_warnings(record=True) as said,
                pinfeed.BigBatch(model, loss, chunk_size=16, strategy=strategy) as big,
            ):
                warnings.simplefilter("always")
                try:
                    if "check" in name:
                        error = big.check(x, targets, chunk_size=16).gradient_error
                    else:
                        got = gradients(model, functools.partial(big.backward, x, targets))
                        batch = x.to(device), targets.to(device)
                        want = gradients(other, functools.partial(plain, other, loss, *batch))
                        error = float((got - want).norm() / want.norm())
                    found = f"{error:.1e}"
                except pinfeed.ArgumentError:
                    found = "refused"
            row[strategy] = found + (", warned" if said else "")
        rows.append(row)
    return rows


def gradients(model: nn.Module, backward: Callable[[], object]) -> torch.Tensor:
    """Return the gradients of a step that draws random numbers from a fixed seed."""
    torch.manual_seed(1)
    backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def peaks(device: str, n: int = N) -> list[dict[str, Any]]:
    """Return the peak memory in MiB of a step of one chunk, and of a batch of ``n``.

    Gradients exist already, and the batch itself is on the host and not counted.
    """
    x, y = torch.randn(n, 3, 32, 32), torch.randint(10, (n,))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(65536, 10),
        ).to(device)

    rows = []
    for strategy, loss in (("accumulate", functional.cross_entropy), ("two_pass", contrastive)):
        model = make()
        chunk = peak(
            device,
            functools.partial(plain, model, loss, x[:CHUNK].to(device), y[:CHUNK].to(device)),
            3,
        )
        begin = time.perf_counter()
        with pinfeed.BigBatch(model, loss, chunk_size=CHUNK, strategy=strategy) as big:
            whole = peak(device, functools.partial(big.backward, x, y), 1)
        rows.append(
            {
                "strategy": strategy,
                "chunk_mib": round(chunk / 2**20, 1),
                "batch_mib": round(whole / 2**20, 1),
                "ratio": round(whole / chunk, 3),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    return rows


def plain(model: nn.Module, loss: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss(model(x), y).backward()


def peak(device: str, work: Callable[[], object], n: int) -> int:
    """Return the peak of allocated bytes in ``n`` runs, beyond what is allocated already."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(n):
            work()
        return torch.cuda.max_memory_allocated() - before

    def repeat() -> None:
        for _ in range(n):
            work()

    return on_cpu(repeat)


if __name__ == "__main__":
    main()
