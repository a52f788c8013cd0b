"""Headers of .npy files: versions 1 to 3 of numpy's NEP 1.

Nothing in a header is unpickled or evaluated, because a header is not trusted.
"""

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

from pinfeed.errors import StoreError, described
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.paths import file_size, require_regular
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.suggestions import of_file

MAGIC = b"\x93NUMPY"
"""First bytes of every .npy file."""

# CPython counts the depth of the literals that it parses for all threads together. If two threads
# parse at the same time, as when shards are opened, one of them may fail with a SystemError.
_MAX_TRIES = 10
# Limit of numpy.
_MAX_AXES = 64
# Advice for items of which the header knows only the number of bytes.
_ADVICE_BY_SIZE = {
    1: 'if they are a float8, give NpyStore(path, dtype="uint8"), and device_transform=lambda x: '
    "x.view(torch.float8_e4m3fn), with its dtype",
    2: 'if they are bfloat16, give NpyStore(path, dtype="bfloat16")',
}
# Longest header of version 1. A longer one lists the fields of a structured dtype, or is damaged.
_MAX_HEADER = 1 << 16


@dataclass(frozen=True)
class Header:
    """Content of a header, whether pinfeed supports it or not."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    nbytes: int
    """Bytes before the first item."""


def read_header(path: str, dtype: np.dtype[Any] | None = None) -> RowLayout:
    """Read and check the header of a .npy file.

    Args:
        path: The file.
        dtype: Dtype of the items, of the same size, if the header cannot name it.

    Raises:
        FileMissing: If the file does not exist.
        StoreError: If the file is a directory, is not a .npy file, is truncated, is in Fortran
            order, has no axis of rows, or has a dtype that torch does not have.
    """
    size = file_size(path, ".npy")
    with open(path, "rb") as file:
        return header_of(path, file, size, dtype)


def create(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, overwrite: bool) -> None:
    """Create a .npy file of zeros, which occupies no disk space until rows are written.

    If a file is overwritten, it is replaced once the new file is complete.

    Raises:
        StoreError: If the file exists and ``overwrite`` is False, or if the file system refuses a
            file of this size.
        FileMissing: If the directory of the file does not exist.
    """
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    target = os.path.realpath(path)
    nbytes = math.prod(shape) * dtype.itemsize
    made = f"{target}.{os.getpid()}.writing" if overwrite else path
    try:
        # The file is closed below, before it is renamed or removed. The temporary file of a killed
        # process is overwritten.
        file = open(made, "wb" if overwrite else "xb")  # noqa: SIM115
    except FileExistsError:
        raise StoreError(
            f"{made} exists; open it (NpyStore, from_pretrained), remove it, or give overwrite=True"
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
        # The file does not exist if an interrupt arrived after the replacement.
        with contextlib.suppress(FileNotFoundError):
            os.remove(made)
        if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.EINVAL):
            raise StoreError(
                f"{path}: shape {shape} of {dtype} needs {nbytes:,} bytes, but the file system "
                f"refuses a file of this size ({error.strerror}); use fewer or smaller rows, or a "
                "file system for larger files"
            ) from error
        raise


def holds(path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Return whether a file has the header that ``create`` writes for this shape and dtype."""
    try:
        require_regular(path)
        with open(path, "rb") as file:
            header = parse_header(path, file)
    except (StoreError, OSError):
        return False
    descr = np.lib.format.dtype_to_descr
    return (header.shape, header.fortran, descr(header.dtype)) == (shape, False, descr(dtype))


def strange(path: str, start: bytes) -> str:
    """Return an error message about a file that is not a .npy file.

    Args:
        path: The file.
        start: First bytes of the file, from which its format is guessed.
    """
    if not start:
        return (
            f"{path} is empty (0 bytes), because its writer was stopped or the disk was full; "
            "write it again"
        )
    if found := of_file(path, start):
        return f"{path} is not a .npy file; it looks like {found}"
    return (
        f"{path} is not a .npy file (it starts with {start[:6]!r}); expected a file of "
        "numpy.save; for other files, see NpyStore.raw and NpyStore.windows"
    )


def header_of(
    path: str, file: IO[bytes], size: int, dtype: np.dtype[Any] | None = None
) -> RowLayout:
    """Read and check the header of an open file, like ``read_header``.

    Args:
        path: Name of the file in errors.
        file: The file, local or remote.
        size: Size of the file, in bytes.
        dtype: Dtype of the items, if the header cannot say it.
    """
    header = parse_header(path, file)
    if not header.shape:
        raise StoreError(f"{path} holds a single number (shape ()); expected (n_rows, ...)")
    if header.fortran and len(header.shape) > 1:
        raise StoreError(
            f"{path} is in Fortran order, in which the items of a row are scattered over the "
            "file; expected C order; save np.ascontiguousarray(array)"
        )
    items = _item_dtype(path, header.dtype, dtype)
    n_rows, *row_shape = header.shape
    return RowLayout(path, items, n_rows, tuple(row_shape), header.nbytes).check(size)


def parse_header(path: str, file: IO[bytes]) -> Header:
    """Return the content of the header of an open file.

    Raises:
        StoreError: If it is not a .npy file, or if numpy refuses its header.
    """
    start = file.read(12)
    length = _header_length(path, start)
    begin = 10 if start[6] == 1 else 12
    file.seek(begin)
    text = file.read(length)
    try:
        if len(text) < length:
            raise ValueError(f"it has {len(text)} of {length} bytes")
        shape, fortran, dtype = _evaluate(start[6], text)
        if (
            not isinstance(shape, tuple)
            or len(shape) > _MAX_AXES
            or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
        ):
            raise ValueError(f"shape {shape!r}")
    except Exception as error:
        # ast and numpy may raise any error, because the bytes can be anything.
        raise StoreError(
            f"{path}: the .npy header is damaged ({described(error):.250}); save the array again"
        ) from None
    return Header(dtype, shape, fortran, begin + length)


def _header_length(path: str, start: bytes) -> int:
    if len(start) < 12 or not start.startswith(MAGIC):
        raise StoreError(strange(path, start))
    if start[6] not in (1, 2, 3) or start[7] != 0:
        raise StoreError(
            f"{path}: .npy version {start[6]}.{start[7]} is not known; expected 1.0, 2.0 or 3.0"
        )
    length = int.from_bytes(start[8:10] if start[6] == 1 else start[8:12], "little")
    if length > _MAX_HEADER:
        raise StoreError(
            f"{path}: a header of {length} bytes; expected at most {_MAX_HEADER} (an unstructured "
            "array needs about 100)"
        )
    return length


def _evaluate(version: int, text: bytes) -> tuple[Any, bool, np.dtype[Any]]:
    """Return shape, order and dtype of a header."""
    for _ in range(_MAX_TRIES):
        with contextlib.suppress(SystemError):
            if version == 3:
                # Only names of fields have characters that version 2 cannot encode.
                text = ascii(ast.literal_eval(text.decode("utf-8"))).encode()
            # The function differs from that for version 1 only in the width of the length.
            header = io.BytesIO(len(text).to_bytes(4, "little") + text)
            return np.lib.format.read_array_header_2_0(header, _MAX_HEADER)
    raise ValueError("it cannot be parsed")


def _item_dtype(path: str, saved: np.dtype[Any], wanted: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return the dtype of the items: the saved dtype, unless the caller gives another one."""
    if wanted is None:
        if saved.kind == "V" and saved.names is None and saved.subdtype is None:
            raise StoreError(
                f"{path}: dtype {saved} does not say what the items are; "
                + _ADVICE_BY_SIZE.get(saved.itemsize, "save the array with another dtype")
            )
        check_dtype(saved, path)
        return saved
    if saved.name == wanted.name:
        # The saved dtype has the byte order of the file.
        return saved
    if saved.itemsize != wanted.itemsize or saved.hasobject or not saved.isnative:
        raise StoreError(
            f"{path} has items of dtype {saved}, which cannot be read as {wanted}; expected plain "
            f"items of {wanted.itemsize} bytes, in this machine's byte order; dtype= converts "
            f"nothing; to convert batches, give device_transform=lambda batch: batch.to(...)"
        )
    return wanted
