"""Sequences of different lengths: padded batches with a bounded number of tokens.

A ``RaggedStore`` has a row for each sequence. ``element_batches`` puts as many rows into a batch as
fit in 4,096 tokens, padding included. The order differs in each epoch. The batches are those of a
DataLoader with the same batches of row indices and a collate function that pads. The plan counts
the largest batch that can occur.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import pinfeed

MAX_TOKENS = 4096


class Sequences(Dataset[tuple[torch.Tensor, int]]):
    """Tokens and label of each sequence: the original dataset."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.labels = np.load(folder / "labels.npy")

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        tokens = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        return torch.from_numpy(tokens.astype(np.int64)), self.labels[row]


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, ...]:
    tokens, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(one) for one in tokens])
    return pad_sequence(list(tokens), batch_first=True), lengths, torch.tensor(labels)


def main(n_sequences: int = 10_000, longest: int = 500) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        offsets = np.concatenate([[0], rng.integers(10, longest + 1, n_sequences).cumsum()])
        np.save(folder / "offsets.npy", offsets)
        np.save(folder / "tokens.npy", rng.integers(32_000, size=offsets[-1], dtype=np.uint16))
        np.save(folder / "labels.npy", rng.integers(4, size=n_sequences))

        paths = (folder / "tokens.npy", folder / "offsets.npy")
        with pinfeed.RaggedStore(*paths, layout="padded") as sequences:
            batches = pinfeed.rows.element_batches(
                sequences.lengths, MAX_TOKENS, padded=True, order=pinfeed.rows.shuffled(seed=1)
            )
            source = (sequences, folder / "labels.npy")
            with pinfeed.Feeder(source, rows=batches) as feeder:
                for epoch in range(2):
                    batches.set_epoch(epoch)
                    rows = [list(batch) for batch in batches]
                    loader = DataLoader(Sequences(folder), batch_sampler=rows, collate_fn=collate)
                    for ours, theirs in zip(feeder, loader, strict=True):
                        (tokens, lengths), labels = ours
                        assert tokens.numel() <= MAX_TOKENS
                        got = (tokens.long().cpu(), lengths.cpu(), labels.cpu())
                        assert all(map(torch.equal, got, theirs))
                print(f"{feeder.stats.batches} batches of two epochs, equal to padded samples")


if __name__ == "__main__":
    main()
