"""ShardedStore: rows of several files as the rows of one store."""

from __future__ import annotations

import bisect
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.base import Array, run_of
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.formats.row_layout import RowLayout, covered_nbytes
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.safe_repr import safe_repr


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
        n_rows = [layout.n_rows for layout in layouts]
        self._ends = np.cumsum(n_rows)
        self._starts: Rows = self._ends - np.asarray(n_rows)
        if self._ends[-1] == 0:
            shape = (first.n_rows, *first.row_shape)
            raise StoreError(f"{first.path} has no rows (shape {shape}); expected at least one")
        self._layouts = layouts
        self._swapped = not first.dtype.isnative
        self.nbytes = covered_nbytes(layouts)
        paths = [layout.path for layout in layouts]
        label = os.path.basename(first.path)
        if len(paths) > 1:
            label += f" and {len(paths) - 1} more"
        dtype = check_dtype(first.dtype, first.path)
        super().__init__(label, paths, (int(self._ends[-1]), *first.row_shape), dtype)

    @safe_repr
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.paths[0] if len(self.paths) == 1 else self.paths!r})"

    def nbytes_beside(self, others: Iterable[ShardedStore]) -> int:
        """Return ``nbytes`` without the bytes that are also rows of the given stores."""
        found = [layout for store in others for layout in store._layouts]
        return covered_nbytes([*found, *self._layouts]) - covered_nbytes(found)

    @property
    def overlaps(self) -> bool:
        """Whether consecutive rows share bytes of a file, as overlapping windows do."""
        return any(layout.gap < 0 for layout in self._layouts)

    def gather_at(self, rows: Rows, out: Array, positions: Rows) -> None:
        """Copy rows into ``out[positions]``. The caller has checked all arguments.

        Args:
            rows: Row indices, shape (m,).
            out: C-contiguous, shape (n, *row_shape), of the store's dtype.
            positions: Positions in ``out``, shape (m,).

        Raises:
            ReadError: If a file has shrunk or cannot be read.
        """
        target = as_bytes(out)
        run = run_of(rows)
        place = None if run is None else run_of(positions)
        if run is not None and place is not None:
            self._read_run(run, target[place])
        else:
            for number, shard_rows, shard_positions in self._by_shard(rows):
                places = positions[shard_positions]
                self._reader(number).read_rows(shard_rows, target, places)
        if self._swapped:
            out[positions] = out[positions].byteswap()

    def _read_run(self, run: slice, target: npt.NDArray[np.uint8]) -> None:
        """Read consecutive rows, which need no search for the shard of each row."""
        begin = 0
        for number, first, n_rows in self._parts(run.start, run.stop):
            self._reader(number).read_run(first, target[begin : begin + n_rows])
            begin += n_rows

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        Raises:
            ReadError: If a file has shrunk or cannot be read.
        """
        if any(layout.gap for layout in self._layouts):
            # The bytes of consecutive rows do not follow each other.
            self.gather_at(runs.rows(), out, runs.positions())
            return
        target = as_bytes(out)
        found = [(0, runs)] if len(self._layouts) == 1 else runs.by_part(self._ends)
        for number, part in found:
            if len(part.lengths):
                self._reader(number).read_runs(part, target)
        if self._swapped:
            positions = runs.target or runs.positions()
            out[positions] = out[positions].byteswap()

    def will_gather(self, start: int, stop: int) -> None:
        """Announce that the rows [start, stop) will be gathered soon."""

    def _reader(self, number: int) -> Any:
        """Return the open reader of a shard, a ``FileReader`` or a ``FileMap``."""
        raise NotImplementedError

    def _by_shard(self, rows: Rows) -> list[tuple[int, Rows, Rows]]:
        """Return the rows by shard: the shard, rows within the shard, and positions in ``rows``."""
        if len(self._layouts) == 1:
            return [(0, rows, np.arange(len(rows)))]
        shard_of = np.searchsorted(self._ends, rows, side="right")
        counts = np.bincount(shard_of)
        numbers = np.flatnonzero(counts)
        # numpy sorts integers of 8 and 16 bits by their digits, in a quarter of the time.
        digits = shard_of.astype(np.min_scalar_type(len(self._layouts)))
        order = np.argsort(digits, kind="stable")
        parts: list[tuple[int, Rows, Rows]] = []
        end = 0
        for number, count in zip(numbers.tolist(), counts[numbers].tolist(), strict=True):
            positions = order[end : end + count]
            parts.append((number, rows[positions] - self._starts[number], positions))
            end += count
        return parts

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shard, the first row within it and the number of rows of each part."""
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, int(self._ends[number]))
            if start < end:
                yield number, start - int(self._starts[number]), end - start
            start = end
            number += 1


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
