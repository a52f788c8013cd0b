"""torch.compile: a compiled step over feeders, which is compiled once for all batches.

torch compiles a function again for a batch of another shape. The last batch of an epoch is smaller.
Drop it (``drop_last=True``), or declare that the first dimension varies
(``torch._dynamo.mark_dynamic``). No other property of a feeder's batches varies.
``python examples/compiled.py --backend inductor`` builds kernels, which needs a C++ compiler.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import pinfeed


def dense(backend: Any, *, mark: bool, drop_last: bool) -> list[float]:
    """Train a model on batches of rows for two epochs, and return the losses."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend) if backend else model
    rows = np.random.default_rng(0).normal(size=(1000, 16)).astype("float32")
    losses = []
    with pinfeed.Feeder(
        rows, batch_size=128, shuffle=True, drop_last=drop_last, device=device
    ) as feeder:
        for _ in range(2):
            for x in feeder:
                if mark:
                    torch._dynamo.mark_dynamic(x, 0)
                loss = compiled(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses


def embedded(backend: Any) -> list[float]:
    """Train a table in host memory. Its batches differ in the number of distinct ids."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = pinfeed.HostEmbedding(500, 16, name="table")
    optimizer = pinfeed.RowOptimizer(torch.optim.SGD, [table], lr=0.1)
    head = nn.Linear(16, 1).to(device)
    compiled = torch.compile(head, backend=backend) if backend else head
    ids = torch.randint(500, (12, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in pinfeed.train_rows(list(ids), {table: lambda batch: batch}, optimizer=optimizer):
        loss = compiled(table(batch)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(backend: str = "aot_eager") -> None:
    for mark, drop_last in ((False, True), (True, False)):
        counter = CompileCounterWithBackend(backend)
        losses = dense(counter, mark=mark, drop_last=drop_last)
        assert counter.frame_count == 1, f"compiled {counter.frame_count} times"
        np.testing.assert_allclose(losses, dense(None, mark=mark, drop_last=drop_last), rtol=1e-5)
        print(f"drop_last={drop_last}: {len(losses)} batches, compiled once")
        torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    losses = embedded(counter)
    assert counter.frame_count == 1, f"compiled {counter.frame_count} times"
    np.testing.assert_allclose(losses, embedded(None), rtol=1e-5)
    print(f"a table in host memory: {len(losses)} batches, compiled once")
    torch._dynamo.reset()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager")
    main(parser.parse_args().backend)
