"""Rows of a store as a .npy file: atomic writes, reads in chunks, and checksums."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from pinfeed.errors import CheckpointError, StoreError
from pinfeed.stores import Store
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.host_rows import Gatherable
from pinfeed.stores.npy_header import read_header

CHUNK_BYTES = 16 << 20
"""Size of the buffer for a pass over rows, and the number of bytes under one checksum."""


class RowSequence(Gatherable, Protocol):
    """Rows that can be gathered, and their number."""

    @property
    def n_rows(self) -> int: ...


def row_chunks(rows: RowSequence) -> list[tuple[int, int]]:
    """List the rows as ranges [start, stop) of about 16 MiB each."""
    row_nbytes = int(np.prod(rows.row_shape, dtype=np.int64)) * rows.dtype.itemsize
    length = max(1, CHUNK_BYTES // max(1, row_nbytes))
    starts = range(0, rows.n_rows, length)
    return [(start, min(start + length, rows.n_rows)) for start in starts]


def write_rows(rows: RowSequence, file: IO[bytes]) -> None:
    """Write all rows to an open file in the format of ``numpy.save``."""
    fields = {
        "descr": np.lib.format.dtype_to_descr(rows.dtype),
        "fortran_order": False,
        "shape": (rows.n_rows, *rows.row_shape),
    }
    np.lib.format.write_array_header_2_0(file, fields)
    for indices, buffer in _buffered_chunks(rows):
        rows.gather(indices, buffer)
        file.write(_bytes_of(buffer))


def check_rows_file(path: str, store: Store) -> None:
    """Check that the header of a file names the shape and dtype of a store.

    Raises:
        CheckpointError: If the file is not such a .npy file.
    """
    header = _header(path, store)
    found = (header.n_rows, *header.row_shape)
    expected = (store.n_rows, *store.row_shape)
    if (found, header.dtype) != (expected, store.dtype):
        raise CheckpointError(
            f"{path} has shape {found}, {header.dtype}; "
            f"expected {expected}, {store.dtype}, as in the table"
        )


def restore_rows(path: str, store: Store) -> None:
    """Copy all rows of a file into a store, and flush the store.

    Raises:
        CheckpointError: If the file is shorter than its header says.
    """
    with open_plain(path) as file:
        file.seek(_header(path, store).offset)
        for indices, buffer in _buffered_chunks(store):
            view = _bytes_of(buffer)
            if file.readinto(view) != len(view):
                raise CheckpointError(
                    f"{path} is shorter than its header says; use another checkpoint"
                )
            store.scatter(indices, buffer)
        _forget(file)
    store.flush()


def open_plain(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading, without following a link or blocking on a pipe.

    Raises:
        OSError: If the file does not exist, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is not a regular file")
    return os.fdopen(descriptor, "rb")


def checksums(path: str, *, is_read_next: bool = False) -> list[int]:
    """Return the CRC-32 of every 16 MiB of a file; a link is not followed.

    Args:
        path: The file.
        is_read_next: Whether the file is read again soon, so that it stays in the page cache.
    """
    found = []
    buffer = bytearray(CHUNK_BYTES)
    with open_plain(path) as file:
        while n := file.readinto(buffer):
            found.append(zlib.crc32(memoryview(buffer)[:n]))
        if not is_read_next:
            _forget(file)
    return found


def _forget(file: BufferedReader) -> None:
    """Drop a file from the page cache, whose memory training needs."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(path: str, store: Store) -> RowLayout:
    try:
        return read_header(path, store.dtype)
    except StoreError as error:
        # The message of the error begins with the path.
        raise CheckpointError(
            f"{error}; this file of a checkpoint is damaged, or was not written by pinfeed"
        ) from error


def _buffered_chunks(rows: RowSequence) -> Iterator[tuple[npt.NDArray[np.int64], np.ndarray]]:
    """Yield the row indices of each chunk and a buffer for its rows, the same memory every time."""
    chunks = row_chunks(rows)
    longest = chunks[0][1] if chunks else 0
    buffer = np.empty((longest, *rows.row_shape), rows.dtype)
    for start, stop in chunks:
        yield np.arange(start, stop), buffer[: stop - start]


def _bytes_of(array: np.ndarray) -> Any:
    """Return the memory of a contiguous array as bytes, shared."""
    return array.reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces ``path`` when the block ends without an error.

    The data goes to another name in the same directory, is synced to the disk and then renamed.
    If the block raises, that file is removed and ``path`` does not change.

    Args:
        path: File to create or replace. A link is itself replaced; pass ``os.path.realpath(path)``
            to replace its target.

    Yields:
        The file, open for writing bytes.

    Raises:
        OSError: If the file cannot be written, synced or renamed.
    """
    unfinished = f"{os.fspath(path)}.{os.getpid()}.writing"
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
