"""FileReader: one open file whose rows are read and written."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

from pinfeed.errors import FileMissing, ReadError
from pinfeed.memory.pages import Bytes
from pinfeed.native.library import Kind, request_each
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import copy_runs
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.page_cache import FileMap, PageCache
from pinfeed.stores.paths import FileKey
from pinfeed.threads.call import Call
from pinfeed.threads.pool import ThreadPool

# Reads that wait for the disk at the same time. On a virtual disk and on NVMe, more were no faster
# and fewer did not saturate the disk.
_MAX_THREADS = 16
_SPAN_BYTES = 512 << 10
"""Bytes of a file that are read at once for runs that overlap, without the end of the last run."""

# Fewest runs that are read together if they overlap or have short gaps.
_SPAN_RUNS = 16
# Fewest rows for which it is worth starting a thread.
_ROWS_PER_THREAD = 4


class FileReader:
    """One open file, which is closed when the last reference to this object is deleted.

    Any thread may use it.

    Args:
        layout: Layout of the rows of the file.
        inode: Identity of the file whose header was read.
        writable: Whether to open the file for ``write_rows``, too.
        keep_cache: Whether data that was read stays in the page cache.

    Raises:
        FileMissing: If the file was removed since its header was read.
        ReadError: If another file has its name now.
    """

    def __init__(
        self, layout: RowLayout, *, inode: FileKey | None, writable: bool, keep_cache: bool
    ) -> None:
        self._layout = layout
        try:
            self._fd = os.open(layout.path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise FileMissing(
                f"{layout.path} no longer exists; it was removed since its header was read"
            ) from None
        # The garbage collector calls the finalizers of the objects of a cycle before it ends a loop
        # in this cycle, which still writes rows. It does not track arrays, and frees them later.
        self._is_open = np.empty(0)
        weakref.finalize(self._is_open, os.close, self._fd)
        found = os.fstat(self._fd)
        if (found.st_dev, found.st_ino) != inode:
            raise ReadError(
                f"{layout.path} was replaced by another file since its header was read; open it "
                "again"
            )
        self._check_size()
        self._cache = PageCache(self._fd, layout.end, keep=keep_cache)
        # Finalizers run in reverse order, so this one runs before the descriptor is closed.
        weakref.finalize(self._is_open, self._cache.drop_all)

    def read_runs(self, runs: Runs, out: Bytes) -> None:
        """Read runs of rows to their positions in ``out``.

        Rows that are contiguous in the file and in ``out`` are one request. The calling thread
        copies rows that are in the page cache. For the other rows, several threads wait for the
        disk at the same time.

        Args:
            runs: Runs in range.
            out: C-contiguous, shape (n, row_nbytes).

        Raises:
            ReadError: If the file has shrunk or cannot be read.
        """
        runs = runs.merged()
        if len(runs.starts) >= _SPAN_RUNS and self._layout.row_nbytes:
            runs = self._read_spans(runs, out)
        if len(runs.lengths) == 1:
            self._read_one(runs, 0, out)
        else:
            self._read_each(runs, out)

    def _read_spans(self, runs: Runs, out: Bytes) -> Runs:
        """Read ascending runs that overlap or have short gaps; return the other runs.

        Most bytes of such runs, which windows make, are read once.
        """
        starts, lengths, _ = runs
        nbytes = self._layout.row_nbytes
        steps = starts[1:] - starts[:-1]
        is_near = (steps >= 0) & (steps <= lengths[:-1] + mmap.PAGESIZE // nbytes)
        cuts = np.flatnonzero(~is_near)
        if len(starts) - len(cuts) < _SPAN_RUNS:
            return runs
        bounds = np.concatenate(([0], cuts + 1, [len(starts)]))
        counts = bounds[1:] - bounds[:-1]
        is_long = counts >= _SPAN_RUNS
        for begin, n_runs in zip(
            bounds[:-1][is_long].tolist(), counts[is_long].tolist(), strict=True
        ):
            end = begin + n_runs
            step = _even_step(Runs(*(numbers[begin:end] for numbers in runs)))
            while begin < end:
                limit = starts.item(begin) + _SPAN_BYTES // nbytes
                stop = begin + max(1, int(starts[begin:end].searchsorted(limit)))
                self._read_span(Runs(*(numbers[begin:stop] for numbers in runs)), out, step)
                begin = stop
        return runs.take(np.flatnonzero(~is_long.repeat(counts)))

    def _read_span(self, runs: Runs, out: Bytes, step: int | None) -> None:
        """Read the rows from the first to the last one of ascending runs, and copy the runs.

        Args:
            runs: The runs.
            out: C-contiguous, shape (n, row_nbytes).
            step: Distance of the runs, if it is even; see ``_even_step``.
        """
        first = runs.starts.item(0)
        nbytes = self._layout.row_nbytes
        n_rows = (runs.starts + runs.lengths).max().item() - first
        span = np.empty((n_rows, nbytes), np.uint8)
        self._read_bytes(self._layout.begin(first), span.reshape(-1))
        if step is not None:
            # numpy copies such runs in half the time of a copy of each.
            n, length = len(runs.starts), runs.lengths.item(0)
            begin = runs.places.item(0)
            target = out[begin : begin + n * length].reshape(n, length * nbytes)
            target[...] = np.ndarray(target.shape, np.uint8, span, 0, (step * nbytes, 1))
            return
        within = runs._replace(starts=runs.starts - first)
        if (memory_rows := MemoryRows.of_array(span)) is None:
            copy_runs(span, within, out)
        else:
            memory_rows.gather_runs(*within, out)

    def _read_bytes(self, begin: int, out: Bytes) -> None:
        """Read the bytes from ``begin`` on into ``out``, which has one axis."""
        view = out.data
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
        self._cache.add_read(begin, len(view))

    def write_rows(self, rows: Rows, values: Bytes) -> None:
        """Write distinct rows; ``values`` is C-contiguous, shape (n, row_nbytes).

        Consecutive rows are one request.

        Raises:
            ReadError: If the file has shrunk.
            OSError: If the file system refuses; the error names the file.
        """
        # Without this check, a write beyond the end would extend the file, with holes.
        self._check_size()
        nbytes = self._layout.row_nbytes
        if not nbytes:
            return
        runs = Runs.of_rows(rows).merged()
        addresses = values.ctypes.data + runs.places * nbytes
        offsets = self._offsets(runs.starts)
        sizes = runs.lengths * nbytes
        for i in self._request_each(Kind.WRITE, addresses, offsets, sizes).tolist():
            place = runs.places.item(i)
            run = values[place : place + runs.lengths.item(i)]
            self._write(offsets.item(i), run.reshape(-1).data)

    def map(self) -> FileMap:
        """Map the file, for gathers from the page cache."""
        return FileMap(self._fd, self._layout, self._check_size)

    def will_read(self, first: int, n_rows: int) -> None:
        """Advise the kernel to read rows into the page cache, because they will be read soon."""
        os.posix_fadvise(
            self._fd,
            self._layout.begin(first),
            n_rows * self._layout.row_nbytes,
            os.POSIX_FADV_WILLNEED,
        )

    def flush(self) -> None:
        """Wait until all written rows are on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._layout.path) from error

    def _read_each(self, runs: Runs, out: Bytes) -> None:
        """Read runs in any order, first the runs that are in the page cache."""
        if not self._layout.row_nbytes or not len(runs.lengths):
            return
        missing = self._read_some(runs, out, Kind.READ_CACHED)
        if not len(missing):
            return
        # Sorted, so that one thread reads adjacent runs one after the other, and the kernel merges
        # the reads. The order of positions in ``out`` does not matter.
        unread = runs.take(missing[np.argsort(runs.starts[missing])])
        # A run may begin within a page, so a read may load up to one more page.
        self._cache.add_read(
            self._layout.offset,
            unread.n_rows * self._layout.row_nbytes + len(missing) * mmap.PAGESIZE,
        )
        n_threads = min(_MAX_THREADS, len(missing) // _ROWS_PER_THREAD)
        if n_threads < 2:
            self._read_all(unread, out)
            return
        calls = [
            Call(self._read_all, unread.take(part), out)
            for part in np.array_split(np.arange(len(missing)), n_threads)
        ]
        with ThreadPool(n_threads, "pinfeed-disk", calls=calls):
            for call in calls:
                call.result()

    def _read_some(self, runs: Runs, out: Bytes, kind: Kind = Kind.READ) -> Rows:
        """Read runs, and return the positions in ``runs`` of those that were not read."""
        row_nbytes = self._layout.row_nbytes
        addresses = out.ctypes.data + runs.places * row_nbytes
        offsets = self._offsets(runs.starts)
        return self._request_each(kind, addresses, offsets, runs.lengths * row_nbytes)

    def _request_each(self, kind: Kind, addresses: Rows, offsets: Rows, nbytes: Rows) -> Rows:
        """Make many requests together, and return the positions of those that were not done."""
        results = request_each(self._fd, kind, addresses, offsets, nbytes)
        return np.arange(len(nbytes)) if results is None else np.flatnonzero(results != nbytes)

    def _read_all(self, runs: Runs, out: Bytes) -> None:
        for i in self._read_some(runs, out).tolist():
            # This raises an error if the run cannot be read.
            self._read_one(runs, i, out)

    def _read_one(self, runs: Runs, i: int, out: Bytes) -> None:
        place = runs.places.item(i)
        target = out[place : place + runs.lengths.item(i)]
        self._read_bytes(self._layout.begin(runs.starts.item(i)), target.reshape(-1))

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
        # No read uses the position of the descriptor, and fstat takes several times as long.
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if size < self._layout.end:
            raise ReadError(
                f"{self._layout.path} has shrunk to {size} bytes; its {self._layout.n_rows} rows "
                f"need {self._layout.end}; do not rewrite a file while it is streamed"
            )


def _even_step(runs: Runs) -> int | None:
    """Return the distance of runs of one length, which follow each other; None for other runs."""
    starts, lengths, places = runs
    steps = starts[1:] - starts[:-1]
    is_even = (steps == steps[:1]).all() and (lengths == lengths[0]).all()
    follow = is_even and (places[1:] - places[:-1] == lengths[0]).all()
    return steps.item(0) if follow and len(steps) else None
