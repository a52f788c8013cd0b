"""MappedStore: rows of local files, gathered from memory maps of the page cache."""

from __future__ import annotations

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
from pinfeed.memory.pages import PAGE, POPULATE_READ, advise_huge_pages
from pinfeed.native.library import library, packing
from pinfeed.native.memory_rows import MemoryPart, MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs, cut_run
from pinfeed.stores.array import copy_runs
from pinfeed.stores.page_cache import can_tell
from pinfeed.stores.sharded_file import RowLayout, ShardedStore
from pinfeed.stores.store import Array

Bytes = npt.NDArray[np.uint8]

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


class MappedStore(ShardedStore):
    """Rows of local files, read-only, in a memory map of each file.

    Args:
        layouts: Layout of the rows of each file, at least one row each.
        maps: Map of each file.
    """

    def __init__(self, layouts: Sequence[RowLayout], maps: Sequence[FileMap]) -> None:
        super().__init__(layouts)
        self._maps = maps
        self._memory_rows: MemoryRows | None = None
        if not self._swapped and maps[0].memory_rows is not None:
            self._memory_rows = joined_rows(maps)

    def gather_unchecked(self, rows: Rows, out: Array) -> None:
        # Another thread may close the store.
        if (memory_rows := self._memory_rows) is None:
            super().gather_unchecked(rows, out)
        else:
            memory_rows.gather(rows, out)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        if (memory_rows := self._memory_rows) is None:
            super().gather_runs(runs, out)
        else:
            # One call copies the runs of all files.
            memory_rows.gather_runs(*runs, out)

    @property
    def memory_rows(self) -> MemoryRows | None:
        """The rows, if the compiled functions can copy them."""
        return self._memory_rows

    def populate(self, start: int, stop: int) -> None:
        """Load the rows [start, stop) into the page cache, and fill the page tables of the maps.

        Raises:
            OSError: If a file has shrunk or cannot be read.
        """
        for number, first, n_rows in cut_run(start, stop, self._ends):
            self._reader(number).populate(first, n_rows)

    def is_cached(self, start: int, stop: int) -> bool | None:
        """Return whether the page cache holds the rows [start, stop); None if unknown."""
        found = [
            self._reader(number).is_cached(first, n_rows)
            for number, first, n_rows in cut_run(start, stop, self._ends)
        ]
        return None if None in found else all(found)

    def close(self) -> None:
        """Unmap the files; a gather that is running keeps its map until it ends."""
        super().close()
        self._memory_rows = None
        self._maps = ()

    def _reader(self, number: int) -> FileMap:
        self._require_open()
        return self._maps[number]


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
