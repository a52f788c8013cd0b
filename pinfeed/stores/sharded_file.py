"""ShardedStore: the rows of several files as those of one."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ClosedError, CopyError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, checked_gather, run_of
from pinfeed.stores.formats.row_layout import RowLayout
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.safe_repr import safe_repr

# Of a thousand, so many hold a descriptor at a time.
_OPEN_SHARDS = 64


class ReadableShard(Protocol):
    """One open file, as a gather needs it. Any thread may use it."""

    def read_run(self, first: int, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows from ``first`` on into ``out``, shape (n, row_nbytes)."""

    def read_rows(self, rows: Rows, out: npt.NDArray[np.uint8], positions: Rows) -> None:
        """Read rows in any order into ``out[positions]``; ``out`` is C-contiguous, shape (n, row_nbytes)."""


S = TypeVar("S", bound=ReadableShard)


class ShardedStore(Generic[S]):
    """Rows of files that are opened when they are needed, ``_OPEN_SHARDS`` of them at a time.

    Args:
        extents: Where the rows are, file by file; the files may differ in their number of rows.

    Raises:
        StoreError: Shards that do not match, or no rows.

    A store that is read-only can be pickled: where it is unpickled, the files are opened again.
    """

    writable = False
    resident_bytes = 0
    # Attributes that mean something in one process only.
    _here: ClassVar[tuple[str, ...]] = ("_open", "_lock")

    def __init__(self, extents: Sequence[RowLayout]) -> None:
        first = extents[0]
        for extent in extents:
            if (extent.dtype, extent.row_shape) != (first.dtype, first.row_shape):
                raise StoreError(
                    f"shards do not match: {first.path} has rows of shape {first.row_shape}, {first.dtype}; "
                    f"{extent.path} of shape {extent.row_shape}, {extent.dtype}"
                )
        if sum(extent.n_rows for extent in extents) > sys.maxsize:
            raise StoreError(
                f"{first.path} and the other shards have more rows than can be counted"
            )
        self._ends = np.cumsum([extent.n_rows for extent in extents])
        self._starts = self._ends - [extent.n_rows for extent in extents]
        if self._ends[-1] == 0:
            raise StoreError(
                f"{first.path} has no rows (shape {(first.n_rows, *first.row_shape)}); expected at least one"
            )
        self._extents = extents
        self._dtype = check_dtype(first.dtype, first.path)
        self._swapped = not first.dtype.isnative
        self._closed = False
        self._begin_here()

    def _begin_here(self) -> None:
        """Make what belongs to this process."""
        self._open: OrderedDict[int, S] = OrderedDict()
        # Readers and writer use the store at the same time.
        self._lock = threading.Lock()
        _stores.add(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.writable:
            raise CopyError(
                f"{self!r} is open for writing and cannot be pickled or copied: both would write to the same files; "
                "hand over the path, and open it where it is written"
            )
        return {name: value for name, value in vars(self).items() if name not in self._here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_here()

    @safe_repr
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.paths[0] if len(self.paths) == 1 else self.paths!r})"

    @property
    def paths(self) -> list[str]:
        """The files, in the order of their rows."""
        return [extent.path for extent in self._extents]

    @property
    def label(self) -> str:
        """What to call them: the first file's name, and how many more there are."""
        first = os.path.basename(self.paths[0])
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    @property
    def n_rows(self) -> int:
        return int(self._ends[-1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._extents[0].row_shape

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self._extents[0].row_nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, C-contiguous, shape (n, *row_shape), of the store's dtype.

        Raises:
            ReadError: A file has shrunk, or cannot be read.
            RowIndexError: If a row is out of range or negative.
            ArgumentError: If ``out`` has another shape, dtype or layout, or is read-only.
        """
        rows = checked_gather(self, rows, out)
        self.gather_at(rows, out, np.arange(len(rows)))

    def gather_at(self, rows: Rows, out: Array, positions: Rows) -> None:
        """Copy rows, shape (m,), into ``out[positions]``; ``out`` is C-contiguous, shape (n, *row_shape), of the store's dtype.

        The caller has checked all three.

        Raises:
            ReadError: A file has shrunk, or cannot be read.
        """
        target = bytes_of(out)
        for number, shard_rows, places in self._split(rows):
            shard, places = self._shard(number), positions[places]
            run, place = run_of(shard_rows), run_of(places)
            if run is not None and place is not None:
                shard.read_run(run.start, target[place])
            else:
                shard.read_rows(shard_rows, target, places)
        if self._swapped:
            out[positions] = out[positions].byteswap()

    @property
    def version(self) -> object:
        """Something else once the rows have changed, as far as that can be told without reading them."""
        return 0

    def will_gather(self, start: int, stop: int) -> None:
        """Say that the rows [start, stop) will be gathered soon."""

    def scatter(self, rows: Rows, values: Array) -> None:
        """Refuse: the files are read-only.

        Raises:
            StoreError: Always.
        """
        raise StoreError(f"{self!r} is read-only")

    def flush(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._closed = True
        self._open.clear()

    def _open_shard(self, number: int) -> S:
        raise NotImplementedError

    def _evict(self, number: int, shard: S) -> None:
        """A shard is about to close, to make room for another. Called with the lock held."""

    def _split(self, rows: Rows) -> list[tuple[int, Rows, Rows]]:
        """The rows by shard: (shard, rows within it, their positions in ``rows``)."""
        if len(self._extents) == 1:
            return [(0, rows, np.arange(len(rows)))]
        shard_of = np.searchsorted(self._ends, rows, side="right")
        parts: list[tuple[int, Rows, Rows]] = []
        for number in np.unique(shard_of).tolist():
            positions = np.flatnonzero(shard_of == number)
            parts.append((number, rows[positions] - self._starts[number], positions))
        return parts

    def _shard(self, number: int) -> S:
        """The shard, opened.

        One that falls out of the cache closes when the last thread that reads it is done.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed; open the file again")
            shard = self._open.pop(number, None) or self._open_shard(number)
            self._open[number] = shard
            if len(self._open) > _OPEN_SHARDS:
                self._evict(*self._open.popitem(last=False))
            return shard


AnyShardedStore = ShardedStore[Any]

_stores: weakref.WeakSet[AnyShardedStore] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked process: a thread that is not there any more may have held one."""
    for store in _stores:
        store._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """Shape (n, row_nbytes), on the same memory."""
    n = len(array)
    return array.reshape(-1).view(np.uint8).reshape(n, array.nbytes // n if n else 0)
