"""The header of a .npy file, versions 1 to 3 (numpy's NEP 1), read without trusting it: nothing is unpickled or evaluated."""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import math
import os
import shutil
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from pinfeed.errors import FileMissing, StoreError, described
from pinfeed.stores.formats.row_layout import RowLayout, require_regular
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.suggestions import of_file

# numpy's own limit
_MAX_AXES = 64
# What version 1 can say; a longer one lists the fields of a structured dtype, or is no header.
_MAX_HEADER = 1 << 16


@dataclass(frozen=True)
class Header:
    """What a header says, whether pinfeed can serve it or not."""

    version: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    nbytes: int
    """Bytes before the first item."""


def read_header(path: str, dtype: np.dtype[Any] | None = None) -> RowLayout:
    """Read and check the header of a .npy file.

    Args:
        path: The file.
        dtype: What its items are, where the header cannot say it; of the same size.

    Raises:
        FileMissing: There is no such file.
        StoreError: It is a directory, not a .npy file, truncated, in Fortran order, of a dtype that
            torch has not, or has no rows axis.
    """
    try:
        require_regular(path)
        with open(path, "rb") as file:
            return header_of(path, file, os.fstat(file.fileno()).st_size, dtype)
    except FileNotFoundError:
        raise FileMissing(
            f"{path}: no such file (looked in {os.getcwd()}); expected a .npy file, as numpy.save writes it"
        ) from None
    except IsADirectoryError:
        found = of_file(os.path.normpath(path))
        kind = f" (it looks like {found[0]}: {found[1]})" if found else ""
        raise StoreError(
            f"{path} is a directory{kind}; expected a .npy file, or a pattern such as {path}/*.npy"
        ) from None


def create(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, overwrite: bool) -> None:
    """Make a .npy file of zeros: a hole, which takes no room on the disk until it is written.

    A file that is overwritten is replaced when the new one is whole.

    Raises:
        StoreError: If the file is there already, and is not to be overwritten, or if the file
            system refuses one of this size.
        FileMissing: If the directory of the file does not exist.
    """
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    target, nbytes = os.path.realpath(path), math.prod(shape) * dtype.itemsize
    made = f"{target}.{os.getpid()}.writing" if overwrite else path
    try:
        # One under way that a killed process has left is in nobody's way.
        file = open(made, "wb" if overwrite else "xb")  # noqa: SIM115  # closed below, before it is renamed or removed
    except FileExistsError:
        raise StoreError(
            f"{made} is there already; open it (MmapStore, from_pretrained), remove it, or give overwrite=True"
        ) from None
    try:
        with file:
            np.lib.format.write_array_header_2_0(file, fields)
            file.truncate(file.tell() + nbytes)
        if overwrite:
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(target, made)
            os.replace(made, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            # An interrupt behind the replacement.
            os.remove(made)
        if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.EINVAL):
            raise StoreError(
                f"{path}: shape {shape} of {dtype} takes {nbytes:,} bytes, which the file system refuses for one file "
                f"({error.strerror}); expected fewer or smaller rows, or a file system for larger files"
            ) from error
        raise


def holds(path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Return whether a file begins as ``create`` makes one of this shape and dtype."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            header = parse_header(path, file)
    except (StoreError, OSError):
        return False
    descr = np.lib.format.dtype_to_descr
    return (header.shape, header.fortran, descr(header.dtype)) == (shape, False, descr(dtype))


def strange(path: str, start: bytes) -> str:
    """What a file may be that begins so, if it is none of .npy, and what to do with it."""
    if not start:
        return f"{path} is empty (0 bytes): what wrote it was stopped, or the disk was full; write it again"
    if found := of_file(path, start):
        return f"{path} is not a .npy file; it looks like {found[0]}: {found[1]}"
    return f"{path} is not a .npy file (it starts with {start[:6]!r}); expected one that numpy.save wrote, or see MmapStore.raw"


def header_of(
    path: str, file: IO[bytes], size: int, dtype: np.dtype[Any] | None = None
) -> RowLayout:
    """As ``read_header``, of an open file of ``size`` bytes, whatever it is open on."""
    header = parse_header(path, file)
    if not header.shape:
        raise StoreError(f"{path} holds a single number (shape ()); expected (n_rows, ...)")
    if header.fortran and len(header.shape) > 1:
        raise StoreError(
            f"{path} is in Fortran order, in which a row is scattered over the file; save np.ascontiguousarray(array)"
        )
    return RowLayout(
        path, _chosen(path, header.dtype, dtype), header.shape[0], header.shape[1:], header.nbytes
    ).check(size)


def parse_header(path: str, file: IO[bytes]) -> Header:
    """What the header of an open file says.

    Raises:
        StoreError: If it is not a .npy file, or if its header is one that numpy refuses.
    """
    start = file.read(12)
    length = _header_length(path, start)
    begin = 10 if start[6] == 1 else 12
    file.seek(begin)
    return Header(start[6], *_parse(path, start[6], file.read(length), length), begin + length)


def _header_length(path: str, start: bytes) -> int:
    if len(start) < 12 or start[:6] != b"\x93NUMPY":
        raise StoreError(strange(path, start))
    if start[6] not in (1, 2, 3) or start[7] != 0:
        raise StoreError(
            f"{path}: .npy version {start[6]}.{start[7]} is not known; expected 1.0, 2.0 or 3.0"
        )
    length = int.from_bytes(start[8:10] if start[6] == 1 else start[8:12], "little")
    if length > _MAX_HEADER:
        raise StoreError(
            f"{path}: a header of {length} bytes; expected at most {_MAX_HEADER} (an unstructured array needs about 100)"
        )
    return length


def _parse(
    path: str, version: int, text: bytes, length: int
) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    try:
        if len(text) < length:
            raise ValueError(f"{len(text)} of {length} bytes are there")
        if version == 3:
            shape, fortran, dtype = _fields(ast.literal_eval(text.decode("utf-8")))
        else:
            # numpy has a function for these two; versions 1 and 2 differ in how they tell the
            # length.
            told = io.BytesIO(len(text).to_bytes(4, "little") + text)
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(told, _MAX_HEADER)
        if (
            not isinstance(shape, tuple)
            or len(shape) > _MAX_AXES
            or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
        ):
            raise ValueError(f"shape {shape!r}")
    except Exception as error:
        # Whatever ast and numpy make of bytes that can be anything.
        raise StoreError(
            f"{path}: the .npy header is damaged ({described(error):.250}); save the array again"
        ) from None
    return dtype, shape, fortran


def _fields(found: Any) -> tuple[Any, bool, np.dtype[Any]]:
    """Shape, order and dtype, as numpy takes them from the text of a header."""
    if not isinstance(found, dict) or set(found) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"{found!r:.100} is no dict of descr, fortran_order and shape alone")
    if not isinstance(found["fortran_order"], bool):
        raise TypeError(f"fortran_order {found['fortran_order']!r}")
    return found["shape"], found["fortran_order"], np.lib.format.descr_to_dtype(found["descr"])


def _chosen(path: str, saved: np.dtype[Any], wanted: np.dtype[Any] | None) -> np.dtype[Any]:
    """The dtype of the items: what was saved, unless the caller knows better."""
    if wanted is None:
        if saved.kind == "V" and saved.names is None and saved.subdtype is None:
            raise StoreError(
                f'{path}: dtype {saved} says nothing of its items; if they are bfloat16, say so: MmapStore(path, dtype="bfloat16")'
            )
        check_dtype(saved, path)
        return saved
    if saved.name == wanted.name:
        # With the byte order that the header says.
        return saved
    if saved.itemsize != wanted.itemsize or saved.hasobject or not saved.isnative:
        raise StoreError(
            f"{path} has items of dtype {saved}; expected {wanted.itemsize} plain bytes each, in this machine's byte order, "
            f"to be taken for {wanted}"
        )
    return wanted
