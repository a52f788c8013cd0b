"""Sources of sparse matrices: scipy, torch, and groups of arrays in files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores.formats import FORMATS, ArrayFormat
from pinfeed.stores.libraries import listed
from pinfeed.stores.store import Store, whole_numbers

_PARTS = ("data", "indices", "indptr")
# Names of the format and of the shape: of AnnData since 0.7, and before.
_FORMATS = (("encoding-type", "shape"), ("h5sparse_format", "h5sparse_shape"))


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
