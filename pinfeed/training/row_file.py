"""The rows of a store as a .npy file: written piece by piece, with checksums, and read back."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from typing import IO, Protocol

import numpy as np

from pinfeed.errors import CheckpointError, StoreError
from pinfeed.readahead.base import Gatherable
from pinfeed.stores import Store
from pinfeed.stores.formats.npy import read_header
from pinfeed.stores.formats.row_layout import RowLayout

PIECE_BYTES = 16 << 20
"""Memory that writing and reading take; and what a checksum is of."""


class Gathered(Gatherable, Protocol):
    """Rows that can be gathered, and how many there are."""

    @property
    def n_rows(self) -> int: ...


def write_rows(store: Gathered, file: IO[bytes]) -> None:
    """Write all rows of a store to a file, as numpy.save would."""
    shape = (store.n_rows, *store.row_shape)
    fields = {
        "descr": np.lib.format.dtype_to_descr(store.dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_2_0(file, fields)
    for start, values in _pieces(store):
        store.gather(np.arange(start, start + len(values)), values)
        file.write(values.reshape(-1).view(np.uint8).data)


def check_rows_file(path: str, store: Store) -> None:
    """Check that a file has the rows of a store, as its header says.

    Raises:
        CheckpointError: If it is no .npy file that holds them.
    """
    header = _header(path, store)
    found, expected = (header.n_rows, *header.row_shape), (store.n_rows, *store.row_shape)
    if (found, header.dtype) != (expected, store.dtype):
        raise CheckpointError(
            f"{path} has shape {found}, {header.dtype}; expected {expected}, {store.dtype}, as the table now is"
        )


def read_rows(path: str, store: Store) -> None:
    """Bring all rows of a file into a store.

    Raises:
        CheckpointError: If the file does not hold them any more.
    """
    with open_plain(path) as file:
        file.seek(_header(path, store).offset)
        for start, values in _pieces(store):
            view = values.reshape(-1).view(np.uint8).data
            if file.readinto(view) != len(view):
                raise CheckpointError(f"{path} ended while it was read")
            store.scatter(np.arange(start, start + len(values)), values)
    store.flush()


def _header(path: str, store: Store) -> RowLayout:
    try:
        return read_header(path, store.dtype)
    except StoreError as error:
        # Its message begins with the path.
        raise CheckpointError(
            f"{error}; this file of a checkpoint is damaged, or was not written by pinfeed"
        ) from error


def open_plain(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading; a link is not followed, and a pipe is not waited for.

    Raises:
        OSError: It is not there, or is no plain file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is no plain file")
    return os.fdopen(descriptor, "rb")


def checksums(path: str) -> list[int]:
    """CRC-32 of a file, piece by piece. A link is not followed."""
    found, buffer = [], bytearray(PIECE_BYTES)
    with open_plain(path) as file:
        while n := file.readinto(buffer):
            found.append(zlib.crc32(memoryview(buffer)[:n]))
        # Nobody reads it soon, and training needs the memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def _pieces(store: Gathered) -> Iterator[tuple[int, np.ndarray]]:
    """First row and room for the rows of each piece; the room is the same memory every time."""
    row_nbytes = int(np.prod(store.row_shape, dtype=np.int64)) * store.dtype.itemsize
    step = max(1, PIECE_BYTES // max(1, row_nbytes))
    room = np.empty((min(step, store.n_rows), *store.row_shape), store.dtype)
    for start in range(0, store.n_rows, step):
        yield start, room[: min(step, store.n_rows - start)]
