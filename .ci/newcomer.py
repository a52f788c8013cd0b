"""A first program of a new user.

The package check runs it, and type-checks it with mypy --strict, against the installed pinfeed.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pinfeed


def stream(folder: Path) -> None:
    rows = np.arange(1000 * 8, dtype=np.float32).reshape(1000, 8)
    np.save(folder / "rows.npy", rows)
    with pinfeed.Feeder(folder / "rows.npy", batch_size=64, shuffle=True, seed=0) as feeder:
        got = np.concatenate([batch.cpu().numpy() for batch in feeder])
    assert not np.array_equal(got, rows), "shuffled"
    assert np.array_equal(got[got[:, 0].argsort()], rows)


def wrap() -> None:
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=10)
    assert [x.tolist() for (x,) in pinfeed.wrap_loader(loader)] == [x.tolist() for (x,) in loader]


def resume(folder: Path) -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    pinfeed.checkpoint.save(folder / "checkpoint", model=model, step=7)
    assert pinfeed.checkpoint.resume(folder / "checkpoint", model=other)["step"] == 7
    assert torch.equal(model.weight, other.weight)


with tempfile.TemporaryDirectory() as name:
    stream(Path(name))
    wrap()
    resume(Path(name))
