"""Word vectors of Python's standard library: skip-gram with negative sampling.

Both tables are in host memory. The rows of a batch, with their optimizer state, are prefetched to
the device. They are written back during the next steps. The first steps are run three times: with
prefetching, without it, and as the usual loop over ``nn.Embedding(sparse=True)`` with whole tables
on the device. Losses are compared bit for bit. Run ``python examples/word2vec.py --help``.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import pinfeed

VOCABULARY = 10_000
MAX_BYTES = 16_000_000
COMPARED = 50
WINDOW = 5
NEGATIVES = 5
SUBSAMPLING = 1e-4
WORDS = [
    "self",
    "int",
    "error",
    "read",
    "open",
    "false",
    "list",
    "thread",
    "socket",
    "encode",
    "min",
    "year",
]
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings"}

Batch = dict[str, torch.Tensor]


class Pairs(Dataset[Batch]):
    """Batches of nearby words. The same index always gives the same batch.

    Args:
        text: Numbers of the words, shape (n,), with -1 between files.
        batch: Pairs in a batch.
        steps: Number of batches.
    """

    def __init__(self, text: np.ndarray, batch: int, steps: int) -> None:
        self.text = text
        self.batch = batch
        self.steps = steps
        frequency = np.bincount(text[text >= 0])
        self.noise = np.repeat(np.arange(len(frequency)), np.ceil(frequency**0.75).astype(int))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        rng = np.random.default_rng(step)
        at = rng.integers(WINDOW, len(self.text) - WINDOW, self.batch)
        # Nearer words are drawn more often.
        distance = rng.integers(
            1, rng.integers(1, WINDOW, self.batch, endpoint=True), endpoint=True
        )
        center = self.text[at]
        context = self.text[at + distance * rng.choice((-1, 1), self.batch)]
        in_one_file = (center >= 0) & (context >= 0)
        negatives = self.noise[rng.integers(len(self.noise), size=(in_one_file.sum(), NEGATIVES))]
        others = np.concatenate([context[in_one_file, None], negatives], axis=1)
        return {"center": torch.from_numpy(center[in_one_file]), "others": torch.from_numpy(others)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="batches (3000; 150 with --quick)")
    parser.add_argument("--dim", type=int, default=64, help="numbers in a vector (64)")
    parser.add_argument("--batch", type=int, default=8192, help="pairs in a batch (8192)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for word2vec.png (demo)"
    )
    parser.add_argument("--device", default="auto", help='"cpu", "cuda", "cuda:1" (auto)')
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds: fewer files, fewer steps"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = arguments.steps or (150 if arguments.quick else 3000)

    words, text = read_words(MAX_BYTES // 8 if arguments.quick else MAX_BYTES)
    print(
        f"{len(text):,} words of the standard library's sources, thinned out; "
        f"vocabulary of {len(words):,}: {' '.join(words[:12])} ..."
    )
    loader = DataLoader(Pairs(text, arguments.batch, steps), batch_size=None)
    if not torch.cuda.is_available() or arguments.device == "cpu":
        # The reader threads need a core.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))

    start = time.perf_counter()
    ahead = Training(len(words), arguments.dim, steps)
    loop = pinfeed.train_rows(
        loader, ahead.lookups, optimizer=ahead.optimizer, device=arguments.device, progress=True
    )
    losses = ahead.run(loop)
    print(
        f"{time.perf_counter() - start:.1f} s, "
        f"loss {np.mean(losses[:5]):.3f} -> {np.mean(losses[-5:]):.3f}\n{loop.stats}"
    )

    compare(losses, loader, len(words), steps, arguments.dim, loop.device)

    vectors = ahead.center.read(np.arange(len(words))).numpy()
    for word in WORDS:
        if word in words:
            print(f"{word:>8}: {' '.join(nearest(vectors, words, word))}")
    draw(vectors[:200], words[:200], arguments.out / "word2vec.png")
    print(arguments.out / "word2vec.png")


def compare(
    losses: list[float],
    loader: DataLoader[Batch],
    n_words: int,
    steps: int,
    dim: int,
    device: str,
) -> None:
    """Compare the first losses with those of loops without prefetching and without pinfeed."""
    first = Training(n_words, dim, steps)
    with pinfeed.train_rows(
        loader, first.lookups, optimizer=first.optimizer, device=device, depth=0
    ) as synchronous:
        first_losses = first.run(islice(synchronous, COMPARED))
    plain, ordered = (
        run_full(n_words, dim, steps, islice(loader, COMPARED), device, order)
        for order in (False, True)
    )
    print(f"losses of the first {min(steps, COMPARED)} steps, compared with")
    print(f"  the synchronous loop: {same(losses, first_losses)}")
    print(f"  nn.Embedding(sparse=True), whole tables on the device: {same(losses, plain)}")
    print(
        "  the same, where repeated words add their gradients in the order of the batch: "
        f"{same(losses, ordered)}"
    )


def same(losses: list[float], others: list[float]) -> str:
    """Describe the difference of losses."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=False))
    return f"at most {off:.0e} of the loss apart" if off else "equal, bit for bit"


class Training:
    """Two tables with their optimizer and schedule."""

    def __init__(self, n_words: int, dim: int, steps: int) -> None:
        self.center, self.other = tables(n_words, dim)
        self.lookups = {
            self.center: lambda batch: batch["center"],
            self.other: lambda batch: batch["others"],
        }
        self.optimizer = pinfeed.RowOptimizer(
            torch.optim.SparseAdam, [self.center, self.other], lr=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.1, total_iters=steps
        )

    def run(self, batches: Iterable[Batch]) -> list[float]:
        return run(batches, self.center, self.other, self.optimizer, self.schedule)


def run(
    batches: Iterable[Batch], center: Any, other: Any, optimizer: Any, schedule: Any
) -> list[float]:
    """Train tables in host memory, or ``nn.Embedding``, with the same code; return the losses."""
    losses = []
    for batch in batches:
        scores = torch.einsum("nd,nkd->nk", center(batch["center"]), other(batch["others"]))
        # The first of the others is the context word. The rest are random negatives.
        scores[:, 1:] *= -1
        loss = -functional.logsigmoid(scores).sum(dim=1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def run_full(
    n_words: int, dim: int, steps: int, batches: Iterator[Batch], device: str, ordered: bool
) -> list[float]:
    """Train with whole tables on the device, as the usual program does."""
    full = [table.to_embedding().to(device) for table in tables(n_words, dim)]
    for embedding in full:
        embedding.sparse = True
    optimizer = torch.optim.SparseAdam([embedding.weight for embedding in full], lr=0.01)
    if ordered:
        optimizer.register_step_pre_hook(add_in_order)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    on_device = ({key: ids.to(device) for key, ids in batch.items()} for batch in batches)
    return run(on_device, *full, optimizer, schedule)


def add_in_order(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add the gradients of each row in the order of the batch, as dense gradients are added.

    torch's ``coalesce()`` sorts them, and the sort is not always stable.
    """
    for weight in optimizer.param_groups[0]["params"]:
        ids, values = weight.grad._indices()[0], weight.grad._values()
        rows, where = ids.unique(return_inverse=True)
        added = values.new_zeros(len(rows), values.shape[1]).index_add_(0, where, values)
        weight.grad = torch.sparse_coo_tensor(
            rows[None], added, weight.shape, is_coalesced=True, check_invariants=False
        )


def tables(n_words: int, dim: int) -> tuple[pinfeed.HostEmbedding, pinfeed.HostEmbedding]:
    """Create both tables, with the same values at every call."""
    torch.manual_seed(0)
    center = pinfeed.HostEmbedding(
        n_words, dim, init=lambda weight: weight.uniform_(-0.5 / dim, 0.5 / dim), name="center"
    )
    return center, pinfeed.HostEmbedding(n_words, dim, init="zeros", name="other")


def read_words(max_bytes: int) -> tuple[list[str], np.ndarray]:
    """Return the vocabulary, most frequent words first, and the text as word numbers.

    Files are separated by -1. Frequent words are left out at random.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    nbytes = 0
    for path in sorted(library.rglob("*.py")):
        if nbytes < max_bytes and not SKIPPED_FOLDERS & set(path.parts):
            source = path.read_text(errors="ignore").lower()
            # Identifiers are split, so that read_text and "Read text" are the same two words.
            files.append(re.findall(r"[a-z]{2,}", source))
            nbytes += len(source)
    counts = Counter(word for file in files for word in file)
    words = [word for word, n in counts.most_common(VOCABULARY) if n >= 5]
    numbers = {word: i for i, word in enumerate(words)}
    separator = [-1] * WINDOW
    text_numbers: list[int] = []
    for file in files:
        text_numbers += [numbers[word] for word in file if word in numbers]
        text_numbers += separator
    text = np.array(text_numbers)
    share = np.array([counts[word] for word in words]) / (text >= 0).sum()
    # The last entry is for -1, which is always kept.
    keep = np.append(np.sqrt(SUBSAMPLING / share), 1)
    return words, text[np.random.default_rng(0).random(len(text)) < keep[text]]


def nearest(vectors: np.ndarray, words: list[str], word: str, n: int = 6) -> list[str]:
    """Return the words whose vectors have the most similar direction."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    best = np.argsort(-(unit @ unit[words.index(word)]))
    return [words[i] for i in best if words[i] != word][:n]


def draw(vectors: np.ndarray, words: list[str], path: Path) -> None:
    """Draw the plane of the first two principal components of the vectors."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    unit -= unit.mean(axis=0)
    x, y = (unit @ np.linalg.svd(unit, full_matrices=False)[2][:2].T).T
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.scatter(x, y, s=6, c=np.arange(len(words)), cmap="viridis")
    for word, at in zip(words, zip(x, y, strict=True), strict=True):
        axes.annotate(word, at, fontsize=8, xytext=(2, 2), textcoords="offset points")
    axes.set_title(
        "The most frequent words of Python's standard library: "
        "first two principal components of their vectors",
        loc="left",
    )
    axes.set_axis_off()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
