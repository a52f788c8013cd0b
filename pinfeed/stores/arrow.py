"""ArrowStore: rows of an Arrow column, gathered from Arrow's own memory."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import MissingDependency, StoreError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, checked_gather, in_words, run_of
from pinfeed.validation.safe_repr import safe_repr

# Lengths of lists that are compared at a time.
_N_LENGTHS = 1 << 20
# Bytes of rows that are gathered from several chunks at a time.
_COLLECTED_BYTES = 1 << 20
# Bits that are unpacked at a time; each takes 18 bytes while it is unpacked.
_N_BITS = 1 << 16
_BYTES_PER_BIT = 18
# Gathers that run at the same time, at most.
_MAX_GATHERS = 8

# Advice for types of columns that a tensor cannot have, by the name of pyarrow's test for the type.
_REFUSED = {
    "is_temporal": 'cast it to "int64" (dataset.cast_column, or column.cast)',
    "is_dictionary": "decode it to plain numbers (column.dictionary_decode())",
    "is_struct": "flatten it into columns of its fields (dataset.flatten(), or table.flatten())",
    "is_decimal": 'cast it to "float64" (dataset.cast_column, or column.cast)',
}
_LEAVE_OUT = "or leave the column out (dataset.select_columns, table.select)"


class ArrowStore:
    """Rows of an Arrow column, read-only, which are shared and not copied.

    If the column is in a memory-mapped file, only the rows that are gathered are read.

    The column has numbers, or lists of numbers that all have the same length; the lists may be
    nested, which gives the shape of a row. Types with a fixed length, ``FixedShapeTensorType`` and
    the ``Array2D`` of Hugging Face are supported, too. Booleans, which are bits in Arrow, are
    unpacked when they are gathered. A column may have any number of chunks; a random gather takes
    some microseconds for each chunk that it touches.

    Args:
        column: A ``pyarrow.ChunkedArray`` or ``pyarrow.Array``, at least one row.
        name: Name of the column in errors.
        indices: A column of row indices; row i of the store is row ``indices[i]`` of ``column``.
            By default, it is row i.

    Raises:
        MissingDependency: If pyarrow is not installed.
        StoreError: If the column has no rows, nulls, lists of different lengths, or something else
            than numbers.

    Example::

        table = pyarrow.table({"x": [1.0, 2.0, 3.0]})
        store = ArrowStore(table["x"])
    """

    writable = False

    def __init__(self, column: Any, *, name: str = "column", indices: Any = None) -> None:
        try:
            import pyarrow
        except ImportError:
            raise MissingDependency(f"{name}: pyarrow is needed; pip install pyarrow") from None
        if not isinstance(column, (pyarrow.ChunkedArray, pyarrow.Array)):
            raise StoreError(
                f"{name}: got {type(column).__name__}; expected a pyarrow.ChunkedArray or a "
                "pyarrow.Array"
            )
        chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
        self._name = name
        self._chunks = [_values(chunk, name) for chunk in chunks if len(chunk)]
        if not self._chunks:
            raise StoreError(f"{name}: a column without rows; expected at least one")
        for chunk in self._chunks:
            if chunk.shape[1:] != self.row_shape:
                raise _ragged(name, self.row_shape, chunk.shape[1:])
        counts = [chunk.shape[0] for chunk in self._chunks]
        self._n_stored = sum(counts)
        self._starts = np.cumsum([0, *counts[:-1]])
        self._indices = (
            None if indices is None else ArrowStore(indices, name=f"{name}: its indices")
        )

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}: {in_words(self)}>"

    @property
    def n_rows(self) -> int:
        return self._n_stored if self._indices is None else self._indices.n_rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._chunks[0].shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._chunks[0].dtype

    @property
    def resident_bytes(self) -> int:
        is_one_array = len(self._chunks) == 1 and isinstance(self._chunks[0], np.ndarray)
        if is_one_array:
            return 0
        return _MAX_GATHERS * (_COLLECTED_BYTES + _BYTES_PER_BIT * _N_BITS)

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``."""
        rows = checked_gather(self, rows, out)
        if self._indices is not None:
            numbers = np.empty(len(rows), self._indices.dtype)
            self._indices.gather(rows, numbers)
            rows = check_rows(numbers, self._n_stored, f"{self._name}: its indices")
        if (run := run_of(rows)) is not None:
            self._copy(run, out)
        elif len(self._chunks) == 1:
            # Rows are in range; with "raise", numpy would gather into a buffer of its own first.
            self._chunks[0].take(rows, 0, out, "clip")
        else:
            step = max(1, _COLLECTED_BYTES * len(out) // max(1, out.nbytes))
            for i in range(0, len(rows), step):
                self._collect(rows[i : i + step], out[i : i + step])

    def scatter(self, rows: Rows, values: Array) -> None:
        """Refuse to write: Arrow columns do not change.

        Raises:
            StoreError: Always.
        """
        raise StoreError(f"{self._name}: an Arrow column is read-only")

    def flush(self) -> None:
        """Do nothing, because nothing was written."""

    def close(self) -> None:
        """Do nothing, because the column belongs to the caller."""

    def _copy(self, run: slice, out: Array) -> None:
        """Copy consecutive rows, chunk by chunk."""
        done = 0
        number = int(np.searchsorted(self._starts, run.start, side="right")) - 1
        while done < len(out):
            chunk = self._chunks[number]
            begin = run.start + done - int(self._starts[number])
            n = min(len(out) - done, chunk.shape[0] - begin)
            out[done : done + n] = chunk[begin : begin + n]
            done += n
            number += 1

    def _collect(self, rows: Rows, out: Array) -> None:
        """Gather rows in any order: first by chunk, then each row to its position."""
        order = np.argsort(rows)
        rows = rows[order]
        begins = np.searchsorted(rows, self._starts)
        counts = np.diff(begins, append=len(rows))
        rows -= np.repeat(self._starts, counts)
        found = np.empty_like(out)
        for number in np.flatnonzero(counts).tolist():
            part = slice(begins[number], begins[number] + counts[number])
            self._chunks[number].take(rows[part], 0, found[part], "clip")
        out[order] = found


class _Bits:
    """Booleans that Arrow has packed as bits, with the part of an array's interface needed here.

    Args:
        packed: The bytes; the first bit is the lowest one.
        first: Number of the bit with which row 0 begins.
        shape: Shape (n_rows, *row_shape).
    """

    dtype: np.dtype[Any] = np.dtype(bool)

    def __init__(self, packed: npt.NDArray[np.uint8], first: int, shape: tuple[int, ...]) -> None:
        self._packed = packed
        self._first = first
        self.shape = shape

    def __getitem__(self, rows: slice) -> Array:
        out = np.empty((rows.stop - rows.start, *self.shape[1:]), bool)
        self.take(np.arange(rows.start, rows.stop), 0, out, "clip")
        return out

    def take(self, rows: Rows, axis: int, out: Array, mode: str) -> None:
        """Copy rows into ``out``, like ``numpy.ndarray.take``."""
        n_bits = math.prod(self.shape[1:])
        flat = out.reshape(len(rows), n_bits)
        step = max(1, _N_BITS // max(1, n_bits))
        for i in range(0, len(rows), step):
            bits = self._first + rows[i : i + step, None] * n_bits + np.arange(n_bits)
            flat[i : i + step] = self._packed[bits >> 3] >> (bits & 7) & 1


def columns_of(source: Any, name: str) -> dict[str, ArrowStore] | None:
    """Return a store for each column of a pyarrow.Table or of a Hugging Face dataset.

    The columns and rows of a dataset are those that ``dataset[i]`` shows.

    Args:
        source: A table, a dataset, or anything else.
        name: Name of the source in errors.

    Returns:
        The stores by name of the column, or None if ``source`` is neither.

    Raises:
        StoreError: If a column cannot be served, or if the rows of a dataset are not those of its
            table.
    """
    # If pyarrow is not loaded, the source cannot be a table.
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None:
        return None
    if isinstance(source, pyarrow.Table):
        return {
            column: ArrowStore(source[column], name=f"{name}[{column!r}]")
            for column in _unique(source.column_names, name)
        }
    if not _is_dataset(source):
        return None
    view = source.format
    if view["type"] == "custom":
        raise StoreError(
            f"{name}: a dataset with a transform, which runs sample by sample; take it off "
            "(dataset.reset_format()), or give pinfeed.wrap_loader(DataLoader(dataset))"
        )
    names = [
        column
        for column in source.column_names
        if view["output_all_columns"] or column in view["columns"]
    ]
    # Row indices that select, shuffle, sort and other methods have left.
    indices = source._indices.column(0) if source._indices is not None else None
    stores = {
        column: ArrowStore(source.data.column(column), name=f"{name}[{column!r}]", indices=indices)
        for column in names
    }
    if view["type"] in ("numpy", "torch"):
        _check_format(view["type"], source[0], stores, name)
    return stores


def is_column(source: Any) -> bool:
    """Return whether an object is an Arrow column."""
    pyarrow = sys.modules.get("pyarrow")
    return pyarrow is not None and isinstance(source, (pyarrow.ChunkedArray, pyarrow.Array))


def _is_dataset(source: Any) -> bool:
    """Return whether an object is a Hugging Face dataset, without importing the library."""
    dataset = ("datasets.arrow_dataset", "Dataset")
    return any((base.__module__, base.__name__) == dataset for base in type(source).__mro__)


def _check_format(
    kind: str, first: dict[str, Any], stores: dict[str, ArrowStore], name: str
) -> None:
    """Check that the format of a dataset does not convert dtypes, by the example of its first row.

    Raises:
        StoreError: If it does.
    """
    for column, store in stores.items():
        given = str(getattr(first[column], "dtype", store.dtype)).removeprefix("torch.")
        if given != store.dtype.name:
            raise StoreError(
                f"{name}[{column!r}]: with_format({kind!r}) gives {given} of what is stored as "
                f"{store.dtype}; take it as it is (dataset.with_format(None)), or store it so "
                "(dataset.cast_column)"
            )


def _unique(names: list[str], name: str) -> list[str]:
    if len(set(names)) < len(names):
        raise StoreError(
            f"{name}: a table with columns of the same name: {', '.join(names)}; rename them "
            "(table.rename_columns)"
        )
    return names


def _values(array: Any, name: str) -> Array | _Bits:
    """Return the rows of a chunk, shape (n_rows, *row_shape), on Arrow's memory."""
    import pyarrow

    shape: tuple[int, ...] = (len(array),)
    tail: tuple[int, ...] = ()
    while True:
        kind = array.type
        if array.null_count:
            raise StoreError(
                f"{name}: has nulls, which a tensor cannot have; fill them "
                f"(pyarrow.compute.fill_null, dataset.map), {_LEAVE_OUT}"
            )
        # Only of types with a shape is it known that their storage has the numbers of the rows.
        if isinstance(kind, pyarrow.BaseExtensionType) and hasattr(kind, "shape"):
            if isinstance(kind, pyarrow.FixedShapeTensorType):
                tail = _tensor_shape(kind, name)
            array = array.storage
        elif pyarrow.types.is_fixed_size_list(kind):
            shape = (*shape, kind.list_size)
            array = array.values.slice(array.offset * kind.list_size, math.prod(shape))
        elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            offsets = array.offsets.to_numpy()
            shape = (*shape, _length(offsets, name))
            array = array.values.slice(int(offsets[0]), math.prod(shape))
        else:
            return _numbers(array, shape[:-1] + tail if tail else shape, name)


def _tensor_shape(kind: Any, name: str) -> tuple[int, ...]:
    axes = kind.permutation
    if axes is not None and axes != sorted(axes):
        raise StoreError(
            f"{name}: tensors of permuted axes ({axes}), in which a row is scattered; write them "
            "in the order of their axes"
        )
    return tuple(kind.shape)


def _length(offsets: npt.NDArray[Any], name: str) -> int:
    """Return the length of all lists, given their begins and the end of the last one."""
    length = int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0
    for i in range(0, len(offsets) - 1, _N_LENGTHS):
        lengths = np.diff(offsets[i : i + _N_LENGTHS + 1])
        if (lengths != length).any():
            raise _ragged(name, (length,), (int(lengths[lengths != length][0]),))
    return length


def _ragged(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> StoreError:
    return StoreError(
        f"{name}: lists of different lengths (rows of shape {one} and {other}); pad them to one "
        "length, or batch them with a collate_fn: pinfeed.wrap_loader(DataLoader(dataset, "
        "collate_fn=...))"
    )


def _numbers(array: Any, shape: tuple[int, ...], name: str) -> Array | _Bits:
    import pyarrow

    kind = array.type
    if pyarrow.types.is_boolean(kind):
        return _Bits(np.frombuffer(array.buffers()[1] or b"", np.uint8), array.offset, shape)
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
        values: Array = array.to_numpy().reshape(shape)
        return values
    advice = next(
        (advice for test, advice in _REFUSED.items() if getattr(pyarrow.types, test)(kind)),
        "make numbers of it",
    )
    raise StoreError(
        f"{name}: a column of {kind}; expected numbers or booleans, or lists of them; {advice}, "
        f"{_LEAVE_OUT}"
    )
