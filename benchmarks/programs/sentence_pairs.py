"""Tokenized pairs of sentences in padded batches, as in the nlp_example of accelerate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_TOKENS = 30_000
N_KINDS = 2

Sample = dict[str, Any]
"""Lists of numbers, one for each token, and the label."""
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of the dataset, of the sentences and of a batch."""

    n_pairs: int
    lengths: tuple[int, int]
    batch_size: int
    n_batches: int
    n_steps: int


# The dataset of the example has 3,668 pairs, most of them with 30 to 80 tokens.
SIZES = {
    "full": Size(24_000, (15, 40), 16, 1500, 200),
    "quick": Size(3668, (15, 40), 16, 229, 60),
    "tiny": Size(60, (1, 9), 16, 4, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the tokens of all sentences, the lengths of both sentences of each pair, and labels."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(*size.lengths, size=(size.n_pairs, 2), endpoint=True)
    np.save(folder / "lengths.npy", lengths)
    np.save(folder / "tokens.npy", rng.integers(1, N_TOKENS, size=lengths.sum()))
    np.save(folder / "labels.npy", rng.integers(2, size=size.n_pairs))


class Pairs(Dataset[Sample]):
    """Pairs as lists, as a tokenizer returns them.

    Args:
        folder: Folder with the files.
    """

    def __init__(self, folder: Path) -> None:
        lengths = np.load(folder / "lengths.npy")
        ends = lengths.sum(1).cumsum()[:-1]
        tokens = np.split(np.load(folder / "tokens.npy"), ends)
        labels = np.load(folder / "labels.npy").tolist()
        self.samples = [
            {
                "input_ids": ids.tolist(),
                "token_type_ids": [0] * first + [1] * second,
                "attention_mask": [1] * (first + second),
                "labels": label,
            }
            for ids, (first, second), label in zip(tokens, lengths.tolist(), labels, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Sample:
        return self.samples[row]


def collate(samples: list[Sample]) -> Batch:
    """Pad the lists of a batch to the longest one."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {}
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        padded = [sample[name] + [0] * (longest - len(sample[name])) for sample in samples]
        batch[name] = torch.tensor(padded)
    batch["labels"] = torch.tensor([sample["labels"] for sample in samples])
    return batch


def make_loader(folder: Path, size: Size) -> DataLoader[Sample]:
    """Return the loader of a shuffled epoch."""
    torch.manual_seed(SEED)
    return DataLoader(Pairs(folder), size.batch_size, shuffle=True, collate_fn=collate)


def original(folder: Path, size: Size, step: Step) -> None:
    """Move each batch to the device in the loop."""
    for batch in make_loader(folder, size):
        batch = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
        step(*batch.values())


def moved(folder: Path, size: Size, step: Step) -> None:
    """Wrap the loader."""
    for batch in pinfeed.wrap_loader(make_loader(folder, size), device=DEVICE):
        step(*batch.values())


class Classifier(nn.Module):
    """Transformer of one layer with the mean of its outputs as features."""

    def __init__(self, n_features: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, n_features, sparse=True)
        self.kinds = nn.Embedding(N_KINDS, n_features)
        self.layer = nn.TransformerEncoderLayer(
            n_features, 2, 4 * n_features, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(n_features, 2)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.tokens(ids) + self.kinds(kinds), src_key_padding_mask=mask == 0)
        mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(mean)


def make_step(size: Size) -> Step:
    """Return a training step of the classifier with SGD."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        *inputs, labels = batch
        loss = nn.functional.cross_entropy(model(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="nlp_example of accelerate",
    sizes=SIZES,
    prepare=prepare,
    ways={"DataLoader": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
