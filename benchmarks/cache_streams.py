"""Streams of row indices for the benchmark of the cache: random ones, and those of word2vec."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from examples import word2vec

Rows = npt.NDArray[np.int32]
Probabilities = npt.NDArray[np.float64]


class Stream(NamedTuple):
    """Batches of row indices of one table.

    Attributes:
        name: Name of the stream.
        n_ids: Row indices of a batch, repeated ones too; a mean where batches differ.
        probabilities: Relative probability of each row, shape (n_rows,).
        batches: Distinct rows of each batch, ascending.
    """

    name: str
    n_ids: float
    probabilities: Probabilities
    batches: list[Rows]

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return len(self.probabilities)


class Size(NamedTuple):
    """Size of a random stream."""

    n_rows: int
    n_ids: int
    n_batches: int


def zipf(exponent: float, size: Size) -> Stream:
    """Draw rows whose probability falls with a power of their rank.

    The ranks are scattered over the table at random.
    """
    rng = np.random.default_rng(1)
    of_ranks = np.arange(1, size.n_rows + 1) ** -exponent
    cumulated = np.cumsum(of_ranks)
    rows_of_ranks = rng.permutation(size.n_rows).astype(np.int32)
    probabilities = np.empty(size.n_rows)
    probabilities[rows_of_ranks] = of_ranks
    batches = []
    for _ in range(size.n_batches):
        # Sorted numbers are found many times faster.
        drawn = np.sort(rng.random(size.n_ids)) * cumulated[-1]
        ranks = np.minimum(np.searchsorted(cumulated, drawn), size.n_rows - 1)
        batches.append(np.unique(rows_of_ranks[ranks]))
    return Stream(f"Zipf({exponent})", size.n_ids, probabilities, batches)


def uniform(size: Size) -> Stream:
    """Draw rows that all have the same probability."""
    rng = np.random.default_rng(1)
    batches = [
        np.unique(rng.integers(size.n_rows, size=size.n_ids, dtype=np.int32))
        for _ in range(size.n_batches)
    ]
    return Stream("uniform", size.n_ids, np.ones(size.n_rows), batches)


def word2vec_streams(n_batches: int, n_pairs: int = 8192) -> list[Stream]:
    """Return the rows of both tables of the example, in the order of its batches.

    The probabilities of the rows are their frequencies in all batches.
    """
    words, text = word2vec.read_words(word2vec.MAX_BYTES)
    pairs = word2vec.Pairs(text, n_pairs, n_batches)
    found: dict[str, list[npt.NDArray[Any]]] = {"center": [], "others": []}
    for number in range(n_batches):
        batch = pairs[number]
        for key, ids in found.items():
            ids.append(batch[key].numpy().ravel())
    streams = []
    for key, ids in found.items():
        batches = [np.unique(one).astype(np.int32) for one in ids]
        frequencies = np.bincount(np.concatenate(batches), minlength=len(words))
        n_ids = sum(map(len, ids)) / n_batches
        streams.append(Stream(f"word2vec, {key}", n_ids, frequencies.astype(float), batches))
    return streams
