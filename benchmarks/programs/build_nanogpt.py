"""build-nanogpt's batches: consecutive runs of tokens from shards that are loaded as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import pinfeed
from benchmarks.programs import nanogpt
from benchmarks.programs.program import DEVICE, OURS, Program, Step


@dataclass(frozen=True)
class Size:
    """Sizes of the shards, of a sequence and of a batch."""

    n_shards: int
    n_items: int
    block_size: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(4, 10_000_000, 1024, 16, 2400, 8),
    "quick": Size(4, 1_000_000, 256, 16, 900, 15),
    "tiny": Size(2, 600, 32, 4, 8, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write a .npy file of tokens for each shard."""
    rng = np.random.default_rng(0)
    for number in range(size.n_shards):
        tokens = rng.integers(nanogpt.N_TOKENS, size=size.n_items, dtype=np.uint16)
        np.save(folder / f"train-{number:06d}.npy", tokens)


class DataLoaderLite:
    """Batches that are views of a shard, one run of tokens after another.

    Args:
        folder: Folder with the shards.
        size: Length of a sequence, and sequences of a batch.
    """

    def __init__(self, folder: Path, size: Size) -> None:
        self.shape = (size.batch_size, size.block_size)
        self.n_tokens = size.batch_size * size.block_size
        self.shards = sorted(folder.glob("train-*.npy"))
        self.open(0)

    def open(self, shard: int) -> None:
        """Load a shard, and begin at its first token."""
        self.shard = shard % len(self.shards)
        tokens = np.load(self.shards[self.shard]).astype(np.int32)
        self.tokens = torch.tensor(tokens, dtype=torch.long)
        self.position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next inputs and targets, and open the next shard if no batch remains."""
        run = self.tokens[self.position : self.position + self.n_tokens + 1]
        self.position += self.n_tokens
        if self.position + self.n_tokens + 1 > len(self.tokens):
            self.open(self.shard + 1)
        return run[:-1].view(self.shape), run[1:].view(self.shape)


def original(folder: Path, size: Size, step: Step) -> None:
    """Load each shard as a whole, in the loop."""
    loader = DataLoaderLite(folder, size)
    for _ in range(size.n_batches):
        x, y = loader.next_batch()
        step(x.to(DEVICE), y.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the run of tokens of each batch as a row."""
    shape = (size.batch_size, size.block_size)
    n_tokens = size.batch_size * size.block_size
    path = str(folder / "train-*.npy")
    runs = pinfeed.NpyStore.windows(path, length=n_tokens + 1, step=n_tokens)
    with runs, pinfeed.Feeder(runs, batch_size=1, device=DEVICE) as feeder:
        while True:
            for row in feeder:
                run = row[0].long()
                step(run[:-1].view(shape), run[1:].view(shape))


PROGRAM = Program(
    title="build-nanogpt",
    sizes=SIZES,
    prepare=prepare,
    ways={"DataLoaderLite": original, OURS: moved},
    make_step=nanogpt.make_step,
    original=(DataLoaderLite, original),
    moved=(moved,),
)
