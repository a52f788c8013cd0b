"""Skip-gram with negative sampling: vectors of words from nearby words and random words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step, generator_of_batch

WINDOW = 5
N_NEGATIVES = 5
LEARNING_RATE = 0.01

Pairs = dict[str, torch.Tensor]
"""Words, and a context word for each."""


@dataclass(frozen=True)
class Size:
    """Sizes of the text, of its vocabulary and of a batch."""

    n_items: int
    n_words: int
    n_features: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(10_000_000, 100_000, 100, 1024, 300, 100),
    "quick": Size(1_000_000, 20_000, 64, 512, 60, 30),
    "tiny": Size(5000, 200, 8, 32, 6, 4),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the text as word numbers. A smaller number is a more frequent word."""
    rng = np.random.default_rng(0)
    text = (size.n_words ** rng.random(size.n_items)).astype(np.int64) - 1
    np.save(folder / "text.npy", text)


class Neighbours(Dataset[Pairs]):
    """Batches of words with a context word for each. The same index always gives the same batch.

    Args:
        text: Numbers of the words.
        size: Sizes of the batches.
    """

    def __init__(self, text: np.ndarray, size: Size) -> None:
        self.text = text
        self.size = size

    def __len__(self) -> int:
        return self.size.n_batches

    def __getitem__(self, index: int) -> Pairs:
        rng = np.random.default_rng(index)
        at = rng.integers(WINDOW, len(self.text) - WINDOW, self.size.batch_size)
        distance = rng.integers(1, WINDOW, self.size.batch_size, endpoint=True)
        near = at + distance * rng.choice((-1, 1), self.size.batch_size)
        word, context = torch.from_numpy(self.text[at]), torch.from_numpy(self.text[near])
        return {"word": word, "context": context}


class Negatives:
    """Function that adds random words to a batch.

    Args:
        text: Numbers of the words.
    """

    def __init__(self, text: np.ndarray) -> None:
        frequency = torch.from_numpy(np.bincount(text))
        self.bounds = (frequency.double() ** 0.75).cumsum(0)

    def __call__(self, batch: Pairs, generator: torch.Generator) -> Pairs:
        """Return the words, and a context word and several random words for each."""
        shape = (len(batch["word"]), N_NEGATIVES)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        negatives = torch.searchsorted(self.bounds, drawn * self.bounds[-1])
        others = torch.cat([batch["context"][:, None], negatives], 1)
        return {"word": batch["word"], "others": others}


def weights(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first values of both tables."""
    limit = 0.5 / size.n_features
    generator = torch.Generator().manual_seed(SEED)
    words = torch.empty(size.n_words, size.n_features)
    return words.uniform_(-limit, limit, generator=generator), torch.zeros_like(words)


def original(folder: Path, size: Size, step: Step) -> None:
    """Draw the random words of each batch in the loop."""
    text = np.load(folder / "text.npy")
    loader = DataLoader(Neighbours(text, size), batch_size=None)
    add_negatives = Negatives(text)
    words, others = (
        nn.Embedding.from_pretrained(table, freeze=False, sparse=True).to(DEVICE)
        for table in weights(size)
    )
    tables = [words.weight, others.weight]
    optimizer = torch.optim.SparseAdam(tables, lr=LEARNING_RATE)
    for number, pairs in enumerate(loader):
        batch = add_negatives(pairs, generator_of_batch(SEED, 0, number))
        batch = {key: ids.to(DEVICE) for key, ids in batch.items()}
        step(batch["word"], batch["others"], words=words, others=others, optimizer=optimizer)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Draw the random words of each batch in the background, before its rows are read."""
    text = np.load(folder / "text.npy")
    loader = DataLoader(Neighbours(text, size), batch_size=None)
    add_negatives = Negatives(text)
    words, others = (
        pinfeed.HostEmbedding.from_pretrained(table, freeze=False) for table in weights(size)
    )
    optimizer = pinfeed.RowOptimizer(
        torch.optim.SparseAdam, [words, others], lr=LEARNING_RATE, gradients="sparse"
    )
    batches = pinfeed.train_rows(
        loader,
        {words: "word", others: "others"},
        optimizer=optimizer,
        device=DEVICE,
        host_transform=add_negatives,
        seed=SEED,
    )
    for batch in batches:
        step(batch["word"], batch["others"], words=words, others=others, optimizer=optimizer)


def make_step(size: Size) -> Step:
    """Return a training step, which is called with the tables and their optimizer."""

    def step(
        word: torch.Tensor,
        other: torch.Tensor,
        words: nn.Module,
        others: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> torch.Tensor:
        scores = torch.einsum("nd,nkd->nk", words(word), others(other))
        # The first of the others is the context word.
        scores[:, 1:] *= -1
        loss = -nn.functional.logsigmoid(scores).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Skip-gram",
    sizes=SIZES,
    prepare=prepare,
    ways={"nn.Embedding": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
