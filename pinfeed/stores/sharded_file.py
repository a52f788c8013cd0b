"""RowLayout: where the rows of a file are; ShardedStore: rows of several files as one store."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.rows.runs import Runs
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.libraries import and_more
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import check_dtype


@dataclass(frozen=True)
class RowLayout:
    """Layout of consecutive rows in a file."""

    path: str
    dtype: np.dtype[Any]
    """Dtype as in the file, which may have the other byte order."""
    n_rows: int
    row_shape: tuple[int, ...]
    offset: int
    """Bytes before the first row."""

    @functools.cached_property
    def row_nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)

    @functools.cached_property
    def end(self) -> int:
        """Smallest size of the file, in bytes."""
        return self.begin(self.n_rows)

    def begin(self, row: int) -> int:
        """Return the bytes before a row."""
        return self.offset + row * self.row_nbytes

    def check(self, size: int) -> RowLayout:
        """Return the layout itself, if a file of ``size`` bytes holds it.

        Raises:
            StoreError: If the file is truncated, or if rows of 0 bytes are too many to count.
        """
        shape = (self.n_rows, *self.row_shape)
        # numpy refuses axes whose product is too large even if another axis is zero.
        nbytes_without_zeros = math.prod(filter(None, shape)) * self.dtype.itemsize
        if nbytes_without_zeros > sys.maxsize >= self.end:
            raise StoreError(
                f"{self.path}: shape {shape} has rows of 0 bytes, and more rows than numpy can "
                "count"
            )
        if self.end > size:
            raise StoreError(
                f"{self.path} is truncated: {self.n_rows} rows of {self.row_nbytes} bytes from "
                f"byte {self.offset} on need {self.end} bytes in all; the file has {size}; copy or "
                "save it again"
            )
        return self


def covered_nbytes(layouts: Iterable[RowLayout]) -> int:
    """Return the bytes of files from the first row of each layout to its last.

    A byte that several layouts cover counts once.
    """
    total = 0
    path = None
    reached = 0
    for layout in sorted(layouts, key=lambda layout: (layout.path, layout.offset)):
        if layout.path != path:
            path = layout.path
            reached = 0
        total += max(0, layout.end - max(layout.offset, reached))
        reached = max(reached, layout.end)
    return total


class ShardedStore(FileStore):
    """Rows of several files as the rows of one store.

    Args:
        layouts: Layout of the rows of each file; files may differ in their number of rows.

    Raises:
        StoreError: If the shards do not match, or if there are no rows.
    """

    def __init__(self, layouts: Sequence[RowLayout]) -> None:
        first = layouts[0]
        _check_shards(layouts)
        self._ends = np.cumsum([layout.n_rows for layout in layouts])
        if self._ends[-1] == 0:
            shape = (first.n_rows, *first.row_shape)
            raise StoreError(f"{first.path} has no rows (shape {shape}); expected at least one")
        self._layouts = layouts
        self._swapped = not first.dtype.isnative
        self.nbytes = covered_nbytes(layouts)
        paths = [layout.path for layout in layouts]
        label = and_more(os.path.basename(first.path), len(paths))
        dtype = check_dtype(first.dtype, first.path)
        super().__init__(label, paths, (int(self._ends[-1]), *first.row_shape), dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.paths[0] if len(self.paths) == 1 else self.paths!r})"

    def nbytes_beside(self, others: Iterable[ShardedStore]) -> int:
        """Return ``nbytes`` without the bytes that are also rows of the given stores."""
        found = [layout for store in others for layout in store._layouts]
        return covered_nbytes([*found, *self._layouts]) - covered_nbytes(found)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        target = as_bytes(out)
        for number, part in self._by_shard(runs):
            self._reader(number).read_runs(part, target)
        if self._swapped:
            positions = runs.target or runs.positions()
            out[positions] = out[positions].byteswap()

    def will_gather(self, start: int, stop: int) -> None:
        """Announce that the rows [start, stop) will be gathered soon."""

    def _reader(self, number: int) -> Any:
        """Return the open reader of a shard, a ``FileReader`` or a ``FileMap``."""
        raise NotImplementedError

    def _by_shard(self, runs: Runs) -> Iterable[tuple[int, Runs]]:
        """Cut runs by shard: the number of each shard, and the runs of rows within it."""
        return [(0, runs)] if len(self._layouts) == 1 else runs.by_part(self._ends)


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Return an array of n rows as bytes, shape (n, row_nbytes), on the same memory."""
    n = len(array)
    return array.view(np.uint8).reshape(n, array.nbytes // n if n else 0)


def _check_shards(layouts: Sequence[RowLayout]) -> None:
    """Check that files can be shards of one store.

    Raises:
        StoreError: If their rows differ in shape or dtype, or if there are too many rows.
    """
    first = layouts[0]
    for layout in layouts:
        if (layout.dtype, layout.row_shape) != (first.dtype, first.row_shape):
            raise StoreError(
                f"shards do not match: {first.path} has rows of shape {first.row_shape}, "
                f"{first.dtype}, but {layout.path} has rows of shape {layout.row_shape}, "
                f"{layout.dtype}"
            )
    if sum(layout.n_rows for layout in layouts) > sys.maxsize:
        raise StoreError(f"{first.path} and the other shards have more rows than can be counted")
