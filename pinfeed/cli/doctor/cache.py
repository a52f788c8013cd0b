"""Advice on whether a cache on the device would help, from the row indices of a training run."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.cli.doctor.advice import Data
from pinfeed.cli.doctor.reuse_sketch import CACHE_SHARES, CacheSize, ReuseSketch
from pinfeed.cli.terminal.output import saying, table
from pinfeed.cli.terminal.sources import open_rows
from pinfeed.errors import RowIndexError
from pinfeed.memory.units import human
from pinfeed.rows.indices import check_rows
from pinfeed.stores import Store
from pinfeed.validation.wrapping import wrapped

# Reading more row indices takes seconds.
_MOST_IDS = 1 << 26


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
    sizes = [CacheSize(share, sketch.hit_rate(share * data.n_rows)) for share in CACHE_SHARES]
    return CacheAdvice(path, n_ids, n_read, sketch.is_informative, tuple(sizes), sketch.best_size())


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
