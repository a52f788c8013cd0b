"""Shard: one open file of rows."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from ..errors import FileMissing, ReadError
from ..rows import Rows
from . import vmread
from .npy import NpyHeader

Bytes = npt.NDArray[np.uint8]

_FAULT_AROUND = 1 << 16  # bytes that Linux maps around a page that is asked for
_CALL_ROW_NBYTES = 1 << 17  # from here on a read per row costs nothing beside its bytes


class Shard:
    """Descriptor and mapping of one file; closed when nobody holds the object any more. Any thread may use it.

    Raises:
        FileMissing: The file has gone since its header was read.
    """

    RESIDENT_BYTES = 16 << 20
    """Pages of the mapping that a gather may leave in this process before they are dropped from it (not from the page cache)."""

    def __init__(self, header: NpyHeader, *, writable: bool) -> None:
        self._header = header
        try:
            self._fd = os.open(header.path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise FileMissing(f"{header.path} was there when it was opened and is not any more") from None
        weakref.finalize(self, os.close, self._fd)
        self._check_size()
        self._mapping: mmap.mmap | None = None
        if header.row_nbytes and vmread.available():
            self._mapping = mmap.mmap(self._fd, header.end, prot=mmap.PROT_READ)
            self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._touched = 0  # bytes of the mapping that may be resident

    def read_run(self, run: slice, out: Bytes) -> None:
        """Read consecutive rows into ``out``, shape (n, row_nbytes)."""
        self._read(run.start * self._header.row_nbytes, memoryview(out).cast("B") if out.size else memoryview(b""))

    def read_rows(self, rows: Rows, out: Bytes, positions: npt.NDArray[np.intp]) -> None:
        """Read rows in any order into ``out[positions]``; ``out`` is C-contiguous, shape (n, row_nbytes)."""
        nbytes = self._header.row_nbytes
        if self._mapping is None or nbytes >= _CALL_ROW_NBYTES:
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
                self.read_run(slice(row, row + 1), out[position])
            return
        offsets, out_offsets = rows * nbytes + self._header.offset, positions * nbytes
        page_bytes = nbytes + _FAULT_AROUND
        step = max(1, self.RESIDENT_BYTES // page_bytes)
        for i in range(0, len(rows), step):
            self._make_room(min(step, len(rows) - i) * page_bytes)
            if not vmread.copy_rows(self._address, offsets[i : i + step], out, out_offsets[i : i + step], nbytes):
                self._check_size()
                raise ReadError(f"{self._header.path}: rows {rows[i : i + step].min()} to {rows[i : i + step].max()} cannot be read")
        self._check_size()  # a page that the end of the file has moved into reads as zeros, without an error

    def write_rows(self, rows: Rows, values: Bytes) -> None:
        """Write rows, each there once; ``values`` has shape (n, row_nbytes). Neighbours go in one call."""
        if not values.size:
            return
        order = np.argsort(rows, kind="stable")
        ordered, sorted_rows = values[order], rows[order]
        breaks = np.flatnonzero(np.diff(sorted_rows) != 1) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            self._write(int(sorted_rows[begin]) * self._header.row_nbytes, memoryview(ordered[begin:end]).cast("B"))

    def flush(self) -> None:
        """Return when what was written is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._header.path) from error

    def _make_room(self, nbytes: int) -> None:
        """Drop the mapped pages from this process, unless ``nbytes`` more of them still fit."""
        assert self._mapping is not None
        if self._touched + nbytes > self.RESIDENT_BYTES < self._header.end:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._touched = 0
        self._touched += nbytes

    def _read(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                n = os.preadv(self._fd, [out[done:]], self._header.offset + offset + done)
            except OSError as error:
                raise ReadError(error.errno, f"{error.strerror}, while rows were read", self._header.path) from error
            if n == 0:
                self._check_size()
                raise ReadError(f"{self._header.path} ended before row {(offset + done) // self._header.row_nbytes}")
            done += n

    def _write(self, offset: int, values: memoryview) -> None:
        done = 0
        while done < len(values):
            try:
                done += os.pwrite(self._fd, values[done:], self._header.offset + offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._header.path) from error

    def _check_size(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._header.end:
            raise ReadError(
                f"{self._header.path} has shrunk to {size} bytes; its {self._header.n_rows} rows need {self._header.end}; "
                "was it written anew while it was streamed?"
            )
