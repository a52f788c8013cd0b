"""Fine-tuning on a tokenized dataset with ``group_by_length``, as the Trainer of Transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step
from benchmarks.programs.sentence_pairs import N_TOKENS, Classifier

Sample = dict[str, Any]
"""Lists of numbers, one for each token, and the label."""


@dataclass(frozen=True)
class Size:
    """Sizes of the dataset, of the texts and of a batch.

    Lengths are log-normal, with this median, and at most ``longest``.
    """

    n_texts: int
    median: int
    longest: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(24_000, 100, 512, 16, 1500, 100),
    "quick": Size(4000, 100, 512, 16, 250, 30),
    "tiny": Size(100, 6, 20, 8, 13, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write a dataset with the columns that a tokenizer adds, and labels."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(size.median), 0.7, size.n_texts)).astype(int)
    lengths = lengths.clip(1, size.longest)
    tokens = rng.integers(1, N_TOKENS, size=lengths.sum(), dtype=np.int32)
    columns = {
        "input_ids": np.split(tokens, lengths.cumsum()[:-1]),
        "attention_mask": [np.ones(n, np.int8) for n in lengths],
        "label": rng.integers(2, size=size.n_texts),
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "texts")


class LengthGroupedSampler(Sampler[int]):
    """Rows of similar lengths in each batch, in the order of Transformers' class of this name.

    The rows are shuffled, and each window of at most 50 batches is sorted by length, longest rows
    first. The longest row of all changes places with the first one, so that a lack of memory shows
    in the first batch. ``benchmarks/packing.py`` asserts that the class of Transformers returns
    the same rows.

    Args:
        batch_size: Rows of a batch.
        lengths: Length of each row.
        generator: Generator of the shuffle.
    """

    def __init__(
        self, batch_size: int, lengths: Any, generator: torch.Generator | None = None
    ) -> None:
        self.batch_size = batch_size
        self.lengths = np.asarray(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        n_rows = len(self)
        n_batches = max(1, min(50, n_rows // (4 * self.batch_size)))
        window = n_batches * self.batch_size
        shuffled = torch.randperm(n_rows, generator=self.generator).numpy()
        windows = np.split(shuffled, range(window, n_rows, window))
        by_length = [rows[np.argsort(-self.lengths[rows], kind="stable")] for rows in windows]
        rows = np.concatenate(by_length)
        longest = int(self.lengths[rows[::window]].argmax()) * window
        rows[[0, longest]] = rows[[longest, 0]]
        return iter(rows.tolist())


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Pad the lists of a batch to the longest one, as ``DataCollatorWithPadding`` does."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {}
    for name in ("input_ids", "attention_mask"):
        padded = [sample[name] + [0] * (longest - len(sample[name])) for sample in samples]
        batch[name] = torch.tensor(padded)
    batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch


def original(folder: Path, size: Size, step: Step, n_workers: int = 0) -> None:
    """Read the lists of single rows, and pad them."""
    dataset = datasets.load_from_disk(folder / "texts")
    lengths = [len(ids) for ids in dataset["input_ids"]]
    sampler = LengthGroupedSampler(size.batch_size, lengths, torch.Generator().manual_seed(SEED))
    loader: Any = DataLoader(
        dataset,  # type: ignore[arg-type]
        size.batch_size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=n_workers,
    )
    for batch in loader:
        batch = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
        step(*batch.values())


def moved(folder: Path, size: Size, step: Step) -> None:
    """Read the column of the dataset as ragged rows, with the same sampler."""
    dataset = datasets.load_from_disk(folder / "texts")
    texts = pinfeed.RaggedStore.from_arrow(dataset.data.column("input_ids"), layout="padded")
    generator = torch.Generator().manual_seed(SEED)
    sampler = LengthGroupedSampler(size.batch_size, texts.lengths, generator)
    source = (texts, dataset.data.column("label"))
    with pinfeed.Feeder(source, rows=sampler, batch_size=size.batch_size, device=DEVICE) as feeder:
        for (ids, lengths), labels in feeder:
            mask = torch.arange(ids.shape[1], device=DEVICE) < lengths[:, None]
            step(ids.long(), mask.long(), labels)


def make_step(size: Size) -> Step:
    """Return a training step of the classifier with AdamW, but with SGD for its tokens."""
    torch.manual_seed(0)
    model = Classifier()
    tokens = model.tokens.weight
    others = [one for one in model.parameters() if one is not tokens]
    optimizers = (torch.optim.SGD([tokens], lr=0.1), torch.optim.AdamW(others, lr=1e-3))

    def step(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # All tokens are of one kind.
        loss = nn.functional.cross_entropy(model(ids, torch.zeros_like(ids), mask), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Transformers, group_by_length",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "DataLoader": original,
        "DataLoader, 2 workers": functools.partial(original, n_workers=2),
        OURS: moved,
    },
    make_step=make_step,
    original=(collate, original),
    moved=(moved,),
)
