"""Windows of simulations in HDF5 files, as the_well's dataset reads them."""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

FIELDS = ("t0_fields/density", "t0_fields/pressure", "t1_fields/velocity")
N_CHANNELS = 4


@dataclass(frozen=True)
class Size:
    """Sizes of the files, of a window and of a batch."""

    n_trajectories: tuple[int, ...]
    n_times: tuple[int, ...]
    side: int
    n_inputs: int
    stride: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size((8, 8, 6), (101, 101, 81), 64, 4, 2, 16, 120, 40),
    "quick": Size((4, 3), (40, 30), 32, 4, 2, 8, 20, 8),
    "tiny": Size((2, 1), (14, 12), 8, 2, 2, 4, 6, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write fields of shape (trajectories, times, side, side, ...), in one piece as the_well's."""
    rng = np.random.default_rng(0)
    for number, shape in enumerate(zip(size.n_trajectories, size.n_times, strict=True)):
        with h5py.File(folder / f"run-{number}.h5", "w") as file:
            for name in FIELDS:
                more = (2,) if name.startswith("t1") else ()
                whole = (*shape, size.side, size.side, *more)
                file[name] = rng.standard_normal(whole, dtype=np.float32)


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs and the next time step of each window of each trajectory of each file.

    Args:
        paths: The files.
        size: Length and stride of a window.
    """

    def __init__(self, paths: list[Path], size: Size) -> None:
        self.paths = paths
        self.size = size
        self.files: list[Any] = [None] * len(paths)
        self.span = size.n_inputs * size.stride + 1
        self.n_windows = []
        counts = []
        for path in paths:
            with h5py.File(path) as file:
                n_trajectories, n_times = file[FIELDS[0]].shape[:2]
                self.n_windows.append(n_times - self.span + 1)
                counts.append(n_trajectories * self.n_windows[-1])
        self.ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = bisect.bisect_right(self.ends, index)
        if self.files[number] is None:
            self.files[number] = h5py.File(self.paths[number])
        local = index - (self.ends[number - 1] if number else 0)
        trajectory, time = divmod(local, self.n_windows[number])
        parts = []
        for name in FIELDS:
            field = self.files[number][name]
            part = torch.as_tensor(field[trajectory, time : time + self.span : self.size.stride])
            parts.append(part if part.ndim == 4 else part.unsqueeze(-1))
        values = torch.cat(parts, dim=-1)
        return values[:-1], values[-1:]


def paths_of(folder: Path) -> list[Path]:
    """Return the files in order."""
    return sorted(folder.glob("run-*.h5"))


def sampler_of(n: int) -> RandomSampler:
    """Return the order of the windows, the same for each way."""
    return RandomSampler(range(n), generator=torch.Generator().manual_seed(SEED))


def original(folder: Path, size: Size, step: Step, n_workers: int = 0) -> None:
    """Read the window of each field for each sample."""
    dataset = Windows(paths_of(folder), size)
    loader = DataLoader(
        dataset, size.batch_size, sampler=sampler_of(len(dataset)), num_workers=n_workers
    )
    for x, y in itertools.islice(loader, size.n_batches):
        step(x.to(DEVICE), y.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the windows of each field, of all files."""
    options = {"axis": 1, "length": size.n_inputs + 1, "stride": size.stride}
    windows = [
        pinfeed.concat([pinfeed.HDF5Store(p, name).windows(**options) for p in paths_of(folder)])
        for name in FIELDS
    ]
    rows = sampler_of(windows[0].n_rows)
    with pinfeed.Feeder(windows, rows=rows, batch_size=size.batch_size, device=DEVICE) as feeder:
        for parts in itertools.islice(feeder, size.n_batches):
            values = torch.cat([p if p.ndim == 5 else p[..., None] for p in parts], dim=-1)
            step(values[:, :-1], values[:, -1:])


def make_step(size: Size) -> Step:
    """Return a training step of a small convolutional network with SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(size.n_inputs * N_CHANNELS, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, N_CHANNELS, 3, padding=1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # Times and channels become the channels of the images.
        images = x.permute(0, 1, 4, 2, 3).flatten(1, 2)
        loss = nn.functional.mse_loss(model(images), y[:, 0].permute(0, 3, 1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Simulations (the_well)",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "DataLoader": original,
        "DataLoader, 2 workers": functools.partial(original, n_workers=2),
        OURS: moved,
    },
    make_step=make_step,
    original=(Windows, original),
    moved=(moved,),
)
