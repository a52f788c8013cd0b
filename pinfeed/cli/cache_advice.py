"""Advice on whether a cache on the device would help, from the row indices of a training run."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.cli.advice import Data
from pinfeed.cli.report import saying, table
from pinfeed.cli.sources import open_rows
from pinfeed.errors import RowIndexError
from pinfeed.memory.units import human
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.validation.wrapping import wrapped

CACHE_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""Cache sizes to compare, as shares of the rows."""

# Number of lookups to keep, and the fewest rows to sample. When the sample is full, its rows have
# been looked up two to four times on average.
_MOST_LOOKUPS = 1 << 15
_FEWEST_ROWS = 1 << 13
# With fewer lookups or batches, a hit rate shows mostly chance or first lookups.
_FEWEST_LOOKUPS = 512
_FEWEST_BATCHES = 20
# A cache is worth its memory if its hit rate exceeds its share of the rows by this number. For
# uniformly distributed row indices, the two are equal.
_LEAST_GAIN = 0.2

# Consecutive multiples of this number, modulo 2**64, are spread evenly (Fibonacci hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

_Counts = npt.NDArray[np.int64]
# Reading more row indices takes seconds.
_MOST_IDS = 1 << 26


class CacheSize(NamedTuple):
    """A cache size and its hit rate."""

    share: float
    """Rows of the cache, as a share of the rows of the table."""
    hit_rate: float
    """Share of the looked-up rows that are in the cache."""


@dataclass(frozen=True)
class CacheAdvice:
    """The hit rates of caches of several sizes.

    Attributes:
        path: File of the row indices.
        n_ids: Number of row indices in the file.
        n_read: Number of row indices that were read, from the beginning of the file.
        is_informative: Whether they are enough for an answer.
        sizes: Sizes of caches, with their hit rates.
        best: The size with the largest gain; None if no cache would help.
    """

    path: str
    n_ids: int
    n_read: int
    is_informative: bool
    sizes: tuple[CacheSize, ...]
    best: CacheSize | None

    @property
    def helps(self) -> str:
        """The answer: ``unknown``, ``no`` or ``yes``."""
        if not self.is_informative:
            return "unknown"
        return "yes" if self.best else "no"

    def values(self, data: Data) -> dict[str, Any]:
        """Return the advice for scripts."""
        sizes = [
            {**size._asdict(), "nbytes": int(size.share * data.n_rows) * data.row_nbytes}
            for size in self.sizes
        ]
        best = self.best and self.best.share
        return {
            "ids": self.path,
            "n_ids": self.n_ids,
            "n_read": self.n_read,
            "helps": self.helps,
            "sizes": sizes,
            "best": best,
        }

    def text(self, data: Data) -> str:
        """Return the advice for people."""
        first = "" if self.n_read == self.n_ids else f"the first {self.n_read:,} of "
        head = f"{self.path}: {first}{self.n_ids:,} row indices, in batches of {data.batch_size:,}."
        rows = [
            (f"{size.share:.0%}", human(size.share * data.nbytes), f"{size.hit_rate:.0%}")
            for size in self.sizes
        ]
        sizes = table(rows, ("cache", "size", "rows served"), "rrr")
        return "\n".join([wrapped(head, "  ", "  "), sizes, wrapped(self._answer(), "  ", "  ")])

    def _answer(self) -> str:
        if not self.is_informative:
            return "The file has too few batches, or too few lookups, for an answer."
        if self.best is None:
            return (
                "The share of hits is little more than the share of cached rows, as for uniform "
                "row indices, so a cache would not be worth its memory."
            )
        return (
            f"A cache of {self.best.share:.0%} of the rows gains most for its size: "
            f"HostEmbedding(device_cache={self.best.share:g}). The sizes above count the rows "
            "alone. The cache also holds optimizer state; with Adam, it needs three times as much "
            "memory."
        )


def advise_on_cache(path: str, data: Data) -> CacheAdvice:
    """Report the share of lookups that caches of several sizes would serve.

    Args:
        path: File of integers, whose first axis is in the order of training.
        data: The rows that they look up, and the items of a batch.

    Raises:
        RowIndexError: If the file contains anything but indices of the rows.
        PinfeedError: If the file cannot be read.
    """
    sketch = ReuseSketch(data.n_rows)
    with contextlib.closing(open_rows([path])) as store, saying(f"reading {path}"):
        if store.dtype.kind not in "iu":
            raise RowIndexError(
                f"--ids {path}: dtype is {store.dtype}; expected integers, the row indices in "
                "training order"
            )
        n_ids = store.n_rows * math.prod(store.row_shape)
        n_read = _add_batches(sketch, store, data, path)
    sizes = tuple(sketch.sizes())
    return CacheAdvice(path, n_ids, n_read, sketch.is_informative, sizes, sketch.best_size())


def _add_batches(sketch: ReuseSketch, store: Store, data: Data, path: str) -> int:
    """Add the row indices of a file to the sketch, batch by batch; return how many were read."""
    n_read = 0
    for start in range(0, store.n_rows, data.batch_size):
        items = np.arange(start, min(start + data.batch_size, store.n_rows))
        ids = np.empty((len(items), *store.row_shape), store.dtype)
        store.gather(items, ids)
        sketch.add(np.unique(check_rows(ids.reshape(-1), data.n_rows, f"--ids {path}")))
        n_read += ids.size
        if sketch.is_full or n_read >= _MOST_IDS:
            break
    return n_read


class ReuseSketch:
    """Estimate of the hit rates of row caches, from a sample of the rows that batches look up.

    A row is sampled if the hash of its index is below a threshold. The sample therefore has either
    all lookups of a row or none. A cache of C rows corresponds to a cache of C x rate sampled rows.
    This method is SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015.

    When the memory of 256 KiB is full, half of the sampled rows are dropped. When few sampled rows
    remain, further lookups are not recorded.

    Args:
        n_rows: Number of rows of the table.
    """

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._rate = 1.0
        # Sampled lookups in their order.
        self._lookups = np.empty(_MOST_LOOKUPS, np.int64)
        self._n_lookups = 0
        self._n_batches = 0
        self._analysis: tuple[_Counts, _Counts] | None = None

    @property
    def is_full(self) -> bool:
        """Whether further lookups change nothing."""
        return self._n_lookups == _MOST_LOOKUPS and not self._can_drop_rows

    @property
    def is_informative(self) -> bool:
        """Whether enough batches were recorded."""
        return self._n_batches >= _FEWEST_BATCHES and self._n_lookups >= _FEWEST_LOOKUPS

    def add(self, rows: Rows) -> None:
        """Record the rows that a batch looks up.

        Args:
            rows: Row indices, each once.
        """
        if self.is_full:
            return
        sampled = rows[self._is_sampled(rows)]
        while self._n_lookups + len(sampled) > _MOST_LOOKUPS and self._can_drop_rows:
            self._drop_half_of_rows()
            sampled = sampled[self._is_sampled(sampled)]
        start = self._n_lookups
        stop = min(start + len(sampled), _MOST_LOOKUPS)
        self._lookups[start:stop] = sampled[: stop - start]
        self._n_lookups = stop
        self._n_batches += 1
        self._analysis = None

    def hit_rate(self, capacity: float) -> float:
        """Return the share of looked-up rows that would have been in a cache of ``capacity`` rows.

        The cache is empty at first. It keeps either the most recently used rows or the
        most frequently used rows, whichever serves more. The most frequently used rows are found in
        the first half of the lookups, and evaluated with the second half.
        """
        n = self._n_lookups
        if n < 2:
            return 0.0
        if self._analysis is None:
            self._analysis = self._analysed()
        distances, ranks = self._analysis
        recent = np.searchsorted(distances, capacity * self._rate) / n
        frequent = np.searchsorted(ranks, capacity * self._rate) / (n - n // 2)
        return float(max(recent, frequent))

    def sizes(self) -> list[CacheSize]:
        """Return caches of several sizes with their hit rates."""
        return [CacheSize(share, self.hit_rate(share * self._n_rows)) for share in CACHE_SHARES]

    def best_size(self) -> CacheSize | None:
        """Return the size with the largest difference between hit rate and share of the rows.

        It is None if no size is worth its memory, or too few batches were recorded.
        """
        best = max(self.sizes(), key=lambda size: size.hit_rate - size.share)
        is_worth = self.is_informative and best.hit_rate - best.share >= _LEAST_GAIN
        return best if is_worth else None

    @property
    def _can_drop_rows(self) -> bool:
        """Whether enough rows are sampled to drop half of them."""
        return self._n_rows * self._rate >= 2 * _FEWEST_ROWS

    def _is_sampled(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows whose lookups are kept."""
        return _hash(rows) <= np.uint64(int(2**64 * self._rate) - 1)

    def _drop_half_of_rows(self) -> None:
        """Sample half as many rows, and drop the lookups of the other rows."""
        self._rate /= 2
        lookups = self._lookups[: self._n_lookups]
        kept = lookups[self._is_sampled(lookups)]
        self._lookups[: len(kept)] = kept
        self._n_lookups = len(kept)

    def _analysed(self) -> tuple[_Counts, _Counts]:
        """Return the smallest caches of both kinds that serve repeated lookups, both ascending.

        For each repeated lookup, the first array has the number of distinct rows since the last
        lookup of its row. For each lookup of the second half, the second array has the rank of its
        row by use in the first half. Ranks are from earlier lookups than the evaluated ones.
        Otherwise, rows that uniform row indices repeat by chance would seem to be used frequently.
        """
        # Each row has its own hash. Rows with equal use are ranked by hash, because row indices are
        # often ordered by use.
        lookups: list[int] = _hash(self._lookups[: self._n_lookups]).tolist()
        last_of: dict[int, int] = {}
        # The values of ``last_of``, ascending.
        lasts: list[int] = []
        distances = []
        for position, row in enumerate(lookups):
            if (last := last_of.get(row)) is not None:
                at = bisect.bisect_left(lasts, last)
                del lasts[at]
                distances.append(len(lasts) - at)
            lasts.append(position)
            last_of[row] = position
        half = len(lookups) // 2
        uses = Counter(lookups[:half])
        by_use = sorted(uses, key=lambda row: (-uses[row], row))
        rank_of = {row: rank for rank, row in enumerate(by_use)}
        ranks = [rank_of[row] for row in lookups[half:] if row in rank_of]
        return np.sort(distances), np.sort(ranks)


def _hash(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    hashes: npt.NDArray[np.uint64] = rows.astype(np.int64, copy=False).view(np.uint64) * _MULTIPLIER
    return hashes
