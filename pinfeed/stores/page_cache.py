"""Pages of a file that the kernel keeps in memory: PageCache drops them, FileMap shows them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ReadError
from pinfeed.memory.pages import PAGE, POPULATE_READ, Bytes, advise_huge_pages
from pinfeed.native.library import library, packing
from pinfeed.native.memory_rows import MemoryPart, MemoryRows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import copy_runs
from pinfeed.stores.file_store import RowLayout

Mask = npt.NDArray[np.bool_]

# Bytes of a step: a step with a cached page counts as cached.
_STEP_BYTES = 1 << 20
# Bytes of a file that are mapped at a time to look at their pages.
_MAP_BYTES = 1 << 30
# Bytes that are read between two sweeps.
_SWEEP_BYTES = 32 << 20
# Largest unit of the page cache (a folio), and its alignment, in bytes.
_FOLIO_BYTES = 2 << 20
# Bytes around the last read that a sweep keeps, because other threads are reading there.
_MARGIN_BYTES = 16 << 20
# One page is checked per this many bytes, as a sample of all pages.
_SAMPLED_BYTES = 4 << 20

_MAPPED = packing(1)(1)
_UNMAPPED = packing(1)(-1)

_libc = ctypes.CDLL(None, use_errno=True)

# f_type of statfs(2), of linux/magic.h: ext2 to ext4, XFS, Btrfs, F2FS, overlay.
_LOCAL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x794C7630})
_TMPFS = 0x01021994
# Larger than struct statfs (120 bytes on 64-bit Linux), which begins with f_type.
_STATFS_BYTES = 256


class PageCache:
    """Page cache of one open file, which can be restored to its earlier state.

    Pages that were cached before the file was opened stay. Sweeps drop pages that streaming has
    added. A sweep ends at the border of a folio, because the kernel cannot drop a part of a folio,
    and waits for all processors before it gives up.

    Args:
        fd: Descriptor of the file, which belongs to the caller.
        size: Size of the file, in bytes.
        keep: Whether data that was read stays in the page cache; if so, nothing is dropped.
    """

    def __init__(self, fd: int, size: int, *, keep: bool) -> None:
        self._fd = fd
        self._size = size
        self._keep = keep
        self._n_unswept_bytes = 0
        self._uncached = [] if keep else _uncached_ranges(fd, size)
        if not keep:
            # Otherwise, the kernel mistakes rows that are already cached for a sequential read, and
            # reads far ahead.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def add_read(self, begin: int, nbytes: int) -> None:
        """Count bytes that were read from ``begin`` on, and sweep if enough were read.

        Any thread may call it; a race delays a sweep, or adds one.
        """
        if self._keep:
            return
        self._n_unswept_bytes += nbytes
        if self._n_unswept_bytes > _SWEEP_BYTES:
            self._n_unswept_bytes = 0
            before = (begin - _MARGIN_BYTES) // _FOLIO_BYTES * _FOLIO_BYTES
            after = -(-(begin + nbytes + _MARGIN_BYTES) // _FOLIO_BYTES) * _FOLIO_BYTES
            self._drop(0, before)
            self._drop(after, self._size)

    def drop_all(self) -> None:
        """Drop all pages that were added, because nothing more is read."""
        if not self._keep:
            self._drop(0, self._size)

    def _drop(self, begin: int, end: int) -> None:
        """Drop the bytes [begin, end), except those that were cached before."""
        for start, stop in self._uncached:
            first = max(start, begin)
            last = min(stop, end)
            if first < last:
                os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)


def cached_pages(fd: int, begin: int, end: int) -> Mask:
    """Return which pages of the bytes [begin, end) of a file are in the page cache.

    A read with RWF_NOWAIT would also show this, but it loads the page that it requests. The kernel
    answers only users who own the file or may write it; for other users, no page counts as cached.

    Args:
        fd: Descriptor of the file.
        begin: First byte, a multiple of ``mmap.ALLOCATIONGRANULARITY``.
        end: Position after the last byte.
    """
    pages = np.zeros(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
    if len(pages) and can_tell(fd):
        with contextlib.closing(
            mmap.mmap(fd, end - begin, prot=mmap.PROT_READ, offset=begin)
        ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            _libc.mincore(
                ctypes.c_void_p(address),
                ctypes.c_size_t(end - begin),
                ctypes.c_void_p(pages.ctypes.data),
            )
    return (pages & 1).astype(np.bool_)


def can_tell(fd: int) -> bool:
    """Return whether the kernel reports to this process which pages of the file are cached."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)


def _uncached_ranges(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file, in bytes, that have no page in the page cache."""
    ranges: list[tuple[int, int]] = []
    for begin in range(0, size, _MAP_BYTES):
        pages = cached_pages(fd, begin, min(begin + _MAP_BYTES, size))
        first_pages = np.arange(0, len(pages), _STEP_BYTES // mmap.PAGESIZE)
        is_cached = np.add.reduceat(pages, first_pages, dtype=np.intp) > 0
        # Steps at which an uncached range begins or ends.
        borders = np.flatnonzero(np.diff(np.concatenate(([True], is_cached, [True]))))
        edges = begin + _STEP_BYTES * borders
        ranges += [(start, min(stop, size)) for start, stop in edges.reshape(-1, 2).tolist()]
    return ranges


class FileMap:
    """Rows of one file in a shared memory map.

    The map needs no memory of its own: it shows the page cache, which all processes share, and in
    which writes are visible at once. The kernel sends SIGBUS to a thread that touches a page after
    the end of the file, or one that the disk fails to load. Compiled copies survive that, and a
    copy from a file that has shrunk is an error.

    Without the compiled functions, the kernel ends the process. Each gather then checks the size of
    the file first. The check cannot detect a file that shrinks during the copy, which takes a few
    hundred microseconds for a batch of a few MiB. For cold rows, ``populate`` reports a failure of
    the disk as an error.

    Args:
        fd: Descriptor of the file, used to map it and to check its size.
        layout: Layout of the rows of the file, at least one.
        check_size: Raises an error if the file has shrunk, and keeps the descriptor open.
    """

    def __init__(self, fd: int, layout: RowLayout, check_size: Callable[[], None]) -> None:
        self._fd = fd
        self._layout = layout
        self._check_size = check_size
        self._can_tell = can_tell(fd)
        check_size()
        mapping = mmap.mmap(fd, layout.end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        # The kernel then reads cold parts of the file in large units and maps each as one. Random
        # gathers then seldom wait for the page tables.
        advise_huge_pages(mapping)
        # The map is unmapped with the last array on it.
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._address = self._bytes.ctypes.data
        n, nbytes = layout.n_rows, layout.row_nbytes
        self.memory_rows: MemoryRows | None = None
        """The rows, if the compiled functions can copy them."""
        if (found := library()) is not None and nbytes:
            self.memory_rows = joined_rows([self])
            found.count_maps(_MAPPED)
            weakref.finalize(self._bytes, found.count_maps, _UNMAPPED)
        self._rows: Bytes = np.ndarray((n, nbytes), np.uint8, self._bytes, layout.offset)

    def read_runs(self, runs: Runs, out: Bytes) -> None:
        """Copy runs of rows to their positions in ``out``, shape (n, row_nbytes).

        Raises:
            ReadError: If the file has shrunk or cannot be read.
        """
        if self.memory_rows is not None:
            self.memory_rows.gather_runs(*runs, out)
        else:
            self._check_size()
            copy_runs(self._rows, runs.merged(), out)

    def populate(self, first: int, n_rows: int) -> None:
        """Load rows into the page cache, and fill the page tables of the map.

        Raises:
            OSError: If the file has shrunk or cannot be read.
        """
        begin, nbytes = self._pages(first, n_rows)
        # mmap.madvise would hold the interpreter's lock until the disk has been read.
        if not _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), POPULATE_READ):
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number), self._layout.path)
        # An older kernel refuses the advice. Reading a byte of each page has the same effect.
        self._check_size()
        self._bytes[begin - self._address :][:nbytes:PAGE].max()

    def is_cached(self, first: int, n_rows: int) -> bool | None:
        """Return whether the page cache holds rows; None if the kernel does not report it.

        Only one page in 4 MiB is checked, because a check of all pages takes a quarter of the time
        of gathering them.
        """
        if not self._can_tell:
            return None
        begin, nbytes = self._pages(first, n_rows)
        page = ctypes.c_ubyte()
        for address in range(begin, begin + nbytes, _SAMPLED_BYTES):
            _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), ctypes.byref(page))
            if not page.value & 1:
                return False
        return True

    def _pages(self, first: int, n_rows: int) -> tuple[int, int]:
        """Return the address of the first page of rows, and the bytes from there to their end."""
        start = self._layout.begin(first)
        begin = start // PAGE * PAGE
        return self._address + begin, self._layout.begin(first + n_rows) - begin


def joined_rows(maps: Sequence[FileMap]) -> MemoryRows:
    """Return the rows of maps, one after the other, for the compiled functions."""
    owner = [one._bytes for one in maps]
    parts: list[MemoryPart] = []
    for one in maps:
        layout, end = one._layout, one._layout.end
        address = one._address + layout.offset
        parts.append(
            MemoryPart(address, layout.n_rows, layout.row_nbytes, one._address + end, end, one._fd)
        )
    # The checks of the size also keep the descriptors open.
    checks = [(one._layout, one._check_size) for one in maps]
    error = functools.partial(_read_error, checks)
    return MemoryRows(owner, maps[0]._layout.row_nbytes, parts, error)


def _read_error(checks: Sequence[tuple[RowLayout, Callable[[], None]]]) -> ReadError:
    """Return the error of a compiled copy that has failed."""
    for _, check_size in checks:
        try:
            check_size()
        except ReadError as error:
            return error.with_traceback(None)
    layout = checks[0][0]
    others = f" or of {len(checks) - 1} other files" if len(checks) > 1 else ""
    return ReadError(
        errno.EIO,
        f"a page of the rows (bytes {layout.offset} to {layout.end} of the file{others}) could not "
        "be loaded, because the disk failed, or the file was shorter for a moment; expected files "
        "that stay as they are while they are streamed; read them again, or copy them to another "
        "disk",
        layout.path,
    )


def is_safe_to_map(path: str) -> bool:
    """Return whether reads from a map fail only if the file shrinks or its disk fails.

    A network file system may learn too late that a file has shrunk. Unknown file systems count as
    network file systems. In tmpfs, reading a hole of a file needs memory, which may not be
    available.
    """
    status = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _libc.statfs(os.fsencode(path), ctypes.byref(status)):
        return False
    if status[0] == _TMPFS:
        found = os.stat(path)
        return found.st_blocks * 512 >= found.st_size
    return status[0] in _LOCAL
