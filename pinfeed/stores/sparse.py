"""SparseStore: rows of a sparse matrix of scipy, torch, or a group of arrays in a file."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.memory.pages import BufferPool, huge
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Places
from pinfeed.stores.formats import FORMATS, ArrayFormat, FileFormat, Part, register
from pinfeed.stores.host_rows import CheckStop, FunctionPart, RunGather, UnreadPart
from pinfeed.stores.libraries import listed
from pinfeed.stores.ragged import RaggedParts, RaggedStore
from pinfeed.stores.store import Array, Store, whole_numbers
from pinfeed.tensors.argument_types import Source
from pinfeed.validation.arguments import check_choice, explain_arguments

_PARTS = ("data", "indices", "indptr")
# Names of the format and of the shape: of AnnData since 0.7, and before.
_FORMATS = (("encoding-type", "shape"), ("h5sparse_format", "h5sparse_shape"))
# Most free blocks of memory for dense batches.
_N_SPARE = 4

_HINTS = {
    "layer layers": 'give the layer as key: SparseStore(path, "layers/counts")',
    "name dataset group": "the name of the matrix in its file is key=",
    "dense to_dense": 'give layout="dense"',
    "shape": "the shape is that of the matrix; leave it out",
}


class SparseStore(RaggedStore):
    """Read-only rows of a sparse matrix in CSR format, in memory or in an AnnData file.

    A ``Feeder`` or a ``RowDataset`` accepts it as a source, alone or with other stores of as many
    rows. A batch of n rows depends on the ``layout``:

    - ``"csr"``: a ``torch.sparse_csr`` tensor, shape (n, n_columns).
    - ``"dense"``: a dense tensor, shape (n, n_columns). Only the elements of the matrix are copied
      to the device. The thread of ``device_transform`` makes them dense there, or on the host for a
      ``host_transform``. As with these, batches cannot be written back.

    It is a RaggedStore, whose row lengths are the numbers of elements of the rows. So
    ``pinfeed.rows.element_batches(store.lengths, ...)`` bounds the elements of batches.

    Args:
        source: A ``scipy.sparse`` matrix or array in CSR format, a ``torch.sparse_csr`` tensor on
            the CPU, the path of an .h5ad or another HDF5 file, the path or URL of a Zarr group, or
            an open ``h5py.Group`` or ``zarr.Group``, which the caller closes.
        key: Name of the matrix in a file, such as ``"X"`` or ``"layers/counts"``, as AnnData writes
            it: a group with ``data``, ``indices`` and ``indptr``. By default, it is ``"X"`` in a
            file, and an open group is the matrix itself.
        layout: Form of the batches.

    Raises:
        MissingDependency: If the library of the file is not installed.
        FileMissing: If the file does not exist.
        StoreError: If the source has no sparse matrix in CSR format, the matrix has no elements, or
            its parts do not match.
        ArgumentError: If ``layout`` is invalid, or ``key`` is given for a matrix in memory.

    Examples:
        >>> matrix = torch.eye(5).to_sparse_csr()
        >>> store = pinfeed.SparseStore(matrix, layout="dense")
        >>> with pinfeed.Feeder(store, batch_size=2) as feeder:
        ...     print(next(iter(feeder)).tolist())
        [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]]
    """

    @explain_arguments(_HINTS)
    def __init__(
        self, source: Source, key: str | None = None, *, layout: Literal["csr", "dense"] = "csr"
    ) -> None:
        check_choice(layout, "layout", ("csr", "dense"))
        matrix = open_matrix(source, key)
        with contextlib.ExitStack() as stack:
            for store in matrix.owned:
                stack.callback(store.close)
            try:
                self._fill(matrix, layout)
            except StoreError as error:
                raise StoreError(f"{matrix.place}: {error}") from error
            stack.pop_all()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _memory=BufferPool(_N_SPARE, huge))

    def _fill(self, matrix: Matrix, layout: str) -> None:
        """Make the ragged rows of the values and the columns."""
        self._place = matrix.place
        # Memory of dense batches on the host, for reuse: new memory costs more than to fill it.
        self._memory = BufferPool(_N_SPARE, huge)
        parts = dict(zip(("values", "columns"), matrix.parts, strict=True))
        super().__init__(parts, matrix.offsets)
        self.layout = layout  # type: ignore[assignment]  # the base has other layouts
        self._is_dense = layout == "dense"
        self.n_columns = matrix.n_columns
        """Number of columns of the matrix."""
        columns = self.parts[1].dtype
        if columns.kind not in "iu" or columns == np.uint64:
            raise StoreError(
                f"the columns of the matrix are {columns}; expected integers such as int32; write "
                "the matrix with indices.astype('int32')"
            )
        self._index = np.dtype(np.int32 if columns.itemsize < 4 else columns)
        if columns == np.uint32:
            self._index = np.dtype(np.int64)
        self._converts = self._index != columns
        # Imported here, because torch need not be loaded for numpy arrays.
        from pinfeed.tensors.csr import load_csr

        load_csr()
        self.own(matrix.owned)

    def __repr__(self) -> str:
        shape = f"{self.n_rows:,} x {self.n_columns:,}"
        return f"<SparseStore: {shape}, {self.parts[0].dtype}, {self.layout}>"

    @property
    def form(self) -> str:
        return f"layout={self.layout!r} and {self.n_columns} columns"

    @property
    def made_row_nbytes(self) -> int:
        if self._is_dense:
            return self.n_columns * self.parts[0].dtype.itemsize
        return math.ceil(self.row_lengths.mean * self._index.itemsize) if self._converts else 0

    def joined(self, parts: Sequence[Store], offsets: Rows) -> SparseStore:
        store = SparseStore.__new__(SparseStore)
        store._fill(Matrix(self._place, parts, offsets, self.n_columns, parts), self.layout)
        return store

    def batch_parts(
        self,
        gathers: Sequence[RunGather],
        rows: Rows,
        places: Places | None = None,
        layout: Any = None,
    ) -> RaggedParts:
        """Return the values and the columns of a batch, still to be gathered, and its bounds."""
        (values, columns), bounds = super().batch_parts(gathers, rows, places, "offsets")
        if bounds[-1] > np.iinfo(self._index).max:
            raise StoreError(
                f"{self._place}: {len(rows):,} rows of a batch have {bounds[-1]:,} elements; "
                f"expected at most {np.iinfo(self._index).max:,}; give smaller batches"
            )
        # torch requires one dtype for the columns and the bounds.
        read = functools.partial(self._read_columns, columns)
        checked = FunctionPart(columns.shape, columns.dtype, read)
        return RaggedParts([values, checked], bounds.astype(self._index))

    def _read_columns(self, columns: UnreadPart, out: Array, check_stop: CheckStop) -> None:
        """Gather the columns of the elements of a batch, and refuse those out of range.

        torch does not check them, and would read or write other memory.
        """
        columns.read(out, check_stop)
        if len(out) and (out.min() < 0 or out.max() >= self.n_columns):
            wrong = out[(out < 0) | (out >= self.n_columns)][0]
            raise StoreError(
                f"{self._place}: an element of the batch has column {wrong}; expected at least 0 "
                f"and less than {self.n_columns}; check where the matrix is from"
            )

    def batch(self, tensors: Iterator[Any]) -> Any:
        """Return a batch in the form of the layout, made of its tensors."""
        values, columns, bounds = (next(tensors) for _ in range(3))
        if self._is_dense:
            return self._dense(values, columns, bounds)
        from pinfeed.tensors.csr import csr

        return csr(values, columns.to(bounds.dtype), bounds, self.n_columns)

    def tensors(self, leaves: Iterator[Any]) -> list[Any]:
        """Return the tensors of which a sparse batch was made, given its leaves."""
        from pinfeed.tensors.csr import parts_of_csr

        return parts_of_csr(next(leaves))

    def samples(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the rows of a batch, each a dense tensor of shape (n_columns,)."""
        return list(self._dense(*tensors))

    def close(self) -> None:
        """Close the files of the matrix that this store opened. Further calls do nothing."""
        super().close()
        self._memory.close()

    def _dense(self, values: Any, columns: Any, bounds: Any) -> Any:
        """Return the rows of a batch as a dense tensor, on the device of its tensors."""
        from pinfeed.tensors.csr import dense

        take = self._memory.take if values.device.type == "cpu" else None
        return dense(values, columns, bounds, self.n_columns, take)


@register
class SparseFormat(FileFormat):
    """Sparse matrices in groups of arrays, as AnnData writes them."""

    kind = "sparse"
    usage = "SparseStore(path, name) reads a sparse matrix"
    store = SparseStore

    def part_of(self, path: str, name: str, group: Any) -> Part | None:
        if not is_matrix(group.attrs):
            return None
        try:
            with contextlib.closing(SparseStore(group)) as store:
                shape = (store.n_rows, store.n_columns)
                nbytes = round(store.n_rows * store.mean_row_nbytes)
                stored = f"sparse, {store.row_lengths.mean:,.1f} elements per row"
                dtype = str(store.parts[0].dtype)
                return Part(path, self.kind, name, shape, dtype, nbytes, stored)
        except StoreError as error:
            return Part(path, self.kind, name, problem=str(error))


class Matrix(NamedTuple):
    """The arrays of a sparse matrix in CSR format."""

    place: str
    """The file and the group of the matrix, or its type, for errors."""
    parts: Sequence[Any]
    """Values and columns of its elements, row by row."""
    offsets: Any
    n_columns: int
    owned: Sequence[Store] = ()
    """Stores that were opened for the parts."""


def open_matrix(source: Any, key: str | None) -> Matrix:
    """Return a sparse matrix, as ``SparseStore`` takes it.

    Raises:
        ArgumentError: If ``key`` is given for a matrix in memory.
        StoreError: If the source has no sparse matrix in CSR format.
    """
    package = type(source).__module__.partition(".")[0]
    formats = [one for one in FORMATS.values() if isinstance(one, ArrayFormat)]
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        named = [one for one in formats if path.endswith(one.suffixes)]
        alike = [one for one in formats if one.is_one_file == os.path.isfile(path)]
        return _from_group(path, "X" if key is None else key, (named or alike)[0])
    if hasattr(source, "keys"):
        for one in formats:
            if one.library == package:
                return _from_group(source, key, one)
    if key is not None:
        raise ArgumentError(
            f"key={key!r} with a {type(source).__name__}; a key names a matrix in a file; leave "
            "key out"
        )
    if package == "torch":
        return _from_torch(source)
    if all(hasattr(source, name) for name in (*_PARTS, "shape", "format")):
        kind = type(source).__name__
        _require_csr(source.format, kind, "matrix.tocsr()")
        # scipy permits arrays that are longer than the matrix.
        n = int(source.indptr[-1])
        parts = (source.data[:n], source.indices[:n])
        _require_parts(f"the {kind}", source.shape, (*parts, source.indptr))
        return Matrix(f"the {kind}", parts, source.indptr, source.shape[1])
    advice = "give matrix.tocsr()" if hasattr(source, "tocsr") else "give a dense array as it is"
    if hasattr(source, "X") and hasattr(source, "obs"):
        advice = "give adata.X, or the path of its file"
    raise StoreError(
        f"source is a {type(source).__name__}; expected a scipy.sparse matrix in CSR format, a "
        f"torch.sparse_csr tensor, the path of an .h5ad file or a Zarr group, or an open group; "
        f"{advice}"
    )


def _from_torch(tensor: Any) -> Matrix:
    """Return the parts of a sparse CSR tensor."""
    layout = str(getattr(tensor, "layout", type(tensor).__name__)).removeprefix("torch.sparse_")
    _require_csr(layout, "tensor", "tensor.to_sparse_csr(), or a dense tensor as it is")
    if tensor.ndim != 2 or tensor.values().ndim != 1:
        raise StoreError(
            f"source has shape {tuple(tensor.shape)}; expected a matrix; give its slices to "
            "pinfeed.concat"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    parts = (tensor.values(), tensor.col_indices())
    _require_parts("the tensor", tensor.shape, (*parts, tensor.crow_indices()))
    return Matrix("the tensor", parts, tensor.crow_indices(), tensor.shape[1])


def _from_group(source: Any, key: str | None, kind: ArrayFormat) -> Matrix:
    """Return the matrix of a group of a file, and open its arrays.

    Args:
        source: Path of the file, or an open group.
        key: Name of the group in it; None for the open group itself.
        kind: Format of the file.
    """
    opener = kind.store.__name__
    with kind.open_group(source, key) as (parent, path):
        group = _group_of(parent, key, path, opener)
        is_path = isinstance(source, (str, os.PathLike))
        place = f"{os.fspath(source) if is_path else path}:{group.name}"
        attributes = dict(group.attrs)
        if not is_matrix(attributes):
            raise StoreError(
                f"{place} is not a sparse matrix; expected a group with the attributes "
                f"encoding-type and shape, as AnnData writes it; the group has "
                f"{listed(sorted(group.keys()))}; for an array in it, give "
                f"{opener}(path, name)"
            )
        shape = matrix_shape(attributes, place)
        missing = [name for name in _PARTS if name not in group]
        if missing:
            raise StoreError(
                f"{place} has no {', '.join(missing)}; expected data, indices and indptr, as "
                "AnnData writes a sparse matrix"
            )
        offsets = group["indptr"][()]
        arrays = {name: group[name] for name in _PARTS[:2]}
        _require_parts(place, shape, (*arrays.values(), offsets))
        with contextlib.ExitStack() as stack:
            stores: list[Store] = []
            for name, array in arrays.items():
                store = kind.open(source, f"{key}/{name}") if is_path else kind.store(array)
                stack.callback(store.close)
                stores.append(store)
            stack.pop_all()
    return Matrix(place, stores, offsets, shape[1], stores)


def _group_of(parent: Any, key: str | None, path: str, store: str) -> Any:
    """Return the group of a name in an open group; by default, the open group itself.

    Raises:
        StoreError: If there is no such group.
    """
    found = parent if key is None else parent.get(key)
    if found is None:
        raise StoreError(
            f"{path} has no {key!r}; expected the name of a sparse matrix, such as 'X' or "
            f"'layers/counts'; it has {listed(sorted(parent.keys()))}"
        )
    if not hasattr(found, "keys"):
        raise StoreError(
            f"{path}: {key!r} is a dense array; expected a group with a sparse matrix; give "
            f"{store}(path, {key!r})"
        )
    return found


def is_matrix(attributes: Mapping[str, Any]) -> bool:
    """Return whether a group with these attributes is a sparse matrix, in CSR format or not."""
    return any(name in attributes and shape in attributes for name, shape in _FORMATS)


def matrix_shape(attributes: Mapping[str, Any], place: str) -> tuple[int, ...]:
    """Return the shape of the matrix of a group, given the attributes of the group.

    Raises:
        StoreError: If the matrix is not in CSR format.
    """
    name, shape = next(one for one in _FORMATS if all(part in attributes for part in one))
    found = str(attributes[name]).removesuffix("_matrix")
    _require_csr(found, place, "the matrix as adata.X.tocsr(), and write the file again")
    return whole_numbers(tuple(attributes[shape]), place)


def _require_parts(place: str, shape: Sequence[int], parts: Sequence[Any]) -> None:
    """Check that the parts of a matrix have the sizes that its shape and its offsets need.

    Args:
        place: Name of the matrix in errors.
        shape: Shape of the matrix.
        parts: Its data, indices and indptr.

    Raises:
        StoreError: If they do not, or if the matrix has no elements.
    """
    indptr = parts[-1]
    n = int(indptr[-1]) if indptr.ndim == 1 and len(indptr) else 0
    expected = ((n,), (n,), (shape[0] + 1,)) if len(shape) == 2 else ()
    sizes = tuple(tuple(part.shape) for part in parts)
    if sizes != expected or indptr[0] != 0:
        found = ", ".join(f"{name} {size}" for name, size in zip(_PARTS, sizes, strict=True))
        raise StoreError(
            f"{place}: shape {tuple(shape)} does not match {found}, whose offsets end at {n}; "
            "expected indptr of one more than the rows, from 0 to the length of data and indices; "
            "write the matrix again"
        )
    if not n:
        raise StoreError(
            f"{place} has no elements other than zero; expected at least one; leave the matrix out"
        )


def _require_csr(found: str, place: str, todo: str) -> None:
    if found != "csr":
        raise StoreError(
            f"{place} is in the format {found}; expected csr, in which rows are contiguous; give "
            f"{todo}"
        )
