"""ArrowStore: rows of an Arrow column, gathered from Arrow's memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import ArrayStore, ConcatStore
from pinfeed.stores.host_rows import gather_rows
from pinfeed.stores.libraries import imported
from pinfeed.stores.store import Array, ReadOnly, checked_gather, in_words
from pinfeed.tensors.argument_types import ArrowColumn

# Only newer versions of pyarrow have a function for the last one.
_TEXT_TYPES = ("string", "large_string", "string_view")
# Lengths of lists that are compared at a time.
_N_LENGTHS = 1 << 20
# Advice for types of columns that a tensor cannot have, by the name of pyarrow's test for the type.
_REFUSED = {
    "is_temporal": 'cast it to "int64" (dataset.cast_column, or column.cast)',
    "is_dictionary": "decode it to plain numbers (column.dictionary_decode())",
    "is_struct": "flatten it into columns of its fields (dataset.flatten(), or table.flatten())",
    "is_decimal": 'cast it to "float64" (dataset.cast_column, or column.cast)',
}
RAGGED_ADVICE = (
    "give pinfeed.RaggedStore(values, offsets) or RaggedStore.from_arrow(column), pad them to one "
    "length, or batch them with a collate_fn: "
    "pinfeed.wrap_loader(DataLoader(dataset, collate_fn=...))"
)
"""Advice for lists of different lengths."""
_LEAVE_OUT = (
    "or leave the column out (dataset.select_columns, table.select, or a dict of the stores of the "
    "other columns)"
)


class ArrowStore(ReadOnly):
    """Read-only rows of an Arrow column, on Arrow's memory.

    If the column is in a memory-mapped file, a gather reads only the rows that it needs.

    The column contains numbers, or lists of numbers that all have the same length. Nested lists
    give the shape of a row. Lists of fixed size, ``FixedShapeTensorType`` and the ``Array2D`` of
    Hugging Face are also supported. Booleans, which are bits in Arrow, are unpacked when the store
    is made. A column may have any number of chunks.

    Args:
        column: A ``pyarrow.ChunkedArray`` or ``pyarrow.Array``, at least one row.
        name: Name of the column in error messages.
        indices: A column of row indices: row i of the store is row ``indices[i]`` of ``column``. By
            default, it is row i.

    Raises:
        MissingDependency: If pyarrow is not installed.
        StoreError: If the column has no rows, has nulls, has lists of different lengths, or
            contains anything but numbers.

    Examples:
        >>> import pyarrow
        >>> table = pyarrow.table({"x": [1.0, 2.0, 3.0]})
        >>> store = pinfeed.ArrowStore(table["x"], name="x")
        >>> with pinfeed.Feeder(store, batch_size=3) as feeder:
        ...     (batch,) = feeder
        >>> batch
        tensor([1., 2., 3.], dtype=torch.float64)
    """

    def __init__(
        self, column: ArrowColumn, *, name: str = "column", indices: ArrowColumn | None = None
    ) -> None:
        pyarrow = imported("pyarrow", name)
        if not isinstance(column, (pyarrow.ChunkedArray, pyarrow.Array)):
            raise StoreError(
                f"{name}: got {type(column).__name__}; expected a pyarrow.ChunkedArray or a "
                "pyarrow.Array"
            )
        chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
        self._name = name
        parts = [ArrayStore(rows_of_chunk(chunk, name)) for chunk in chunks if len(chunk)]
        if not parts:
            raise StoreError(f"{name}: the column has no rows; expected at least one")
        self.dtype = parts[0].dtype
        self.row_shape = parts[0].row_shape
        for part in parts:
            if part.row_shape != self.row_shape:
                raise ragged_error(name, self.row_shape, part.row_shape)
        self.arrays: list[Array] = [part.array for part in parts]
        """The rows of the chunks, on Arrow's memory unless they are booleans."""
        self._stored = parts[0] if len(parts) == 1 else ConcatStore(parts)
        self._indices = (
            None if indices is None else ArrowStore(indices, name=f"{name}: its indices")
        )
        self.n_rows: int = (self._indices or self._stored).n_rows

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}: {in_words(self)}>"

    @property
    def array(self) -> Array | None:
        """The rows as one array on Arrow's memory; None if there is no such array."""
        return self.arrays[0] if self._indices is None and len(self.arrays) == 1 else None

    @property
    def resident_bytes(self) -> int:
        return self._stored.n_rows * math.prod(self.row_shape) if self.dtype == np.bool_ else 0

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``."""
        rows = checked_gather(self, rows, out)
        if self._indices is not None:
            numbers = np.empty(len(rows), self._indices.dtype)
            self._indices.gather(rows, numbers)
            rows = check_rows(numbers, self._stored.n_rows, f"{self._name}: its indices")
        self._stored.gather_unchecked(rows, out)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their places in ``out``. The caller has checked all arguments."""
        if self._indices is not None:
            gather_rows(self, runs, out)
        else:
            self._stored.gather_runs(runs, out)


def rows_of_chunk(array: Any, name: str) -> Array:
    """Return the rows of a chunk, shape (n_rows, *row_shape), if possible on Arrow's memory."""
    import pyarrow

    shape: tuple[int, ...] = (len(array),)
    tail: tuple[int, ...] = ()
    while True:
        kind = array.type
        if array.null_count:
            raise nulls_error(name)
        # Only for types with a shape does the storage certainly contain the numbers of the rows.
        if isinstance(kind, pyarrow.BaseExtensionType) and hasattr(kind, "shape"):
            if isinstance(kind, pyarrow.FixedShapeTensorType):
                tail = _tensor_shape(kind, name)
            array = array.storage
        elif pyarrow.types.is_fixed_size_list(kind):
            shape = (*shape, kind.list_size)
            array = array.values.slice(array.offset * kind.list_size, math.prod(shape))
        elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            offsets = values_of(array.offsets)
            shape = (*shape, _length(offsets, name))
            array = array.values.slice(int(offsets[0]), math.prod(shape))
        else:
            return _numbers(array, shape[:-1] + tail if tail else shape, name)


def values_of(array: Any) -> Array:
    """Return the values of an Arrow array of numbers without nulls, on its memory, read-only."""
    # ``to_numpy`` would import pandas, which takes 27 MiB that no limit counts.
    values = np.from_dlpack(array)
    values.flags.writeable = False
    return values


def items_and_offsets(column: Any) -> tuple[Any, Rows]:
    """Return the items of all lists as a column, and the offset of each list.

    Args:
        column: A pyarrow.ListArray, a LargeListArray, or a ChunkedArray of these.

    Returns:
        A pyarrow.ChunkedArray on the memory of ``column``, and offsets of shape (n_rows + 1,),
        int64.

    Raises:
        MissingDependency: If pyarrow is not installed.
        StoreError: If ``column`` is not a column of lists, has nulls, or has no rows.
    """
    pyarrow = imported("pyarrow", "from_arrow")
    is_column = isinstance(column, (pyarrow.ChunkedArray, pyarrow.Array))
    kind = column.type if is_column else type(column).__name__
    if not is_column or not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        raise StoreError(
            f"from_arrow: got {kind}; expected a column of lists, a pyarrow.ListArray or a "
            'ChunkedArray of them, such as table["tokens"] or dataset.data.column("tokens")'
        )
    if column.null_count:
        raise StoreError(
            f"from_arrow: {column.null_count} of {len(column)} lists are null; expected none; fill "
            "them with empty lists (pyarrow.compute.fill_null), or leave them out (drop_null)"
        )
    if not len(column):
        raise StoreError("from_arrow: the column has no rows; expected at least one")
    chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
    offsets = np.zeros(len(column) + 1, np.int64)
    items = []
    begin = 0
    for chunk in chunks:
        found = values_of(chunk.offsets)
        first = int(found[0])
        items.append(chunk.values.slice(first, int(found[-1]) - first))
        end = begin + len(chunk)
        offsets[begin + 1 : end + 1] = found[1:]
        offsets[begin + 1 : end + 1] += offsets[begin] - first
        begin = end
    return pyarrow.chunked_array(items), offsets


def numeric_dtype(kind: Any, name: str) -> np.dtype[Any] | None:
    """Return the dtype of a column of an Arrow type; None if all its values are missing.

    Raises:
        StoreError: If its values are not numbers.
    """
    import pyarrow

    types = pyarrow.types
    if types.is_null(kind):
        return None
    has_shape = isinstance(kind, pyarrow.BaseExtensionType) and hasattr(kind, "shape")
    if (
        has_shape
        or types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    ):
        raise StoreError(
            f"{name}: a column of {kind}; expected one number in each row, because it becomes one "
            "column of a matrix; give it as a source of its own, without dtype= and missing="
        )
    return rows_of_chunk(pyarrow.nulls(0, kind), name).dtype


def without_nulls(array: Any) -> Any:
    """Return an Arrow array of numbers on the same memory; nulls become any numbers."""
    import pyarrow

    if not array.null_count:
        return array
    buffers = [None, array.buffers()[1]]
    return pyarrow.Array.from_buffers(array.type, len(array), buffers, 0, array.offset)


def validity(array: Any) -> Any:
    """Return booleans that are False where an Arrow array has nulls."""
    import pyarrow

    if not array.null_count:
        return pyarrow.array(np.ones(len(array), np.bool_))
    buffers = [None, array.buffers()[0]]
    return pyarrow.Array.from_buffers(pyarrow.bool_(), len(array), buffers, 0, array.offset)


def _tensor_shape(kind: Any, name: str) -> tuple[int, ...]:
    axes = kind.permutation
    if axes is not None and axes != sorted(axes):
        raise StoreError(
            f"{name}: tensors have permuted axes ({axes}), which scatters the items of a row; "
            "write them with axes in order"
        )
    return tuple(kind.shape)


def _length(offsets: npt.NDArray[Any], name: str) -> int:
    """Return the length of all lists, given their begins and the end of the last one."""
    length = int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0
    for i in range(0, len(offsets) - 1, _N_LENGTHS):
        lengths = np.diff(offsets[i : i + _N_LENGTHS + 1])
        if (lengths != length).any():
            raise ragged_error(name, (length,), (int(lengths[lengths != length][0]),))
    return length


def nulls_error(name: str) -> StoreError:
    """Return the error about a column with nulls."""
    return StoreError(
        f"{name} has nulls, but tensors have no nulls; fill them (pyarrow.compute.fill_null, "
        "dataset.map, fillna or fill_null of a frame), drop their rows (dropna, drop_nulls), "
        f"{_LEAVE_OUT}"
    )


def ragged_error(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> StoreError:
    """Return the error about rows of different shapes."""
    return StoreError(
        f"{name}: lists of different lengths (rows of shape {one} and {other}); {RAGGED_ADVICE}"
    )


def _numbers(array: Any, shape: tuple[int, ...], name: str) -> Array:
    import pyarrow

    kind = array.type
    if pyarrow.types.is_boolean(kind):
        # The first bit of a byte is the lowest one.
        begin, n = array.offset, math.prod(shape)
        packed = np.frombuffer(array.buffers()[1] or b"", np.uint8)[begin >> 3 : begin + n + 7 >> 3]
        bits = np.unpackbits(packed, bitorder="little")[begin & 7 :][:n]
        rows = bits.view(np.bool_).reshape(shape)
        rows.flags.writeable = False
        return rows
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
        return values_of(array).reshape(shape)
    advice = next(
        (advice for test, advice in _REFUSED.items() if getattr(pyarrow.types, test)(kind)),
        "convert it to numbers",
    )
    if len(shape) == 1 and is_text_type(kind):
        advice = "give pinfeed.TextStore(column)"
    if pyarrow.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:
        advice = "for images or sounds, give pinfeed.wrap_dataset(dataset, transform)"
    raise StoreError(
        f"{name}: a column of {kind}; expected numbers or booleans, or lists of them; {advice}, "
        f"{_LEAVE_OUT}"
    )


def is_text_type(kind: Any) -> bool:
    """Return whether an Arrow type is that of strings, or of a dictionary of strings."""
    is_dictionary = imported("pyarrow", "TextStore").types.is_dictionary(kind)
    return str(kind.value_type if is_dictionary else kind) in _TEXT_TYPES
