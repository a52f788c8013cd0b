"""Where a tensor lies in a safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pinfeed.errors import FileMissing, MissingDependency, StoreError, described
from pinfeed.stores.formats.row_layout import RowLayout, require_regular
from pinfeed.tensors.dtypes import BFLOAT16

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
# Names that an error lists; a model may have thousands.
_NAMED = 20


def tensor_layout(path: str, name: str) -> RowLayout:
    """Where the tensor ``name`` lies in a file; its first axis are the rows.

    The header is checked by the format's own library. That it does not tell offsets is why they are
    read from the header once more.

    Raises:
        MissingDependency: The library is not installed.
        FileMissing: There is no such file.
        StoreError: It is a directory, not a safetensors file or damaged, has no such tensor, or one
            without a rows axis or of a dtype that torch and numpy do not both have.
    """
    with _opened(path) as file:
        names = sorted(file.keys())
        if name not in names:
            raise StoreError(f"{path} has no tensor {name!r}; expected one of {_some(names)}")
        part = file.get_slice(name)
        shape, dtype = tuple(part.get_shape()), _dtype(path, name, part.get_dtype())
    if not shape:
        raise StoreError(
            f"{path}: tensor {name!r} is a single number (shape ()); expected (n_rows, ...)"
        )
    try:
        begin, end = _place(path, name)
        layout = RowLayout(path, dtype, shape[0], shape[1:], begin)
        if layout.end != end:
            raise ValueError(f"{name!r} ends at byte {end}, expected {layout.end}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{path} was written anew while its header was read; open it again ({described(error)})"
        ) from None
    return layout.check(os.path.getsize(path))


def list_tensors(path: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape of each tensor, and its dtype as the format calls it.

    Raises:
        MissingDependency: The library is not installed.
        FileMissing: There is no such file.
        StoreError: It is a directory, not a safetensors file, or damaged.
    """
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in sorted(file.keys())}
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependency(
            f'{path}: the safetensors package is needed; pip install "pinfeed[safetensors]"'
        ) from error
    if os.path.isdir(path):
        raise StoreError(f"{path} is a directory; expected a safetensors file")
    try:
        require_regular(path)
        with safe_open(path, framework="np") as file:
            yield file
    except FileNotFoundError:
        raise FileMissing(
            f"{path}: no such file (looked in {os.getcwd()}); expected a safetensors file"
        ) from None
    except SafetensorError as error:
        raise StoreError(
            f"{path} is not a safetensors file, or it is damaged ({error}); copy or save it again"
        ) from None


def _dtype(path: str, name: str, saved: str) -> np.dtype[Any]:
    if saved not in _DTYPES:
        raise StoreError(
            f"{path}: tensor {name!r} has dtype {saved}, which numpy and torch do not both have; expected one of "
            f"{', '.join(sorted(_DTYPES))}; convert it with .to(), or save its bytes with .view(torch.uint8)"
        )
    return _DTYPES[saved]


def _place(path: str, name: str) -> tuple[int, int]:
    """First byte of a tensor, and the one behind its last: of a file that the library has just found to be in order."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + int(begin), 8 + length + int(end)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(map(repr, names[:_NAMED]))}{more}" if names else "none: it has no tensors"
