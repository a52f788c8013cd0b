"""FileStore: what stores of files have in common; ShardedStore: rows of several files as one."""

from __future__ import annotations

import functools
import math
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ClosedError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.host_rows import runs_of
from pinfeed.stores.libraries import and_more
from pinfeed.stores.paths import file_key, written_maps
from pinfeed.stores.store import Array, ReadOnly, checked_gather
from pinfeed.tensors.dtypes import check_dtype


def only_reads_files(store: object) -> bool:
    """Return whether code of pinfeed reads the rows of a store from files, and writes none."""
    is_own = type(store).__module__.startswith(f"{__package__}.")
    return is_own and isinstance(store, FileStore) and not store.writable


def rows_version(stores: Iterable[FileStore]) -> object:
    """Return a value that changes when files of the stores are written or replaced.

    If changes cannot be known, the value equals no other one: a write to a map of a file may leave
    the times of the file as they are.
    """
    files = list(stores)
    try:
        versions = [file.version for file in files]
    except OSError:
        return object()
    # Otherwise, the rows of no store may change.
    if any(versions):
        written = written_maps()
        if written and any(file_key(path) in written for file in files for path in file.paths):
            return object()
    return versions


class FileStore(ReadOnly):
    """Rows of files, which any thread may gather; read-only, unless a subclass writes them.

    A store that has opened its files itself can be pickled, and opens them again after unpickling.

    Args:
        label: Short name of the files, for messages.
        paths: The files, in the order of their rows; empty if they are unknown.
        shape: Shape (n_rows, *row_shape).
        dtype: Native dtype of the rows.
    """

    nbytes: int
    """Bytes of all rows; bytes that several rows share count once."""
    loaded: ClassVar[str] = "loaded"
    """Word of the plan for rows that were copied into memory: loaded, decoded or converted."""
    reads_in_bulk: ClassVar[bool] = False
    """Whether a read of one row takes as long as one of many rows around it."""

    # Attributes that belong to one process, and are not pickled.
    _PROCESS_STATE: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, label: str, paths: Sequence[str], shape: Sequence[int], dtype: np.dtype[Any]
    ) -> None:
        self.label = label
        self.paths = list(paths)
        self.n_rows, *row_shape = shape
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.row_nbytes = dtype.itemsize * math.prod(row_shape)
        self._closed = False
        self._init_process_state()

    def _init_process_state(self) -> None:
        """Create the state that belongs to one process."""
        _stores.add(self)

    def _renew_after_fork(self) -> None:
        """Replace locks in a forked process, where the thread that holds one may not exist."""
        self._init_process_state()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name not in self._PROCESS_STATE
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._init_process_state()

    @property
    def resident_bytes(self) -> int:
        """Bytes of host memory that ``gather`` and ``scatter`` may need besides the rows."""
        return 0

    @property
    def version(self) -> object:
        """A value that changes with the rows, if that is known without reading."""
        return 0

    @property
    def can_be_memory_rows(self) -> bool:
        """Whether compiled functions can copy the rows from memory maps of the files."""
        return False

    def has_rows_of(self, other: FileStore | None) -> bool:
        """Return whether another store reads the same rows of the same files in the same way."""
        return self is other

    def rows_in(self, nbytes: int) -> int:
        """Return how many consecutive rows begin within ``nbytes`` bytes, at least 1."""
        return max(1, nbytes * self.n_rows // max(1, self.nbytes))

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``.

        Raises:
            ReadError: If a file has shrunk, or cannot be read or decoded.
            ClosedError: If the store, or the file that it reads, is closed.
            RowIndexError: If a row is out of range or negative.
            ArgumentError: If ``out`` has another shape, dtype or layout, or is read-only.
        """
        self.gather_unchecked(checked_gather(self, rows, out), out)

    def gather_unchecked(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``gather``. The caller has checked all arguments."""
        self.gather_runs(runs_of(rows), out)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        Args:
            runs: Runs in range.
            out: C-contiguous, shape (n, *row_shape), of the store's dtype.

        Raises:
            ReadError: As for ``gather``.
            ClosedError: As for ``gather``.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the files. Further calls do nothing."""
        self._closed = True
        super().close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed; open it again")


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _renew_stores() -> None:
    for store in list(_stores):
        store._renew_after_fork()


os.register_at_fork(after_in_child=_renew_stores)


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
