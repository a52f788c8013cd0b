"""Batches of sequences of different lengths, padded, with a maximum number of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_TOKENS = 32_000
N_CLASSES = 4


@dataclass(frozen=True)
class Size:
    """Sizes of the sequences and of a batch."""

    n_sequences: int
    lengths: tuple[int, int]
    max_tokens: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(200_000, (10, 500), 16_384, 300, 60),
    "quick": Size(20_000, (10, 500), 16_384, 60, 20),
    "tiny": Size(300, (0, 20), 256, 6, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the tokens of all sequences, where each begins, and the labels."""
    rng = np.random.default_rng(0)
    low, high = size.lengths
    lengths = rng.integers(low, high, size.n_sequences, endpoint=True)
    offsets = np.concatenate([[0], lengths.cumsum()])
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "tokens.npy", rng.integers(N_TOKENS, size=offsets[-1], dtype=np.uint16))
    np.save(folder / "labels.npy", rng.integers(N_CLASSES, size=size.n_sequences))


class TokenBatches:
    """Batch sampler: sequences in random order, until the padded batch would have too many tokens.

    Args:
        lengths: Length of each sequence.
        max_tokens: Most tokens of a batch, padding included.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int) -> None:
        self.lengths = lengths
        self.max_tokens = max_tokens

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(SEED)
        batch: list[int] = []
        longest = 0
        for row in torch.randperm(len(self.lengths), generator=generator).tolist():
            longest = max(longest, int(self.lengths[row]))
            if batch and (len(batch) + 1) * longest > self.max_tokens:
                yield batch
                batch = []
                longest = int(self.lengths[row])
            batch.append(row)
        yield batch


class Sequences(Dataset[tuple[torch.Tensor, int]]):
    """Tokens and label of each sequence.

    Args:
        folder: Folder with the files.
    """

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.labels = np.load(folder / "labels.npy")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        tokens = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        return torch.from_numpy(tokens.astype(np.int64)), self.labels[row]


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, ...]:
    """Pad the sequences of a batch, and return their lengths and labels as well."""
    tokens, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(one) for one in tokens])
    return pad_sequence(list(tokens), batch_first=True), lengths, torch.tensor(labels)


def original(folder: Path, size: Size, step: Step, n_workers: int = 0) -> None:
    """Read single sequences, and pad them into batches."""
    dataset = Sequences(folder)
    sampler: Any = TokenBatches(np.diff(dataset.offsets), size.max_tokens)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=n_workers)
    for tokens, lengths, labels in loader:
        step(tokens.to(DEVICE), lengths.to(DEVICE), labels.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the sequences as ragged rows, and the same batch sampler."""
    tokens, offsets = folder / "tokens.npy", folder / "offsets.npy"
    with pinfeed.RaggedStore(tokens, offsets, layout="padded") as sequences:
        rows = TokenBatches(sequences.lengths, size.max_tokens)
        source = (sequences, folder / "labels.npy")
        with pinfeed.Feeder(source, rows=rows, device=DEVICE) as feeder:
            for (tokens, lengths), labels in feeder:
                step(tokens.long(), lengths, labels)


def make_step(size: Size) -> Step:
    """Return a training step of a classifier of mean embeddings with SGD."""
    torch.manual_seed(0)
    tokens_of = nn.Embedding(N_TOKENS, 32, sparse=True)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, N_CLASSES))
    optimizer = torch.optim.SGD([*tokens_of.parameters(), *model.parameters()], lr=0.1)

    def step(tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
        added = (tokens_of(tokens) * is_token[:, :, None]).sum(1)
        loss = nn.functional.cross_entropy(model(added / lengths[:, None].clamp(min=1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Token batches",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "DataLoader": original,
        "DataLoader, 2 workers": functools.partial(original, n_workers=2),
        OURS: moved,
    },
    make_step=make_step,
    original=(Sequences, collate, original),
    moved=(moved,),
)
