"""Random segments of recordings, as for HiFi-GAN and other vocoders."""

from __future__ import annotations

import itertools
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Run, Step

SEGMENT = 8192
RATE = 22_050


@dataclass(frozen=True)
class Size:
    """Sizes of the recordings and of a batch."""

    n_files: int
    seconds: float
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(2000, 6.0, 16, 120, 40),
    "quick": Size(500, 3.0, 16, 30, 20),
    "tiny": Size(60, 0.5, 8, 7, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write recordings as .wav files, and all of their samples one after the other as .npy."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(size.seconds * RATE * 0.8, size.seconds * RATE * 1.2, size.n_files)
    offsets = np.concatenate([[0], lengths.cumsum()])
    np.save(folder / "offsets.npy", offsets)
    samples = np.lib.format.open_memmap(folder / "samples.npy", "w+", np.int16, (int(offsets[-1]),))
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        samples[begin:end] = rng.integers(-9999, 9999, end - begin)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
            file.writeframes(samples[begin:end].tobytes())
    samples.flush()


def starts_of(folder: Path) -> np.ndarray:
    """Return where the segment of each recording begins in this epoch, shape (n_files,)."""
    lengths = np.diff(np.load(folder / "offsets.npy"))
    return np.random.default_rng(SEED).integers(0, lengths - SEGMENT + 1)


def order(size: Size) -> list[torch.Tensor]:
    """Return the recordings of each batch of an epoch."""
    generator = torch.Generator().manual_seed(SEED)
    return list(torch.randperm(size.n_files, generator=generator).split(size.batch_size))


class Recordings(Dataset[torch.Tensor]):
    """Reads a recording, and cuts its segment out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = starts_of(folder)

    def __getitem__(self, i: int) -> torch.Tensor:
        with wave.open(str(self.folder / f"{i}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        segment = samples[self.starts[i] : self.starts[i] + SEGMENT]
        return torch.from_numpy(segment.astype(np.float32) / 32768)


class Segments(Dataset[torch.Tensor]):
    """Cuts the segment of a recording out of the file of all samples."""

    def __init__(self, folder: Path) -> None:
        self.samples = np.load(folder / "samples.npy", mmap_mode="r")
        self.begins = np.load(folder / "offsets.npy")[:-1] + starts_of(folder)

    def __getitem__(self, i: int) -> torch.Tensor:
        segment = self.samples[self.begins[i] : self.begins[i] + SEGMENT]
        return torch.from_numpy(segment.astype(np.float32) / 32768)


def loader_way(dataset: Any, n_workers: int) -> Run:
    def run(folder: Path, size: Size, step: Step) -> None:
        rows = [batch.tolist() for batch in order(size)]
        for x in DataLoader(dataset(folder), batch_sampler=rows, num_workers=n_workers):
            step(x.to(DEVICE))

    return run


def moved(folder: Path, size: Size, step: Step) -> None:
    """Read each segment as a row of the file of all samples."""
    begins = np.load(folder / "offsets.npy")[:-1] + starts_of(folder)
    rows = [begins[batch] for batch in order(size)]
    segments = pinfeed.NpyStore.windows(folder / "samples.npy", length=SEGMENT)
    with segments, pinfeed.Feeder(segments, rows=rows, device=DEVICE) as feeder:
        for x in feeder:
            step(x.float() / 32768)


def make_step(size: Size) -> Step:
    """Return a training step of a small convolutional discriminator with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 15, 4), nn.LeakyReLU(0.1), nn.Conv1d(16, 32, 15, 4), nn.LeakyReLU(0.1)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x[:, None]).mean((1, 2)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Audio segments (HiFi-GAN)",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "DataLoader of .wav files": loader_way(Recordings, 0),
        "DataLoader, 2 workers": loader_way(Recordings, 2),
        "DataLoader, samples in one file": loader_way(Segments, 0),
        OURS: moved,
    },
    make_step=make_step,
    original=(Recordings,),
    moved=(moved,),
)
