"""RaggedStore: rows of unequal length, as ranges of the items of a store."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.packing import Places
from pinfeed.rows.row_lengths import RowLengths
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore, items_and_offsets
from pinfeed.stores.host_rows import RunGather, RunRows, run_gather
from pinfeed.stores.opened import open_store
from pinfeed.stores.store import Array, Store, is_store, row_nbytes
from pinfeed.validation.arguments import explain_arguments
from pinfeed.validation.safe_repr import safe_repr

Layout = Literal["offsets", "padded", "jagged", "packed"]

logger = logging.getLogger("pinfeed")

_LAYOUTS = ("offsets", "padded", "jagged", "packed")
_INDEX_NBYTES = 8
_PACKED_NBYTES = 4

_HINTS = {
    "data": "the items are the first positional argument",
    "pad_value": "the value of padded elements is padding=",
    "padding_value": "the value of padded elements is padding=",
    "max_tokens": "give the Feeder rows=pinfeed.rows.element_batches(store.lengths, max_tokens)",
    "pad_id": "the value of padded elements is padding=",
    "lengths": "give offsets: np.concatenate(([0], np.cumsum(lengths)))",
    "row_splits": "give them as offsets, the second argument",
}


class RaggedParts(NamedTuple):
    """The two arrays of a batch of ragged rows."""

    items: RunRows
    """Items that are still to be gathered."""
    bounds: npt.NDArray[np.signedinteger[Any]]
    """Offsets of the rows in the batch, shape (n + 1,), or lengths, shape (n,), if it is padded.

    A packed batch has its three other parts here, one after the other, int32.
    """


class PackedBatch(NamedTuple):
    """A batch of sequences, each with several rows; all numbers but the values are int32.

    ``values.flatten(0, 1)`` and ``cu_seqlens`` are arguments for attention of variable length. For
    a mask by document, compare ``document_ids``.
    """

    values: Any
    """Items, shape (n_sequences, length, *item_shape); padding is at the end of each sequence."""
    document_ids: Any
    """Number of the row of each item in the batch, shape (n_sequences, length); -1 for padding."""
    position_ids: Any
    """Position of each item in its row, shape (n_sequences, length), and in padding in the padding.

    A part of a row that was cut begins at 0.
    """
    cu_seqlens: Any
    """Bounds of all rows and paddings in the flattened batch, from 0 to its number of items."""


class RaggedStore:
    """Read-only rows of unequal length: row i is ``values[offsets[i]:offsets[i + 1]]``.

    A ``Feeder`` or a ``RowDataset`` accepts it as a source, alone or with other stores of as many
    rows. A batch of n rows depends on the ``layout``:

    - ``"offsets"``: ``(values, offsets)``, shapes (total, *item_shape) and (n + 1,).
    - ``"padded"``: ``(values, lengths)``, shapes (n, longest, *item_shape) and (n,).
    - ``"jagged"``: a ``torch.nested`` tensor of layout ``torch.jagged``.
    - ``"packed"``: a ``PackedBatch`` of sequences for attention by document. With
      ``rows=pinfeed.rows.packed(...)`` these have one length; otherwise all rows are one sequence.

    Offsets and lengths are int64.

    Args:
        values: Items of all rows, shape (n_items, *item_shape): a path, a pattern, an array, a CPU
            tensor or a Store. This store closes a file that it opened from a path.
        offsets: Position of each row in ``values``, followed by the end of the last row, shape
            (n_rows + 1,), non-decreasing integers: a path of a .npy file, an array, a CPU tensor,
            an ``h5py.Dataset`` or a ``zarr.Array``. Items before the first and after the last
            offset are in no row. For lengths, give ``np.concatenate(([0], np.cumsum(lengths)))``.
            The store copies the offsets into memory as int64, 8 bytes per row.
        layout: Form of the batches.
        padding: Value of the elements after the end of a row in a padded batch.

    Raises:
        StoreError: If a source cannot be read, or if offsets decrease or are out of range.
        ArgumentError: If ``layout`` or ``padding`` is invalid.

    Examples:
        >>> np.save("tokens.npy", np.arange(10))
        >>> np.save("offsets.npy", np.array([0, 3, 3, 10]))
        >>> with (
        ...     pinfeed.RaggedStore("tokens.npy", "offsets.npy", layout="padded") as store,
        ...     pinfeed.Feeder(store, batch_size=2) as feeder,
        ... ):
        ...     for tokens, lengths in feeder:
        ...         print(tuple(tokens.shape), lengths.tolist())
        (2, 3) [3, 0]
        (1, 7) [7]
    """

    writable = False

    @explain_arguments(_HINTS)
    def __init__(
        self,
        values: Any,
        offsets: Any,
        *,
        layout: Layout = "offsets",
        padding: complex = 0,
    ) -> None:
        if layout not in _LAYOUTS:
            raise ArgumentError(
                f"layout={layout!r}: expected 'offsets', 'padded', 'jagged' or 'packed'"
            )
        if isinstance(values, RaggedStore):
            raise StoreError("values is a RaggedStore; expected the items of its rows")
        self.layout: Layout = layout
        self.offsets = _read_offsets(offsets)
        """Position of each row in the items, then the end of the last row, shape (n_rows + 1,)."""
        self.n_rows = len(self.offsets) - 1
        """Number of rows."""
        self.items = _open_items(values)
        self._is_owner = self.items is not values
        self.n_items = self.items.n_rows
        """Number of items of ``values``, including items that are in no row."""
        self.item_shape = self.items.row_shape
        """Shape of one item; ``()`` if an item is a single number."""
        self.dtype = self.items.dtype
        """Dtype of the items."""
        try:
            _check_offsets(self.offsets, self.n_items)
            self.padding = _padding(padding, self.dtype)
            if layout == "jagged":
                # Imported here, because torch need not be loaded for numpy arrays.
                from pinfeed.tensors.numpy_torch import load_jagged

                load_jagged()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_arrow(
        cls, column: Any, *, layout: Layout = "offsets", padding: complex = 0
    ) -> RaggedStore:
        """Return the lists of an Arrow column as ragged rows; the items are not copied.

            store = RaggedStore.from_arrow(dataset.data.column("input_ids"))

        Call ``dataset.flatten_indices()`` first if a Hugging Face dataset was shuffled or filtered;
        otherwise, the rows are those of the unfiltered table.

        Args:
            column: Column of lists of numbers, without nulls: a pyarrow.ListArray, a
                LargeListArray, or a ChunkedArray of these.
            layout: As for the class.
            padding: As for the class.

        Raises:
            MissingDependency: If pyarrow is not installed.
            StoreError: If ``column`` is not a column of lists of numbers, has nulls, or has no
                items.
            ArgumentError: As for the class.
        """
        items, offsets = items_and_offsets(column)
        return cls(ArrowStore(items, name="from_arrow"), offsets, layout=layout, padding=padding)

    @classmethod
    def owning(cls, items: Store, offsets: Rows, like: RaggedStore) -> RaggedStore:
        """Return ragged rows that close the store of their items, in the form of other ones."""
        store = cls(items, offsets, layout=like.layout, padding=like.padding)
        store._is_owner = True
        return store

    @safe_repr
    def __repr__(self) -> str:
        return f"<RaggedStore: {self.n_rows:,} rows of {self.items!r}, {self.layout}>"

    def __enter__(self) -> RaggedStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def lengths(self) -> Rows:
        """Number of items of each row, shape (n_rows,), int64; a new array."""
        return np.diff(self.offsets)

    @property
    def mean_row_nbytes(self) -> float:
        """Mean bytes of a row."""
        return self.row_lengths.mean * row_nbytes(self.items)

    @property
    def resident_bytes(self) -> int:
        """Host memory of the offsets and of the items' store, in bytes."""
        return self.offsets.nbytes + self.row_lengths.nbytes + self.items.resident_bytes

    @functools.cached_property
    def row_lengths(self) -> RowLengths:
        """Numbers of rows of each length."""
        return RowLengths(self.lengths)

    def batch_nbytes(
        self, n_rows: int, *, copies: int | None, max_elements: int | None = None
    ) -> tuple[int, int]:
        """Return the most bytes that the two arrays of a batch may have.

        Args:
            n_rows: Number of rows of the batch.
            copies: Most occurrences of one row in the batch; None for any number.
            max_elements: Most elements of the batch, with padding; None for no limit.
        """
        if self.layout == "padded" or copies is None:
            elements = n_rows * self.row_lengths.longest
        else:
            elements = copies * self.row_lengths.most_elements(-(-n_rows // copies))
        if max_elements is not None:
            elements = min(elements, max_elements)
        bounds = (n_rows if self.layout == "padded" else n_rows + 1) * _INDEX_NBYTES
        if self.layout == "packed":
            # Each row may end a sequence, whose padding has a bound, too.
            bounds = (2 * elements + 2 * n_rows + 1) * _PACKED_NBYTES
        return elements * row_nbytes(self.items), bounds

    def usual_nbytes(self, n_rows: int) -> int:
        """Return a number of bytes that the items of few batches of random rows exceed.

        Args:
            n_rows: Number of rows of the batch.
        """
        elements = self.row_lengths.usual_elements(n_rows, padded=self.layout == "padded")
        return elements * row_nbytes(self.items)

    def batch_parts(self, gather: RunGather, rows: Rows, places: Places | None) -> RaggedParts:
        """Return ``parts`` of a batch in the layout of the store."""
        return self.parts(rows, gather, places=places)

    def parts(
        self,
        rows: Rows,
        gather: RunGather,
        layout: Layout | None = None,
        places: Places | None = None,
    ) -> RaggedParts:
        """Return the two arrays of a batch, the items still to be gathered.

        Args:
            rows: Row indices in range, shape (n,); they may repeat.
            gather: Function that gathers runs of the items.
            layout: Form of the batch; None uses the layout of the store.
            places: Parts of the rows to gather, and their places in sequences; None for whole rows.
        """
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        if places is not None:
            starts += places.begins
            lengths = places.lengths
        layout = layout or self.layout
        if layout == "packed":
            if places is None:
                ends = np.cumsum(lengths)
                total = int(lengths.sum())
                places = Places(np.zeros_like(rows), lengths, ends - lengths, (1, total))
            runs = Runs(starts, lengths, places.places)
            shape = (*places.shape, *self.item_shape)
            items = RunRows(gather, runs, shape, self.dtype, n_axes=2, padding=self.padding)
            return RaggedParts(items, places.documents())
        if layout == "padded":
            longest = int(lengths.max()) if len(lengths) else 0
            runs = Runs(starts, lengths, np.arange(len(rows)) * longest)
            shape = (len(rows), longest, *self.item_shape)
            items = RunRows(gather, runs, shape, self.dtype, n_axes=2, padding=self.padding)
            return RaggedParts(items, lengths)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        runs = Runs(starts, lengths, offsets[:-1])
        shape = (offsets.item(-1), *self.item_shape)
        return RaggedParts(RunRows(gather, runs, shape, self.dtype), offsets)

    def read(self, rows: Rows, layout: Layout | None = None) -> tuple[Array, Rows]:
        """Return the two arrays of a batch, as ``parts``, with the items gathered."""
        parts = self.parts(rows, run_gather(self.items), layout)
        out = np.empty(parts.items.shape, parts.items.dtype)
        parts.items.read(out)
        return out, parts.bounds

    def batch(self, items: Any, bounds: Any) -> Any:
        """Return a batch in the form of the layout, made of the tensors of its two arrays."""
        if self.layout == "packed":
            n_sequences, length = items.shape[:2]
            n = n_sequences * length
            document_ids, position_ids = bounds[: 2 * n].reshape(2, n_sequences, length)
            return PackedBatch(items, document_ids, position_ids, bounds[2 * n :])
        if self.layout != "jagged":
            return items, bounds
        from pinfeed.tensors.numpy_torch import jagged

        return jagged(items, bounds)

    def tensors(self, batch: Any) -> tuple[Any, Any]:
        """Return the tensors that a batch in the form of the layout was made of."""
        return (batch.values(), batch.offsets()) if self.layout == "jagged" else tuple(batch)

    def close(self) -> None:
        """Close the file of the items if this store opened it. Further calls do nothing."""
        if self._is_owner:
            self.items.close()


def _open_items(values: Any) -> Store:
    """Return the store of the items."""
    if is_store(values):
        return cast(Store, values)
    if isinstance(values, (list, tuple)):
        raise StoreError(
            f"values is a {type(values).__name__}; expected one array with the items of all rows; "
            "give np.concatenate(rows), and the offsets "
            "np.concatenate(([0], np.cumsum([len(row) for row in rows])))"
        )
    return open_store(values, "values")


def _read_offsets(offsets: Any) -> Rows:
    """Return a read-only copy of offsets, shape (n_rows + 1,), int64.

    Raises:
        StoreError: If they are not a 1-d array of at least two integers.
    """
    name = os.fspath(offsets) if isinstance(offsets, (str, os.PathLike)) else "offsets"
    store = open_store(np.asarray(offsets) if isinstance(offsets, list) else offsets, "offsets")
    try:
        if isinstance(store, ArrayStore):
            found = store.array
        else:
            found = np.empty((store.n_rows, *store.row_shape), store.dtype)
            run_gather(store)(Runs.one(0, store.n_rows), found)
    finally:
        store.close()
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) < 2:
        raise StoreError(
            f"{name}: shape {found.shape} of {found.dtype}; expected integers of shape "
            "(n_rows + 1,) for at least one row: the position of each row, and the end of the last"
        )
    if found.dtype == np.uint64 and found.max() > np.iinfo(np.int64).max:
        raise StoreError(f"{name}: offset {found.max()} is too large; expected at most 2**63 - 1")
    own: Rows = found.astype(np.int64)
    own.flags.writeable = False
    return own


def _check_offsets(offsets: Rows, n_items: int) -> None:
    """Raise StoreError unless offsets do not decrease and are in [0, n_items]."""
    decreases = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(decreases):
        i = int(decreases[0]) + 1
        raise StoreError(
            f"offsets[{i}] is {offsets[i]}, but offsets[{i - 1}] is {offsets[i - 1]}; expected "
            "offsets that do not decrease; for lengths, give np.concatenate(([0], "
            "np.cumsum(lengths)))"
        )
    if offsets[0] < 0:
        raise StoreError(f"offsets[0] is {offsets[0]}; expected at least 0")
    if offsets[-1] > n_items:
        i = int(np.searchsorted(offsets, n_items, side="right"))
        raise StoreError(
            f"offsets[{i}] is {offsets[i]}, but values has {n_items} items; expected offsets of "
            "at most the number of items; check that values and offsets match"
        )
    if offsets[0] > 0 and offsets.sum() == n_items:
        logger.warning(
            "offsets begins at %d, so %d of %d items are in no row, and its sum is the number of "
            "items, as if it held lengths. For lengths, give np.concatenate(([0], "
            "np.cumsum(lengths)))",
            offsets[0],
            n_items - (offsets[-1] - offsets[0]),
            n_items,
        )


def _padding(padding: Any, dtype: np.dtype[Any]) -> Any:
    """Return the padding as a number of a dtype.

    Raises:
        ArgumentError: If the dtype cannot represent this number.
    """
    number = np.zeros((), dtype)
    try:
        number[...] = padding
        has_it = np.ndim(padding) == 0 and (dtype.kind not in "iub" or bool(number == padding))
    except (TypeError, ValueError, OverflowError):
        has_it = False
    if not has_it:
        raise ArgumentError(f"padding={padding!r}: expected a number that {dtype} can represent")
    return cast(Any, number[()])
