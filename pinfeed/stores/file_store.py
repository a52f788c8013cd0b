"""FileStore: what all stores of files have in common."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from pinfeed.errors import ClosedError
from pinfeed.memory.proc_maps import file_key, written_maps
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.host_rows import runs_of
from pinfeed.stores.store import Array, ReadOnly, checked_gather


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

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed; open it again")


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _renew_stores() -> None:
    for store in list(_stores):
        store._renew_after_fork()


os.register_at_fork(after_in_child=_renew_stores)
