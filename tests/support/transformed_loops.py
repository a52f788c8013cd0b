"""Loops with batch transforms that take generators, and their results."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from pinfeed import ArrayStore, Feeder, HostEmbedding, RowOptimizer, train_rows, wrap_loader

N, SIZE = 26, 4
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
IDS = np.arange(N) * 5 % 13
TABLE = np.linspace(0, 1, 26, dtype=np.float32).reshape(13, 2)
DEPTHS = [0, 1, 2, 5, None]
KINDS = ["feeder", "loader", "fetch", "table"]


def generator_of(epoch: int, number: int, which: int, seed: int = 3) -> torch.Generator:
    """Return the generator of a function, by the rule that the documentation states."""
    state = np.random.SeedSequence((seed, epoch, number, which)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def on_host(batch: Any, generator: torch.Generator) -> Any:
    return {**batch, "x": batch["x"] + torch.rand(batch["x"].shape, generator=generator)}


def on_device(batch: Any, generator: torch.Generator) -> Any:
    batch, rows = batch if isinstance(batch, tuple) else (batch, {})
    batch["x"].mul_(torch.rand((), generator=generator))
    return {"double": batch["x"].double(), "id": batch["id"], **rows}


def loader() -> Any:
    def collate(rows: list[int]) -> Any:
        return {"x": torch.from_numpy(X[rows].copy()), "id": torch.from_numpy(IDS[rows])}

    generator = torch.Generator().manual_seed(5)
    data: Any = list(range(N))
    return DataLoader(data, SIZE, shuffle=True, collate_fn=collate, generator=generator)


def feeder_of(kind: str, **options: Any) -> Any:
    options = {"seed": 3, "host_transform": on_host, "device_transform": on_device, **options}
    options.setdefault("device", "cpu")
    if kind == "feeder":
        return Feeder({"x": X, "id": IDS}, batch_size=SIZE, shuffle=True, **options)
    if kind == "several readers":
        # The size of these batches is unknown, so several threads gather them.
        rows = [list(range(i, min(i + SIZE, N))) for i in range(0, N, SIZE)]
        return Feeder({"x": X, "id": IDS}, rows=rows, **options)
    if kind == "loader":
        return wrap_loader(loader(), **options)
    if kind == "fetch":
        return wrap_loader(loader(), fetch={"row": (TABLE, "id")}, **options)
    table = HostEmbedding(13, 2, store=ArrayStore(TABLE.copy()))
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.5)
    loop = train_rows(loader(), {table: "id"}, optimizer=optimizer, **options)
    loop.table, loop.optimizer = table, optimizer
    return loop


def step(feeder: Any, batch: Any) -> Any:
    """Train the table, if there is one; return the values of the batch."""
    values = {key: value.clone() for key, value in batch.items()}
    if hasattr(feeder, "optimizer"):
        found = feeder.table(batch["id"])
        (found * batch["double"][:, :2]).sum().backward()
        feeder.optimizer.step()
        feeder.optimizer.zero_grad()
        values["found"] = found.detach().clone()
    return values


def batches_of(feeder: Any, n_epochs: int = 2) -> list[Any]:
    with feeder:
        return [step(feeder, batch) for _ in range(n_epochs) for batch in feeder]


def require_equal(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
