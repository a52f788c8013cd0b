"""ShardedStore: rows of several files as the rows of one store."""

from __future__ import annotations

import bisect
import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ClosedError, CopyError, StoreError, WriteBackError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.base import Array, checked_gather, run_of
from pinfeed.stores.formats.row_layout import RowLayout, covered_nbytes
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.safe_repr import safe_repr

MAX_OPEN = 64
"""Most shards that are open at the same time."""


class ShardReader(Protocol):
    """One open file, with the methods that a gather needs. Any thread may use it."""

    def read_run(self, first: int, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows from ``first`` on into ``out``, shape (n, row_nbytes)."""

    def read_rows(self, rows: Rows, out: npt.NDArray[np.uint8], positions: Rows) -> None:
        """Read rows in any order into ``out[positions]``.

        Args:
            rows: Row indices, shape (m,).
            out: C-contiguous, shape (n, row_nbytes).
            positions: Positions in ``out``, shape (m,).
        """

    def read_runs(self, runs: Runs, out: npt.NDArray[np.uint8]) -> None:
        """Read runs of rows to their positions in ``out``, C-contiguous, shape (n, row_nbytes)."""


R = TypeVar("R", bound=ShardReader)


class ShardedStore(Generic[R]):
    """Rows of files; each file is opened when it is needed.

    At most ``MAX_OPEN`` files are open at the same time. A read-only store can be pickled, and
    opens its files again after unpickling.

    Args:
        layouts: Layout of the rows of each file; files may differ in their number of rows.

    Raises:
        StoreError: If the shards do not match, or if there are no rows.
    """

    writable = False
    resident_bytes = 0
    # Attributes that belong to one process, and are not pickled.
    _PROCESS_STATE: ClassVar[tuple[str, ...]] = ("_open", "_lock")

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
        self._dtype = check_dtype(first.dtype, first.path)
        self._swapped = not first.dtype.isnative
        self._closed = False
        self._init_process_state()

    def _init_process_state(self) -> None:
        self._open: OrderedDict[int, R] = OrderedDict()
        # Reader threads and the writer thread use the store at the same time.
        self._lock = threading.Lock()
        _stores.add(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.writable:
            raise CopyError(
                f"{self!r} is open for writing, and cannot be pickled or copied, because both "
                "stores would write to the same files; pass the path, and open it in the process "
                "that writes"
            )
        return {
            name: value for name, value in vars(self).items() if name not in self._PROCESS_STATE
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._init_process_state()

    @safe_repr
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.paths[0] if len(self.paths) == 1 else self.paths!r})"

    @property
    def paths(self) -> list[str]:
        """The files, in the order of their rows."""
        return [layout.path for layout in self._layouts]

    @property
    def label(self) -> str:
        """Short name of the files: the first file's name, and the number of other files."""
        first = os.path.basename(self.paths[0])
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    @property
    def n_rows(self) -> int:
        return int(self._ends[-1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._layouts[0].row_shape

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self._layouts[0].row_nbytes

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the files from the first row to the last; each byte counts once."""
        return covered_nbytes(self._layouts)

    def nbytes_beside(self, others: Iterable[AnyShardedStore]) -> int:
        """Return ``nbytes`` without the bytes that are also rows of the given stores."""
        found = [layout for store in others for layout in store._layouts]
        return covered_nbytes([*found, *self._layouts]) - covered_nbytes(found)

    @property
    def overlaps(self) -> bool:
        """Whether consecutive rows share bytes of a file, as overlapping windows do."""
        return any(layout.gap < 0 for layout in self._layouts)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, C-contiguous, shape (n, *row_shape), of the store's dtype.

        Raises:
            ReadError: If a file has shrunk or cannot be read.
            RowIndexError: If a row is out of range or negative.
            ArgumentError: If ``out`` has another shape, dtype or layout, or is read-only.
        """
        rows = checked_gather(self, rows, out)
        self.gather_at(rows, out, np.arange(len(rows)))

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

    def _gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        A subclass offers this as ``gather_runs`` if its readers have ``read_runs``.
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

    @property
    def version(self) -> object:
        """A value that changes when the rows change, if this is known without reading."""
        return 0

    def will_gather(self, start: int, stop: int) -> None:
        """Announce that the rows [start, stop) will be gathered soon."""

    def scatter(self, rows: Rows, values: Array) -> None:
        """Refuse to write: the files are read-only.

        Raises:
            WriteBackError: Always.
        """
        raise WriteBackError(f"{self!r} is read-only")

    def flush(self) -> None:
        """Do nothing, because nothing was written."""

    def close(self) -> None:
        """Close the files. Further calls do nothing."""
        self._closed = True
        self._open.clear()

    def _open_reader(self, number: int) -> R:
        raise NotImplementedError

    def _before_evicting(self, number: int, reader: R) -> None:
        """Prepare to close a shard to make room for another. The caller holds the lock."""

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

    def _reader(self, number: int) -> R:
        """Return the open reader of a shard.

        A reader that is evicted closes its file when the last thread that uses it is done.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed; open the file again")
            reader = self._open.pop(number, None) or self._open_reader(number)
            self._open[number] = reader
            if len(self._open) > MAX_OPEN:
                self._before_evicting(*self._open.popitem(last=False))
            return reader


AnyShardedStore = ShardedStore[Any]

_stores: weakref.WeakSet[AnyShardedStore] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replace all locks in a forked process, where the thread that holds one may not exist."""
    for store in _stores:
        store._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


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
