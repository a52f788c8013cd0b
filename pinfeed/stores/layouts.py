"""Layouts of the rows of files: raw files, flat files of items, and safetensors files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError, described
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.libraries import imported, listed
from pinfeed.stores.npy_header import MAGIC, read_header, strange
from pinfeed.stores.paths import file_size
from pinfeed.stores.store import whole_numbers
from pinfeed.tensors.dtypes import BFLOAT16, dtype_of, numpy_dtype_of
from pinfeed.validation.arguments import whole_number
from pinfeed.validation.suggestions import of_file

_DTYPES: dict[str, np.dtype[Any]] = {"BF16": BFLOAT16} | {
    # The format is little-endian.
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "C64": "<c8",
    }.items()
}
# Most tensor names that an error lists; a model may have thousands.
_MAX_NAMES = 20


def raw_layout(path: str, shape: Sequence[int], dtype: npt.DTypeLike, offset: int) -> RowLayout:
    """Return the layout of the rows that begin after ``offset`` bytes of a file.

    Args:
        path: The file.
        shape: Shape (n_rows, *row_shape); an n_rows of -1 stands for all rows of the file.
        dtype: Dtype of the items, as numpy or torch spells it.
        offset: Bytes before the first row.

    Raises:
        FileMissing: If there is no such file.
        StoreError: If the shape or the offset is invalid, the file is truncated, n_rows is -1 and
            the file does not end with a whole row, or torch does not have the dtype.
    """
    items = numpy_dtype_of(dtype, path)
    size = file_size(path)
    n_rows, *row_shape = whole_numbers(shape, path)
    if type(offset) is bool or not hasattr(offset, "__index__"):
        raise StoreError(f"{path}: offset={offset!r}; expected a whole number of bytes")
    if n_rows < -1 or min(row_shape, default=0) < 0 or offset < 0:
        raise StoreError(
            f"{path}: shape={shape}, offset={offset}; expected (n_rows, ...), or (-1, ...) for "
            "all rows of the file"
        )
    row_nbytes = items.itemsize * math.prod(row_shape)
    if not row_nbytes:
        raise StoreError(
            f"{path}: shape={shape} of {items} has rows of 0 bytes; expected at least 1 on each "
            "axis"
        )
    if n_rows == -1:
        n_rows, rest = divmod(max(0, size - offset), row_nbytes)
        if rest:
            raise StoreError(
                f"{path}: {size} bytes minus offset={offset} are {n_rows} rows of {row_nbytes} "
                f"bytes and {rest} more bytes; expected whole rows; give the shape, dtype and "
                "offset that the file was written with, or the number of rows"
            )
    return RowLayout(path, items, n_rows, tuple(row_shape), int(offset)).check(size)


def series_layout(path: str, dtype: npt.DTypeLike | None, offset: int) -> RowLayout:
    """Return the layout of the items of a .npy file, or of a flat file without a header.

    A file with the signature of a .npy file is read as one. Any other file needs a dtype.

    Args:
        path: The file.
        dtype: Dtype of the items; None takes the dtype from the header of a .npy file.
        offset: Bytes before the first item of a file without a header.

    Raises:
        FileMissing: If there is no such file.
        ArgumentError: If ``offset`` is given for a .npy file, or is negative.
        StoreError: If the file has neither a header nor a dtype, is named .npy and is not a .npy
            file, or cannot be read, or if its items have 0 bytes.
    """
    offset = whole_number(offset, "offset", least=0)
    file_size(path)
    with open(path, "rb") as file:
        start = file.read(12)
    if not start.startswith(MAGIC):
        if dtype is None or path.endswith(".npy"):
            raise StoreError(_no_series(path, start))
        return raw_layout(path, (-1,), dtype, offset)
    if offset:
        raise ArgumentError(
            f"{path}, offset={offset}: the header of a .npy file says where the items begin; "
            "leave offset out, and give start= to begin at a later item"
        )
    items = read_header(path, None if dtype is None else dtype_of(dtype, "NpyStore"))
    if not items.row_nbytes:
        raise StoreError(
            f"{path}: items of shape {items.row_shape} have 0 bytes; expected at least 1 on each "
            "axis"
        )
    return items


def _no_series(path: str, start: bytes) -> str:
    """Return an error message about a file that has neither a header nor a dtype."""
    if not start or path.endswith(".npy") or of_file(path, start):
        return strange(path, start)
    return (
        f"{path} has no header (it starts with {start[:6]!r}), so the dtype of its items is "
        'unknown; expected a .npy file, or dtype= of the items, such as dtype="uint16"'
    )


def tensor_layout(path: str, name: str) -> RowLayout:
    """Return the layout of one tensor of a safetensors file; its first axis is the rows.

    Raises:
        MissingDependency: If the library is not installed.
        FileMissing: If there is no such file.
        StoreError: If the file is a directory, is not a safetensors file, is damaged, or has no
            such tensor; or if the tensor has no axis of rows, or a dtype that torch and numpy do
            not both have.
    """
    begin, tensors = read_tensors(path)
    if name not in tensors:
        raise StoreError(
            f"{path} has no tensor {name!r}; expected one of {listed(list(tensors), _MAX_NAMES)}"
        )
    tensor = tensors[name]
    if tensor.dtype is None:
        raise StoreError(
            f"{path}: tensor {name!r} has dtype {tensor.code}, which numpy and torch do not both "
            f"have; expected one of {', '.join(sorted(_DTYPES))}; convert it with .to(), or save "
            "its bytes with .view(torch.uint8)"
        )
    if not tensor.shape:
        raise StoreError(
            f"{path}: tensor {name!r} is a single number (shape ()); expected (n_rows, ...)"
        )
    n_rows, *row_shape = tensor.shape
    layout = RowLayout(path, tensor.dtype, n_rows, tuple(row_shape), begin + tensor.begin)
    return layout.check(os.path.getsize(path))


class Tensor(NamedTuple):
    """A tensor in a safetensors file."""

    shape: tuple[int, ...]
    code: str
    """Dtype in the spelling of the format."""
    dtype: np.dtype[Any] | None
    """Dtype; None if numpy and torch do not both have it."""
    begin: int
    """Bytes of other tensors before this one."""


def read_tensors(path: str) -> tuple[int, dict[str, Tensor]]:
    """Return the bytes before the tensors of a file, and its tensors by name.

    Raises:
        MissingDependency: If the library is not installed.
        FileMissing: If there is no such file.
        StoreError: If the file is a directory, is not a safetensors file, or is damaged.
    """
    library = imported("safetensors", path)
    file_size(path, ".safetensors")
    try:
        # The library of the format checks the header, but does not give the places of tensors.
        with library.safe_open(path, framework="np"), open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: Tensor(
                    tuple(one["shape"]),
                    one["dtype"],
                    _DTYPES.get(one["dtype"]),
                    one["data_offsets"][0],
                )
                for name, one in sorted(header.items())
            }
    except library.SafetensorError as error:
        raise StoreError(
            f"{path} is not a safetensors file, or it is damaged ({error}); copy or save it again"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} was rewritten while its header was read; open it again ({described(error)})"
        ) from None
    return 8 + length, tensors
