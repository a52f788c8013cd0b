"""Shard: one open file of rows."""

from __future__ import annotations

import os
import weakref

import numpy as np
import numpy.typing as npt

from ..errors import FileMissing, ReadError
from ..rows import Rows
from . import aio
from .npy import NpyHeader

Bytes = npt.NDArray[np.uint8]


class Shard:
    """The descriptor of one file, closed when nobody holds the object any more. Any thread may use it.

    Raises:
        FileMissing: The file has gone since its header was read.
    """

    def __init__(self, header: NpyHeader, *, writable: bool) -> None:
        self._header = header
        try:
            self._fd = os.open(header.path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise FileMissing(f"{header.path} was there when it was opened and is not any more") from None
        weakref.finalize(self, os.close, self._fd)
        self._check_size()

    def read_run(self, first: int, out: Bytes) -> None:
        """Read the rows from ``first`` on into ``out``, shape (n, row_nbytes).

        Raises:
            ReadError: The file has shrunk, or cannot be read.
        """
        begin, view, done = self._header.offset + first * self._header.row_nbytes, out.reshape(-1).data, 0
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done:]], begin + done)
            except OSError as error:
                raise self._read_error(error.errno or 0) from error
            if n == 0:
                self._check_size()
                raise ReadError(f"{self._header.path} ended at byte {begin + done}")
            done += n

    def read_rows(self, rows: Rows, out: Bytes, positions: Rows, requests: aio.Requests | None) -> None:
        """Read rows in any order into ``out[positions]``; ``out`` is C-contiguous, shape (n, row_nbytes).

        Raises:
            ReadError: The file has shrunk, or cannot be read.
        """
        if requests is None:
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
                self.read_run(row, out[position])
            return
        results = requests.run(aio.READ, self._fd, out.ctypes.data + positions * out.shape[1], self._offsets(rows), out.shape[1])
        for i in np.flatnonzero(results != self._header.row_nbytes).tolist():
            if results[i] < 0:
                raise self._read_error(-int(results[i]))
            self.read_run(int(rows[i]), out[positions[i]])  # which reports that the file has ended, if it has

    def write_rows(self, rows: Rows, values: Bytes, requests: aio.Requests | None) -> None:
        """Write rows, each there once; ``values`` is C-contiguous, shape (n, row_nbytes).

        Raises:
            OSError: What the file system says, with the name of the file.
        """
        self._check_size()  # else a write beyond the end would make it longer, with holes
        nbytes = self._header.row_nbytes
        unwritten = np.arange(len(rows))
        if requests is not None:
            results = requests.run(aio.WRITE, self._fd, values.ctypes.data + unwritten * nbytes, self._offsets(rows), nbytes)
            unwritten = np.flatnonzero(results != nbytes)
        for i in unwritten.tolist():
            self._write(self._header.offset + int(rows[i]) * nbytes, values[i].data)

    def flush(self) -> None:
        """Return when what was written is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._header.path) from error

    def _offsets(self, rows: Rows) -> Rows:
        return self._header.offset + rows * self._header.row_nbytes

    def _write(self, offset: int, values: memoryview) -> None:
        done = 0
        while done < len(values):
            try:
                done += os.pwrite(self._fd, values[done:], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._header.path) from error

    def _read_error(self, number: int) -> ReadError:
        return ReadError(number, f"{os.strerror(number)}, while rows were read", self._header.path)

    def _check_size(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._header.end:
            raise ReadError(
                f"{self._header.path} has shrunk to {size} bytes; its {self._header.n_rows} rows need {self._header.end}; "
                "was it written anew while it was streamed?"
            )
