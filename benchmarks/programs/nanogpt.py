"""nanoGPT's batches: windows of a flat file of tokens, with random starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_TOKENS = 512
"""Size of the vocabulary. It is small, so the last layer does not dominate the step."""


@dataclass(frozen=True)
class Size:
    """Sizes of the file, of a window and of a batch."""

    n_items: int
    block_size: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(100_000_000, 1024, 12, 2000, 12),
    "quick": Size(10_000_000, 256, 12, 300, 15),
    "tiny": Size(10_000, 32, 4, 4, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write a file of tokens without a header."""
    tokens = np.random.default_rng(0).integers(N_TOKENS, size=size.n_items, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")


def original(folder: Path, size: Size, step: Step) -> None:
    """Open a new memory map for each batch, because mapped memory would grow."""

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        length = size.block_size
        starts = torch.randint(len(data) - length, (size.batch_size,))
        inputs = [torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts]
        targets = [torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts]
        return torch.stack(inputs).to(DEVICE), torch.stack(targets).to(DEVICE)

    torch.manual_seed(SEED)
    for _ in range(size.n_batches):
        x, y = get_batch()
        step(x, y)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass windows of the file as rows, and the same starts as row indices."""
    path = folder / "train.bin"
    windows = pinfeed.NpyStore.windows(path, length=size.block_size + 1, dtype="uint16")
    torch.manual_seed(SEED)
    n_starts = windows.n_rows
    starts = [torch.randint(n_starts, (size.batch_size,)) for _ in range(size.n_batches)]
    with windows, pinfeed.Feeder(windows, rows=starts, device=DEVICE) as feeder:
        for tokens in feeder:
            x, y = tokens[:, :-1].long(), tokens[:, 1:].long()
            step(x, y)


class GPT(nn.Module):
    """Transformer of two layers."""

    def __init__(self, block_size: int, n_features: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, n_features)
        self.places = nn.Embedding(block_size, n_features)
        layer = nn.TransformerEncoderLayer(
            n_features, 2, 4 * n_features, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(n_features, N_TOKENS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(block_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places.weight
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def make_step(size: Size) -> Step:
    """Return a training step of the transformer with AdamW."""
    torch.manual_seed(0)
    model = GPT(size.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x).view(-1, N_TOKENS), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="nanoGPT",
    sizes=SIZES,
    prepare=prepare,
    ways={"get_batch": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
