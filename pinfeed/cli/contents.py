"""Contents: the arrays, columns and sparse matrices of a file, by its metadata."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.stores.paths import file_size

_ENCODED = ("data", "indices", "indptr")
"""Arrays of a sparse matrix."""
# Filters of HDF5 that change bytes without compressing them.
_SHUFFLE = 2
_FLETCHER32 = 3


@dataclass(frozen=True)
class Array:
    """A dataset of HDF5, an array of Zarr, or a column of Parquet, whose first axis is the rows.

    Attributes:
        name: Name in the file; empty for a Zarr array that is not in a group.
        shape: Shape; of a column that is not a source, only the number of rows.
        dtype: Dtype, or the Arrow type of a column that is not a source.
        nbytes: Size of the decoded values in bytes; None if they are Python objects.
        chunks: Shape of a chunk; None without chunks.
        shards: Shape of a shard; None without shards.
        compression: Names of the compressions, with commas; empty without one.
        problem: The reason why it cannot be a source, and what to do; empty if it can.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int | None
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compression: str = ""
    problem: str = ""


@dataclass(frozen=True)
class SparseMatrix:
    """A sparse matrix that AnnData wrote.

    Attributes:
        name: Name of its group in the file.
        shape: Number of rows and of columns.
        values: Values of its elements.
        nbytes: Size of the decoded values and columns of all elements in bytes.
        problem: The reason why it cannot be a source, and what to do; empty if it can.
    """

    name: str
    shape: tuple[int, ...]
    values: Array
    nbytes: int = 0
    problem: str = ""

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.values.shape)

    @property
    def mean_elements(self) -> float:
        """Mean number of elements of a row."""
        return self.n_elements / max(1, self.shape[0])


@dataclass
class Contents:
    """All parts of a file that have a name.

    Attributes:
        nbytes: Size of the file in bytes; None for a folder.
        arrays: Arrays or columns.
        matrices: Sparse matrices.
        groups: Number of rows, and size in bytes, of each row group of a Parquet file.
        matrix: Names of the columns of numbers, which can form a matrix.
        matrix_dtype: Dtype of this matrix; empty without columns.
    """

    nbytes: int | None = None
    arrays: list[Array] = field(default_factory=list)
    matrices: list[SparseMatrix] = field(default_factory=list)
    groups: list[tuple[int, int]] = field(default_factory=list)
    matrix: list[str] = field(default_factory=list)
    matrix_dtype: str = ""

    @property
    def problems(self) -> list[str]:
        """The reasons why parts cannot be sources."""
        found = [one.problem for one in self.arrays] + [one.problem for one in self.matrices]
        return [problem for problem in found if problem]

    @property
    def has_source(self) -> bool:
        """Whether at least one part can be a source."""
        return len(self.problems) < len(self.arrays) + len(self.matrices)

    def values(self, kind: str) -> dict[str, Any]:
        """Return the contents for scripts."""
        found: dict[str, Any] = {"arrays": [_array_values(one) for one in self.arrays]}
        if kind != "parquet":
            return found | {"matrices": [_matrix_values(one) for one in self.matrices]}
        rows, nbytes = zip(*self.groups, strict=True) if self.groups else ((), ())
        groups = {
            "count": len(rows),
            "most_rows": max(rows, default=0),
            "most_bytes": max(nbytes, default=0),
        }
        matrix = {"columns": self.matrix, "dtype": self.matrix_dtype} if self.matrix else None
        return found | {"rows": sum(rows), "row_groups": groups, "matrix": matrix}


def contents_of(path: str, kind: str, name: str | None) -> Contents:
    """Read what is in a file, or at one name of it.

    Args:
        path: The file.
        kind: ``hdf5``, ``zarr`` or ``parquet``.
        name: Name of a dataset, group or column, or columns with commas; None for all.

    Raises:
        PinfeedError: If the file or the name does not exist, or the file is damaged.
    """
    if kind == "parquet":
        return _parquet(path, name)
    from pinfeed.stores.hdf5 import HDF5Store, hdf5_root
    from pinfeed.stores.zarr import ZarrStore, zarr_root

    store: Any = HDF5Store if kind == "hdf5" else ZarrStore
    found = Contents(file_size(path) if kind == "hdf5" else None)
    root: AbstractContextManager[Any] = (hdf5_root if kind == "hdf5" else zarr_root)(path)
    with root as parent:
        item = parent
        # A Zarr array has nothing inside.
        if name is not None and (not hasattr(parent, "get") or (item := parent.get(name)) is None):
            # The store says which names exist.
            store(path, name).close()
        _add(found, name or "", item, store)
    return found


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name, with the byte order if it is not this machine's."""
    if dtype.isnative or dtype.names:
        return str(dtype)
    order = "big-endian" if dtype.str[0] == ">" else "little-endian"
    return f"{dtype.name}, {order}"


def _add(found: Contents, name: str, item: Any, store: Any) -> None:
    """Add an array, or everything in a group."""
    from pinfeed.stores.sparse_sources import is_matrix

    of_matrices: tuple[str, ...] = ()
    for inner, one in ((name, item), *_inside(item)):
        place = inner if one is item else "/".join(filter(None, (name, inner)))
        if place.startswith(of_matrices) and of_matrices:
            continue
        if hasattr(one, "shape"):
            found.arrays.append(_array(place, one, store))
        elif is_matrix(one.attrs):
            found.matrices.append(_sparse(place, one, store))
            of_matrices += (f"{place}/" if place else "",)


def _inside(group: Any) -> list[tuple[str, Any]]:
    """Return the names and objects in a group of h5py or zarr, and in its groups."""
    found: list[tuple[str, Any]] = []
    if hasattr(group, "visititems"):
        # This visits an object with several names only once, so cycles are no problem.
        group.visititems(lambda name, item: found.append((name, item)))
    elif hasattr(group, "members"):
        with warnings.catch_warnings():
            # zarr warns of files that are not a part of the group.
            warnings.simplefilter("ignore")
            found += sorted(group.members(max_depth=None))
    return found


def _array(name: str, array: Any, store: Any) -> Array:
    """Describe a dataset of h5py or an array of zarr."""
    dtype = np.dtype(array.dtype)
    shape = tuple(array.shape or ())
    problem = ""
    try:
        store(array).close()
    except StoreError as error:
        problem = str(error)
    return Array(
        name,
        shape,
        dtype_name(dtype),
        None if dtype.hasobject else math.prod(shape) * dtype.itemsize,
        array.chunks,
        getattr(array, "shards", None),
        ", ".join(_compressions(array)),
        problem,
    )


def _compressions(array: Any) -> Iterator[str]:
    """Yield the names of the compressions of a dataset or an array."""
    if hasattr(array, "compressors"):
        for codec in array.compressors:
            # Format 2 of Zarr has codecs of numcodecs.
            yield codec.codec_id if hasattr(codec, "codec_id") else codec.to_dict()["name"]
        return
    properties = array.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code, *_, name = properties.get_filter(number)
        if code not in (_SHUFFLE, _FLETCHER32):
            yield array.compression or name.decode(errors="replace") or f"filter {code}"


def _sparse(name: str, group: Any, store: Any) -> SparseMatrix:
    """Describe a sparse matrix."""
    from pinfeed.stores.sparse_sources import matrix_shape

    none = Array("", (0,), "", 0)
    parts = {part: _array(part, group[part], store) for part in _ENCODED if part in group}
    values, columns = (parts.get(part, none) for part in _ENCODED[:2])
    nbytes = (values.nbytes or 0) + (columns.nbytes or 0)
    try:
        shape = matrix_shape(group.attrs, name)
    except StoreError as error:
        return SparseMatrix(name, (), values, nbytes, str(error))
    problem = ""
    if len(parts) < len(_ENCODED):
        problem = f"{name} has {', '.join(parts) or 'nothing'}; expected {', '.join(_ENCODED)}"
    return SparseMatrix(name, shape, values, nbytes, problem or values.problem or columns.problem)


def _parquet(path: str, name: str | None) -> Contents:
    """Describe the columns of Parquet files, or some of them."""
    from pinfeed.stores.parquet_shards import open_shards, pyarrow_errors

    shards = open_shards(path)
    found = Contents(sum(os.path.getsize(shard.path) for shard in shards))
    with pyarrow_errors(path):
        for shard in shards:
            groups = map(shard.metadata.row_group, shard.groups)
            found.groups += [(group.num_rows, group.total_byte_size) for group in groups]
        n_rows = sum(n for n, _ in found.groups)
        names = shards[0].schema.names if name is None else name.split(",")
        dtypes = []
        for column in names:
            described, dtype = _column(shards, column, n_rows)
            found.arrays.append(described)
            if dtype is not None:
                found.matrix.append(column)
                dtypes.append(dtype)
    if dtypes:
        found.matrix_dtype = str(np.result_type(*dtypes))
    return found


def _column(shards: Sequence[Any], name: str, n_rows: int) -> tuple[Array, np.dtype[Any] | None]:
    """Describe a column; return also its dtype if it can be a column of a matrix."""
    from pinfeed.stores.parquet_columns import OneColumn, ParquetMatrix, compression, is_flat

    types = shards[0].schema
    kind = str(types.field(name).type) if types.names.count(name) == 1 else ""
    try:
        if not n_rows:
            raise StoreError(f"{shards[0].path} has no rows; expected at least one")
        flat = is_flat(shards, name)
        # The metadata does not contain the shape of lists, so this reads one of them.
        matrix = ParquetMatrix.of(shards, [name], None, None) if flat else None
        one = matrix or OneColumn.of(shards, name)
    except StoreError as error:
        return Array(name, (n_rows,), kind, None, problem=str(error)), None
    shape = (n_rows, *(() if flat else one.row_shape))
    nbytes = math.prod(shape) * one.dtype.itemsize
    codecs = compression(shards[0], name)
    array = Array(name, shape, str(one.dtype), nbytes, compression=codecs)
    return array, one.dtype if flat else None


def _array_values(one: Array) -> dict[str, Any]:
    values = asdict(one)
    values["bytes"] = values.pop("nbytes")
    return values


def _matrix_values(one: SparseMatrix) -> dict[str, Any]:
    return {
        "name": one.name,
        "shape": one.shape,
        "dtype": one.values.dtype,
        "elements": one.n_elements,
        "elements_per_row": one.mean_elements if one.shape else None,
        "chunks": one.values.chunks,
        "compression": one.values.compression,
        "bytes": one.nbytes,
        "problem": one.problem,
    }
