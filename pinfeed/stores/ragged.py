"""RaggedStore: rows of unequal length, as ranges of the items of a store."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.row_lengths import RowLengths
from pinfeed.rows.runs import Places, Runs
from pinfeed.stores.arrow import ArrowStore, items_and_offsets
from pinfeed.stores.host_rows import RunGather, RunRows, UnreadPart, run_gather
from pinfeed.stores.ragged_parts import ItemParts, check_offsets, read_offsets
from pinfeed.stores.store import Array, ClosedOnExit, Store, row_nbytes
from pinfeed.tensors.argument_types import ArrowColumn, Source
from pinfeed.validation.arguments import check_choice, explain_arguments

Layout = Literal["offsets", "padded", "jagged", "packed"]


_HINTS = {
    "data": "the items are the first positional argument",
    "pad_value padding_value pad_id": "the value of padded elements is padding=",
    "max_tokens": "give the Feeder rows=pinfeed.rows.element_batches(store.lengths, max_tokens)",
    "lengths": "give offsets: np.concatenate(([0], np.cumsum(lengths)))",
    "row_splits": "give them as offsets, the second argument",
}


class RaggedParts(NamedTuple):
    """The arrays of a batch of ragged rows."""

    items: Sequence[UnreadPart]
    """Items of each part that are still to be gathered."""
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
    """Items, shape (n_sequences, length, *item_shape); padding is at the end of each sequence.

    Several parts that share offsets have the structure in which they were given.
    """
    document_ids: Any
    """Number of the row of each item in the batch, shape (n_sequences, length); -1 for padding."""
    position_ids: Any
    """Position of each item in its row, shape (n_sequences, length).

    The positions of a part of a row that was cut, and those of padding, count from 0.
    """
    cu_seqlens: Any
    """Bounds of all rows and paddings in the flattened batch, from 0 to its number of items."""


class RaggedStore(ClosedOnExit):
    """Read-only rows of unequal length: row i is ``values[offsets[i]:offsets[i + 1]]``.

    A ``Feeder`` or a ``RowDataset`` accepts it as a source, alone or with other stores of as many
    rows. A batch of n rows depends on the ``layout``:

    - ``"offsets"``: ``(values, offsets)``, shapes (total, *item_shape) and (n + 1,).
    - ``"padded"``: ``(values, lengths)``, shapes (n, longest, *item_shape) and (n,).
    - ``"jagged"``: a ``torch.nested`` tensor of layout ``torch.jagged``.
    - ``"packed"``: a ``PackedBatch`` of sequences for attention by document. With
      ``rows=pinfeed.rows.packed(...)`` these have one length; otherwise all rows are one sequence.

    Offsets and lengths are int64. Several parts of one length, such as the columns of a tokenized
    data set, share their offsets: give them as a dict, and ``values`` is a dict in each batch. With
    ``"jagged"``, the batch is a dict of nested tensors with the same offsets.

    Args:
        values: Items of all rows, shape (n_items, *item_shape): a path, a pattern, an array, a CPU
            tensor or a Store. It may also be a dict or another structure of these, all with the
            same number of items. This store closes files that it opened from paths.
        offsets: Position of each row in ``values``, followed by the end of the last row, shape
            (n_rows + 1,), non-decreasing integers: a path of a .npy file, an array, a CPU tensor,
            an ``h5py.Dataset`` or a ``zarr.Array``. Items before the first and after the last
            offset are in no row. For lengths, give ``np.concatenate(([0], np.cumsum(lengths)))``.
            The store copies the offsets into memory as int64, 8 bytes per row.
        layout: Form of the batches.
        padding: Value of the elements after the end of a row in a padded batch. For different
            values, give them in the structure of ``values``.

    Raises:
        StoreError: If a source cannot be read, if parts have different numbers of items, or if
            offsets decrease or are out of range.
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

    # It is one class, because the layout decides the arrays and the tensors of a batch.
    writable = False

    @explain_arguments(_HINTS)
    def __init__(
        self,
        values: Source,
        offsets: Source,
        *,
        layout: Layout = "offsets",
        padding: complex | Mapping[Any, Any] = 0,
    ) -> None:
        check_choice(layout, "layout", get_args(Layout))
        self.layout: Layout = layout
        with contextlib.ExitStack() as stack:
            self.offsets = read_offsets(offsets)
            """Position of each row in the items, and the end of the last, shape (n_rows + 1,)."""
            self.n_rows = len(self.offsets) - 1
            """Number of rows."""
            self.item_parts = stack.enter_context(ItemParts(values))
            self._owned = [self.item_parts]
            self.parts = self.item_parts.stores
            """Stores of the items, one for each part."""
            self.paths_of_parts = self.item_parts.paths
            """Path of each part in the structure of the parts."""
            self.n_items = self.parts[0].n_rows
            """Number of items of ``values``, including items that are in no row."""
            check_offsets(self.offsets, self.n_items)
            self.paddings = self.item_parts.paddings(padding)
            """Value of padded elements of each part."""
            self.items = self.structure(self.parts)
            """Store of the items; several parts have the structure in which they were given."""
            self.item_shape = self.structure(part.row_shape for part in self.parts)
            """Shape of one item, ``()`` if it is a number; several parts as for ``items``."""
            self.dtype = self.structure(part.dtype for part in self.parts)
            """Dtype of the items; several parts as for ``items``."""
            self.padding = self.structure(self.paddings)
            """Value of padded elements; several parts as for ``items``."""
            if layout == "jagged":
                # Imported here, because torch need not be loaded for numpy arrays.
                from pinfeed.tensors.numpy_torch import load_jagged

                load_jagged()
            stack.pop_all()

    @classmethod
    def from_arrow(
        cls,
        column: ArrowColumn | Mapping[str, ArrowColumn],
        *,
        layout: Layout = "offsets",
        padding: complex | Mapping[Any, Any] = 0,
    ) -> RaggedStore:
        """Return the lists of an Arrow column as ragged rows; the items are not copied.

            store = RaggedStore.from_arrow(dataset.data.column("input_ids"))

        Columns whose lists have the same lengths share their offsets:

            store = RaggedStore.from_arrow(dataset.data.select(["input_ids", "attention_mask"]))

        Call ``dataset.flatten_indices()`` first if a Hugging Face dataset was shuffled or filtered;
        otherwise, the rows are those of the unfiltered table.

        Args:
            column: Column of lists of numbers, without nulls: a pyarrow.ListArray, a
                LargeListArray, or a ChunkedArray of these. A table, or a dict of columns, has
                several parts.
            layout: As for the class.
            padding: As for the class.

        Raises:
            MissingDependency: If pyarrow is not installed.
            StoreError: If ``column`` is not a column of lists of numbers, has nulls, or has no
                items, or if the lists of several columns have different lengths.
            ArgumentError: As for the class.
        """
        values, offsets = _arrow_parts(column)
        return cls(values, offsets, layout=layout, padding=padding)

    def __repr__(self) -> str:
        return f"<RaggedStore: {self.n_rows:,} rows of {self.items!r}, {self.layout}>"

    @property
    def lengths(self) -> Rows:
        """Number of items of each row, shape (n_rows,), int64; a new array."""
        return np.diff(self.offsets)

    def structure(self, values: Iterable[Any]) -> Any:
        """Return values, one for each part, in the structure in which the parts were given."""
        return self.item_parts.structure(iter(values))

    @property
    def form(self) -> str:
        """Words that are equal for stores whose rows ``concat`` may join."""
        return f"layout={self.layout!r} and padding={self.padding}"

    @property
    def made_row_nbytes(self) -> int:
        """Bytes per row of new memory that ``batch`` takes; 0 if batches have the given memory."""
        return 0

    @property
    def mean_row_nbytes(self) -> float:
        """Mean bytes of a row of all parts."""
        return self.row_lengths.mean * sum(map(row_nbytes, self.parts))

    @property
    def resident_bytes(self) -> int:
        """Host memory of the offsets and of the stores of the items, in bytes."""
        parts = sum(part.resident_bytes for part in self.parts)
        return self.offsets.nbytes + self.row_lengths.nbytes + parts

    @functools.cached_property
    def row_lengths(self) -> RowLengths:
        """Numbers of rows of each length."""
        return RowLengths(self.lengths)

    def own(self, stores: Iterable[Store]) -> None:
        """Close stores of the items together with this store."""
        self._owned = [*self._owned, *stores]

    def joined(self, parts: Sequence[Store], offsets: Rows) -> RaggedStore:
        """Return rows of other items in the form of these, which close the stores of the items."""
        items = self.structure(parts)
        store = RaggedStore(items, offsets, layout=self.layout, padding=self.padding)
        store.own(parts)
        return store

    def batch_parts(
        self,
        gathers: Sequence[RunGather],
        rows: Rows,
        places: Places | None = None,
        layout: Layout | None = None,
    ) -> RaggedParts:
        """Return the arrays of a batch, the items still to be gathered.

        Args:
            gathers: Functions that gather runs of the items of each part.
            rows: Row indices in range, shape (n,); they may repeat.
            places: Parts of the rows to gather, and their places in sequences; None for whole rows.
            layout: Form of the batch; None uses the layout of the store.
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
            return RaggedParts(self._items(gathers, runs, places.shape), places.documents())
        if layout == "padded":
            longest = int(lengths.max()) if len(lengths) else 0
            runs = Runs(starts, lengths, np.arange(len(rows)) * longest)
            return RaggedParts(self._items(gathers, runs, (len(rows), longest)), lengths)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        runs = Runs(starts, lengths, offsets[:-1])
        return RaggedParts(self._items(gathers, runs, (offsets.item(-1),)), offsets)

    def _items(
        self, gathers: Sequence[RunGather], runs: Runs, shape: tuple[int, ...]
    ) -> list[RunRows]:
        """Return runs of the items of each part, with elements to pad if ``shape`` has two axes."""
        n_axes = len(shape)
        paddings = self.paddings if n_axes == 2 else [None] * len(self.parts)
        return [
            RunRows(gather, runs, (*shape, *part.row_shape), part.dtype, n_axes, padding)
            for gather, part, padding in zip(gathers, self.parts, paddings, strict=True)
        ]

    def read_parts(self, rows: Rows, layout: Layout | None = None) -> list[Array]:
        """Return the arrays of a batch: the items of each part, gathered, and the bounds."""
        gathers = [run_gather(part) for part in self.parts]
        parts = self.batch_parts(gathers, rows, layout=layout)
        found = []
        for items in parts.items:
            out = np.empty(items.shape, items.dtype)
            items.read(out)
            found.append(out)
        return [*found, parts.bounds]

    def read(self, rows: Rows, layout: Layout | None = None) -> tuple[Any, Rows]:
        """Return the items of a batch, in the structure of the parts, and the bounds."""
        *items, bounds = self.read_parts(rows, layout)
        return self.structure(items), bounds

    def batch(self, tensors: Iterator[Any]) -> Any:
        """Return a batch in the form of the layout, made of the tensors of its arrays."""
        items = [next(tensors) for _ in self.parts]
        bounds = next(tensors)
        if self.layout == "jagged":
            from pinfeed.tensors.numpy_torch import jagged

            return self.structure(jagged(one, bounds) for one in items)
        values = self.structure(items)
        if self.layout == "packed":
            # The first part has the shape of all.
            n_sequences, length = items[0].shape[:2]
            n = n_sequences * length
            document_ids, position_ids = bounds[: 2 * n].reshape(2, n_sequences, length)
            return PackedBatch(values, document_ids, position_ids, bounds[2 * n :])
        return values, bounds

    def tensors(self, leaves: Iterator[Any]) -> list[Any]:
        """Return the tensors of which a batch was made, given its leaves."""
        if self.layout != "jagged":
            return [next(leaves) for _ in range(len(self.parts) + 1)]
        nested = [next(leaves) for _ in self.parts]
        return [*(one.values() for one in nested), nested[0].offsets()]

    def samples(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the rows of a batch with offsets, in the structure of the parts."""
        *items, offsets = tensors
        rows = [part.tensor_split(offsets[1:-1]) for part in items]
        return [self.structure(parts) for parts in zip(*rows, strict=True)]


def _arrow_parts(column: Any) -> tuple[Any, Rows]:
    """Return the items of a column of lists, or of each column of a table, and their offsets."""
    if hasattr(column, "column_names") and hasattr(column, "column"):
        column = {name: column.column(name) for name in column.column_names}
    if not isinstance(column, Mapping):
        items, offsets = items_and_offsets(column)
        return ArrowStore(items, name="from_arrow"), offsets
    if not column:
        raise StoreError("from_arrow: got no columns; expected at least one column of lists")
    found = {name: items_and_offsets(one) for name, one in column.items()}
    first, *others = found
    expected = found[first][1]
    for name in others:
        _require_same_lengths(str(first), expected, str(name), found[name][1])
    stores = {name: ArrowStore(items, name=str(name)) for name, (items, _) in found.items()}
    return stores, expected


def _require_same_lengths(first: str, expected: Rows, name: str, offsets: Rows) -> None:
    """Raise StoreError unless the lists of two Arrow columns have the same lengths."""
    if np.array_equal(expected, offsets):
        return
    n = min(len(expected), len(offsets))
    different = np.flatnonzero(expected[:n] != offsets[:n])
    row = int(different[0]) - 1 if len(different) else n - 1
    raise StoreError(
        f"from_arrow: {name} and {first} have other lists from row {row} on; expected equally many "
        "lists, of the same lengths; give columns of other lengths as a RaggedStore each"
    )
