"""Layout of a tensor in a safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pinfeed.errors import FileMissing, StoreError, described
from pinfeed.stores.libraries import imported
from pinfeed.stores.paths import require_regular
from pinfeed.stores.sharded_file import RowLayout
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.validation.requirements import install_line

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


def tensor_layout(path: str, name: str) -> RowLayout:
    """Return the layout of one tensor of a file; its first axis is the rows.

    The format's own library checks the header. It does not give offsets, so this function reads
    them from the header once more.

    Raises:
        MissingDependency: If the library is not installed.
        FileMissing: If there is no such file.
        StoreError: If the file is a directory, is not a safetensors file, is damaged, or has no
            such tensor; or if the tensor has no axis of rows, or a dtype that torch and numpy do
            not both have.
    """
    with _opened(path) as file:
        names = sorted(file.keys())
        if name not in names:
            raise StoreError(f"{path} has no tensor {name!r}; expected one of {_listed(names)}")
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        dtype = _dtype(path, name, part.get_dtype())
    if not shape:
        raise StoreError(
            f"{path}: tensor {name!r} is a single number (shape ()); expected (n_rows, ...)"
        )
    try:
        begin, end = _byte_range(path, name)
        layout = RowLayout(path, dtype, shape[0], shape[1:], begin)
        if layout.end != end:
            raise ValueError(f"{name!r} ends at byte {end}, expected {layout.end}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{path} was rewritten while its header was read; open it again ({described(error)})"
        ) from None
    return layout.check(os.path.getsize(path))


def list_tensors(path: str) -> dict[str, tuple[tuple[int, ...], str, np.dtype[Any] | None]]:
    """Return the shape of each tensor, its dtype in the spelling of the format, and its dtype.

    The dtype is None if numpy and torch do not both have it.

    Raises:
        MissingDependency: If the library is not installed.
        FileMissing: If there is no such file.
        StoreError: If the file is a directory, is not a safetensors file, or is damaged.
    """
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in sorted(file.keys())}
        return {
            name: (tuple(part.get_shape()), part.get_dtype(), _DTYPES.get(part.get_dtype()))
            for name, part in parts.items()
        }


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    library = imported(
        "safetensors", f"{path}: the safetensors package is needed; {install_line('safetensors')}"
    )
    if os.path.isdir(path):
        raise StoreError(f"{path} is a directory; expected a safetensors file")
    try:
        require_regular(path)
        with library.safe_open(path, framework="np") as file:
            yield file
    except FileNotFoundError:
        raise FileMissing(
            f"{path}: no such file (looked in {os.getcwd()}); expected a safetensors file"
        ) from None
    except library.SafetensorError as error:
        raise StoreError(
            f"{path} is not a safetensors file, or it is damaged ({error}); copy or save it again"
        ) from None


def _dtype(path: str, name: str, saved: str) -> np.dtype[Any]:
    if saved not in _DTYPES:
        raise StoreError(
            f"{path}: tensor {name!r} has dtype {saved}, which numpy and torch do not both have; "
            f"expected one of {', '.join(sorted(_DTYPES))}; convert it with .to(), or save its "
            "bytes with .view(torch.uint8)"
        )
    return _DTYPES[saved]


def _byte_range(path: str, name: str) -> tuple[int, int]:
    """Return the bytes [begin, end) of a tensor of a file that the library has just checked."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + int(begin), 8 + length + int(end)


def _listed(names: list[str]) -> str:
    if not names:
        return "none: it has no tensors"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(map(repr, names[:_MAX_NAMES]))}{more}"
