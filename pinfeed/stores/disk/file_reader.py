"""FileReader: one open file of rows."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from pinfeed.errors import FileMissing, ReadError
from pinfeed.rows.orders import Rows
from pinfeed.stores.disk import linux_aio
from pinfeed.stores.disk.page_cache import PageCache
from pinfeed.stores.formats.row_layout import RowLayout
from pinfeed.threads.call import Call
from pinfeed.threads.pool import ThreadPool

Bytes = npt.NDArray[np.uint8]

# Reads that wait for the disk at a time: more brought nothing on a virtual disk and on NVMe, fewer
# did not fill them.
_AT_ONCE = 16
# Rows that make a thread worth its start.
_EACH = 4


def inode_of(status: os.stat_result) -> tuple[int, int]:
    """What tells a file from another one of the same name."""
    return status.st_dev, status.st_ino


class FileReader:
    """The descriptor of one file, closed when nobody holds the object any more.

    Any thread may use it.

    Args:
        layout: Where its rows are.
        contexts: For requests that are made many at a time.
        inode: Of the file whose header was read.
        writable: Whether ``write_rows`` is to work.
        keep_cache: Leave in the page cache what was read.

    Raises:
        FileMissing: The file has gone since its header was read.
        ReadError: Another one has its name now.
    """

    def __init__(
        self,
        layout: RowLayout,
        contexts: linux_aio.AioContextPool,
        *,
        inode: tuple[int, int],
        writable: bool,
        keep_cache: bool,
    ) -> None:
        self._layout = layout
        self._contexts = contexts
        try:
            self._fd = os.open(layout.path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise FileMissing(
                f"{layout.path} was there when it was opened and is not any more"
            ) from None
        weakref.finalize(self, os.close, self._fd)
        if inode_of(os.fstat(self._fd)) != inode:
            raise ReadError(
                f"{layout.path} was replaced by another file since its header was read; open it again"
            )
        self._check_size()
        self._cache = PageCache(self._fd, layout.end, keep=keep_cache)
        # Before the descriptor is closed: the last one made is called first.
        weakref.finalize(self, self._cache.leave)

    def read_run(self, first: int, out: Bytes) -> None:
        """Read the rows from ``first`` on into ``out``, shape (n, row_nbytes).

        Raises:
            ReadError: The file has shrunk, or cannot be read.
        """
        begin = self._layout.offset + first * self._layout.row_nbytes
        view = out.reshape(-1).data
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done:]], begin + done)
            except OSError as error:
                raise self._read_error(error.errno or 0) from error
            if n == 0:
                self._check_size()
                raise ReadError(f"{self._layout.path} ended at byte {begin + done}")
            done += n
        self._cache.used(begin, len(view))

    def read_rows(self, rows: Rows, out: Bytes, positions: Rows) -> None:
        """Read rows in any order into ``out[positions]``; ``out`` is C-contiguous, shape (n, row_nbytes).

        What is in the page cache is copied by this thread; for the rest, many reads wait for the
        disk at the same time.

        Raises:
            ReadError: The file has shrunk, or cannot be read.
        """
        if not self._layout.row_nbytes:
            return
        self._cache.at_random()
        missing = self._read_some(rows, out, positions, linux_aio.NOWAIT)
        if not len(missing):
            return
        # Neighbours go to one thread, one after the other: the kernel reads them as one.
        missing = missing[np.argsort(rows[missing])]
        # A row begins within a page.
        self._cache.used(
            self._layout.offset, len(missing) * (self._layout.row_nbytes + mmap.PAGESIZE)
        )
        n_threads = min(_AT_ONCE, len(missing) // _EACH)
        if n_threads < 2:
            self._read_all(rows[missing], out, positions[missing])
            return
        calls = [
            Call(self._read_all, rows[part], out, positions[part])
            for part in np.array_split(missing, n_threads)
        ]
        with ThreadPool(n_threads, "pinfeed-disk", calls=calls):
            for call in calls:
                call.result()

    def write_rows(self, rows: Rows, values: Bytes) -> None:
        """Write rows, each there once; ``values`` is C-contiguous, shape (n, row_nbytes).

        Raises:
            OSError: What the file system says, with the name of the file.
        """
        # Else a write beyond the end would make it longer, with holes.
        self._check_size()
        nbytes = self._layout.row_nbytes
        if not nbytes:
            return
        unwritten = np.arange(len(rows))
        with self._contexts.take() as requests:
            if requests is not None:
                results = requests.run(
                    linux_aio.WRITE,
                    self._fd,
                    values.ctypes.data + unwritten * nbytes,
                    self._offsets(rows),
                    nbytes,
                )
                unwritten = np.flatnonzero(results != nbytes)
        for i in unwritten.tolist():
            self._write(self._layout.offset + int(rows[i]) * nbytes, values[i].data)

    def will_read(self, first: int, n_rows: int) -> None:
        """Tell the kernel that these rows will be read soon; it brings them into the page cache meanwhile."""
        nbytes = self._layout.row_nbytes
        os.posix_fadvise(
            self._fd, self._layout.offset + first * nbytes, n_rows * nbytes, os.POSIX_FADV_WILLNEED
        )

    def flush(self) -> None:
        """Return when what was written is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._layout.path) from error

    def _read_some(self, rows: Rows, out: Bytes, positions: Rows, flags: int = 0) -> Rows:
        """Read what can be read by one call for many rows; which of the rows, shape (m,), it was not."""
        nbytes = self._layout.row_nbytes
        with self._contexts.take() as requests:
            if requests is None:
                return np.arange(len(rows))
            results = requests.run(
                linux_aio.READ,
                self._fd,
                out.ctypes.data + positions * nbytes,
                self._offsets(rows),
                nbytes,
                flags,
            )
        return np.flatnonzero(results != nbytes)

    def _read_all(self, rows: Rows, out: Bytes, positions: Rows) -> None:
        for i in self._read_some(rows, out, positions).tolist():
            # Which reports what is wrong, if something is.
            self.read_run(int(rows[i]), out[positions[i]])

    def _offsets(self, rows: Rows) -> Rows:
        return self._layout.offset + rows * self._layout.row_nbytes

    def _write(self, offset: int, values: memoryview) -> None:
        done = 0
        while done < len(values):
            try:
                done += os.pwrite(self._fd, values[done:], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._layout.path) from error

    def _read_error(self, number: int) -> ReadError:
        return ReadError(number, f"{os.strerror(number)}, while rows were read", self._layout.path)

    def _check_size(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._layout.end:
            raise ReadError(
                f"{self._layout.path} has shrunk to {size} bytes; its {self._layout.n_rows} rows need {self._layout.end}; "
                "was it written anew while it was streamed?"
            )
