"""ArrayStore: rows of an array in memory; ConcatStore: rows of such stores, and of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pinfeed.errors import StoreError, WriteBackError
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.host_rows import Gather, put_rows, run_gather, runs_of
from pinfeed.stores.store import (
    SMALL_GATHER_BYTES,
    Array,
    ClosedOnExit,
    ReadOnly,
    Store,
    checked_gather,
    checked_scatter,
    in_words,
    run_of,
)
from pinfeed.tensors.argument_types import ArrayLike
from pinfeed.tensors.dtypes import check_dtype

# Runs of fewer rows are copied by row index, which costs 2 to 3 ns per row, or 6 ns if the targets
# have gaps. A slice costs about 400 ns per run.
_SHORT_RUN = 192
_SHORT_RUN_WITH_GAPS = 64
# Up to this number of runs, slices take less time than to compute row indices.
_SLICED_RUNS = 16
# Rows that are copied by row index at once, so that the indices stay in the CPU cache.
_PIECE_ROWS = 1 << 15
COPIED_BYTES = 1 << 20
"""Bytes of rows that are copied by row index at once, and need as much memory."""

# Above this size, the compiled gather is faster, although it takes some us to describe the rows.
_LARGE_BYTES = 256 << 10
# For more runs, the compiled copy is faster, although it takes some us to describe the rows.
_FEW_RUNS = 4
# From these sizes of the values and of the array on, a scatter past the caches is faster, even if
# the same rows are gathered next.
_LARGE_SCATTER_BYTES = 2 << 20
_UNCACHED_BYTES = 64 << 20


class ArrayStore(ClosedOnExit):
    """Rows of a numpy array or of a CPU tensor, on the memory of the array.

    Rows that are written back change the array. An array in which several elements share the same
    memory (``expand``, ``as_strided``) is read-only.

    Args:
        array: Shape (n_rows, *row_shape), at least one row.
        name: Name of the array in error messages.

    Raises:
        StoreError: If the array has no rows, is in Fortran order, or has an object or structured
            dtype, or if a tensor is not on the CPU.

    Examples:
        >>> store = pinfeed.ArrayStore(np.zeros((100, 3), "float32"))
        >>> store
        <ArrayStore: 100 rows of shape (3,), float32>
        >>> with pinfeed.Feeder(store, batch_size=25) as feeder:
        ...     n_batches = len(list(feeder))
    """

    resident_bytes = 0
    _shares_itself = False

    def __init__(self, array: ArrayLike, *, name: str = "array") -> None:
        if not isinstance(array, np.ndarray):
            # Imported here, because torch need not be loaded for numpy arrays.
            from pinfeed.tensors.numpy_torch import to_numpy

            array = to_numpy(array, name)
        if isinstance(array, np.ma.MaskedArray):
            raise StoreError(
                f"{name} is a masked array, but tensors have no mask; give .filled(value), or the "
                "data and the mask in a dict"
            )
        if array.ndim == 0 or len(array) == 0:
            raise StoreError(
                f"{name}: shape {array.shape} has no rows; expected (n_rows, ...) with at least "
                "one row"
            )
        if check_dtype(array.dtype, name) != array.dtype:
            raise StoreError(
                f"{name}: dtype {array.dtype} is not in this machine's byte order; convert with "
                f".astype({array.dtype.name!r})"
            )
        if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous:
            raise StoreError(
                f"{name} is in Fortran order, in which the items of a row are scattered over "
                "memory; expected C order; convert with np.ascontiguousarray"
            )
        self._array: Array = array
        self._shares_itself = shares_itself(array)

    def __repr__(self) -> str:
        suffix = "" if self.writable else ", read-only"
        return f"<{type(self).__name__}: {in_words(self)}{suffix}>"

    @property
    def array(self) -> Array:
        """The rows themselves, shape (n_rows, *row_shape)."""
        return self._array

    @property
    def n_rows(self) -> int:
        return len(self._array)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._array.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    @property
    def writable(self) -> bool:
        return bool(self._array.flags.writeable) and not self._shares_itself

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``; ``out`` may be a part of the array."""
        rows = checked_gather(self, rows, out)
        if np.may_share_memory(out, self._array):
            out[...] = self._array[rows]
        else:
            self.gather_unchecked(rows, out)

    @property
    def memory_rows(self) -> MemoryRows | None:
        """The rows where they are now, if the compiled functions can copy them."""
        return MemoryRows.of_array(self._array)

    def gather_unchecked(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``. The caller has checked all arguments."""
        if out.nbytes > _LARGE_BYTES and (memory_rows := self.memory_rows) is not None:
            memory_rows.gather(rows, out)
        elif out.nbytes > SMALL_GATHER_BYTES and (run := run_of(rows)) is not None:
            out[...] = self._array[run]
        elif self._array.flags.c_contiguous:
            # Rows are in range. With mode="raise", numpy would gather into a temporary buffer
            # first.
            self._array.take(rows, axis=0, out=out, mode="clip")
        else:
            # np.take would first copy the whole array to make it contiguous.
            out[...] = self._array[rows]

    def gather_at(self, rows: Rows, out: Array, positions: Rows) -> None:
        """Copy rows into ``out[positions]``, without checks; for few rows faster than runs."""
        out[positions] = self._array[rows]

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their places in ``out``. The caller has checked all arguments."""
        memory_rows = self.memory_rows if len(runs.starts) > _FEW_RUNS else None
        if memory_rows is not None:
            memory_rows.gather_runs(*runs, out)
        else:
            copy_runs(self._array, runs.merged(), out)

    def scatter(self, rows: Rows, values: Array) -> None:
        """Store rows in the array.

        Raises:
            WriteBackError: If the array is read-only, if several of its elements share the same
                memory, or if ``values`` has another shape or dtype.
            RowIndexError: If a row is out of range or negative.
        """
        if self._shares_itself:
            raise WriteBackError(f"rows of an array {SHARED}")
        if not self._array.flags.writeable:
            raise WriteBackError(
                f"{self!r} cannot be written; expected an array with flags.writeable True; give a "
                "copy of the array"
            )
        rows = checked_scatter(self, rows, values)
        if (run := run_of(rows)) is not None:
            self._array[run] = values
        elif (
            values.nbytes >= _LARGE_SCATTER_BYTES
            and self._array.nbytes >= _UNCACHED_BYTES
            and values.flags.c_contiguous
            and not np.may_share_memory(values, self._array)
            and (memory_rows := self.memory_rows) is not None
            and memory_rows.has_whole_lines
        ):
            memory_rows.scatter(rows, values)
        else:
            put_rows(self._array, rows, values)

    def flush(self) -> None:
        """Do nothing, because memory needs no flush."""


class ConcatStore(ReadOnly):
    """Rows of several stores, one after the other; read-only.

    Args:
        parts: Stores with rows of one shape and dtype, at least one.
        owned: The parts that this store closes.
    """

    def __init__(self, parts: Sequence[Store], owned: Sequence[Store] = ()) -> None:
        self.parts = tuple(parts)
        self._owned = tuple(owned)
        self._ends = np.cumsum([part.n_rows for part in parts])
        self.n_rows: int = self._ends.item(-1)
        self.row_shape = parts[0].row_shape
        self.dtype = parts[0].dtype
        self._gathers = [run_gather(part) for part in parts]
        # Pinned memory does not exist in forked processes, so its address is not kept.
        arrays = [part.array for part in parts if type(part) is ArrayStore]
        is_memory = len(arrays) == len(parts)
        self._memory_rows = MemoryRows.of_arrays(arrays) if is_memory else None

    def __reduce__(self) -> tuple[Any, ...]:
        # No caller has the parts that are unpickled.
        return type(self), (self.parts, self.parts)

    def __repr__(self) -> str:
        return f"<ConcatStore: {in_words(self)}, of {len(self.parts)} stores>"

    @property
    def resident_bytes(self) -> int:
        return sum(part.resident_bytes for part in self.parts)

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``."""
        rows = checked_gather(self, rows, out)
        arrays = [part.array for part in self.parts if isinstance(part, ArrayStore)]
        if any(np.may_share_memory(out, array) for array in arrays):
            # The rows are read before the first one is overwritten.
            copy = np.empty_like(out)
            self.gather_unchecked(rows, copy)
            out[...] = copy
        else:
            self.gather_unchecked(rows, out)

    @property
    def gather_unchecked(self) -> Gather:
        """Function that copies rows into an array. The caller has checked all arguments."""
        return self._gather if self._memory_rows is None else self._memory_rows.gather

    @property
    def memory_rows(self) -> MemoryRows | None:
        """The rows where they are, if all are in arrays and compiled functions can copy them."""
        return self._memory_rows

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their places in ``out``. The caller has checked all arguments."""
        for number, part in runs.by_part(self._ends):
            self._gathers[number](part, out)

    def _gather(self, rows: Rows, out: Array) -> None:
        self.gather_runs(runs_of(rows), out)


SHARED = (
    "in which several elements share memory, as after expand() or as_strided(), cannot be "
    "written, because one row would overwrite another; expected an array with its own memory for "
    "each element; give a copy"
)
"""End of errors about an array that shares memory with itself."""


def shares_itself(array: Array) -> bool:
    """Return whether several elements of an array may share the same memory.

    Only the strides are checked. The answer is also True for unusual arrays in which elements of
    one axis lie between those of another.
    """
    if not array.size:
        return False
    # Bytes from the first to the last element of the axes so far. A step along the next axis must
    # not be shorter.
    span = array.itemsize
    axes = zip(array.strides, array.shape, strict=True)
    for stride, n in sorted((abs(stride), n) for stride, n in axes if n > 1):
        if stride < span:
            return True
        span += (n - 1) * stride
    return False


def copy_runs(array: Array, runs: Runs, out: Array) -> None:
    """Copy runs, each of at least one row, of an array into ``out``, shape (m, *row_shape)."""
    n_rows = runs.n_rows
    # The bytes of an array without rows have another shape.
    if not n_rows:
        return
    n_runs = len(runs.lengths)
    most_rows = min(_PIECE_ROWS, COPIED_BYTES * len(array) // max(1, array.nbytes))
    is_contiguous = array.flags.c_contiguous
    if is_contiguous and n_rows == n_runs <= most_rows:
        # With mode="raise", numpy would gather into a temporary buffer first.
        put_rows(out, runs.places, array.take(runs.starts, axis=0, mode="clip"))
        return
    short = _SHORT_RUN if runs.target is not None else _SHORT_RUN_WITH_GAPS
    if n_runs <= _SLICED_RUNS or n_rows >= short * n_runs or not is_contiguous:
        for start, length, place in zip(*(numbers.tolist() for numbers in runs), strict=True):
            out[place : place + length] = array[start : start + length]
        return
    for piece in runs.pieces(max(1, most_rows)):
        if (target := piece.target) is not None:
            array.take(piece.rows(), axis=0, out=out[target], mode="clip")
        else:
            put_rows(out, piece.positions(), array.take(piece.rows(), axis=0, mode="clip"))
