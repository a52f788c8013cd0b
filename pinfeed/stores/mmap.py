"""MmapStore: rows of a .npy file, or of several shards seen as one, never read whole.

It does what a memory map is used for, without one: rows go from the page cache straight to where they belong, consecutive ones by
preadv, scattered ones by native AIO. So nothing of the file stays resident in the process, and a file that shrinks is an error.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import check_dtype, dtype_of
from ..errors import ArgumentError, ClosedError, FileMissing, StoreError, WriteBackError
from ..rows import Rows
from . import aio
from .base import Array, run_of
from .npy import NpyHeader, read_header
from .shard import Shard

Path = str | os.PathLike[str]

_PIECE_BYTES = 4 << 20  # rows are written in pieces of this size, of which there may be copies
_OPEN_SHARDS = 64  # of a thousand, so many hold a descriptor at a time


class MmapStore:
    """Rows of a .npy file on disk.

    Args:
        path: A file, a pattern (``"features-*.npy"``, in sorted order) or a sequence of files; several are shards of one store and
            may differ in their number of rows.
        mode: ``"r"``, or ``"r+"`` to write rows back through to the file.
        dtype: Take the items for this dtype of the same size: ``"bfloat16"``, which a .npy file cannot name (numpy saves it as ``V2``).

    Raises:
        FileMissing: A file, or every file of a pattern, is missing.
        StoreError: Not a .npy file, truncated, no rows, Fortran order, a dtype that torch has not, or shards that do not match.
    """

    def __init__(self, path: Path | Sequence[Path], *, mode: str = "r", dtype: npt.DTypeLike | None = None) -> None:
        if mode not in ("r", "r+"):
            raise ArgumentError(f"mode={mode!r}: expected 'r' or 'r+'")
        wanted = None if dtype is None else dtype_of(dtype, "dtype")
        headers = [read_header(p, wanted) for p in _paths(path)]
        first = headers[0]
        for header in headers:
            if (header.dtype, header.row_shape) != (first.dtype, first.row_shape):
                raise StoreError(
                    f"shards do not match: {first.path} has rows of shape {first.row_shape}, {first.dtype}; "
                    f"{header.path} of shape {header.row_shape}, {header.dtype}"
                )
        if mode == "r+" and len(set(map(os.path.realpath, self._names(headers)))) < len(headers):
            raise ArgumentError(f"a file stands twice among the shards {self._names(headers)}; with mode='r+' give each once")
        self._ends = np.cumsum([header.n_rows for header in headers])
        if self._ends[-1] == 0:
            raise StoreError(f"{first.path} has no rows (shape {(first.n_rows, *first.row_shape)}); expected at least one")
        self._headers, self._mode = headers, mode
        self._dtype, self._swapped = check_dtype(first.dtype, first.path), not first.dtype.isnative
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._dirty: dict[int, int] = {}  # shards that were written since their last fsync, and how often
        self._idle: list[aio.Requests] = []
        self._lock = threading.Lock()  # guards _open, _dirty and _idle: reader and writer use the store at the same time
        self._closed = False

    def __repr__(self) -> str:
        return f"MmapStore({self.paths[0] if len(self.paths) == 1 else self.paths!r}, mode={self._mode!r})"

    def __enter__(self) -> MmapStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def paths(self) -> list[str]:
        """The files, in the order of their rows."""
        return self._names(self._headers)

    @staticmethod
    def _names(headers: Sequence[NpyHeader]) -> list[str]:
        return [header.path for header in headers]

    @property
    def n_rows(self) -> int:
        return int(self._ends[-1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._headers[0].row_shape

    @property
    def resident_bytes(self) -> int:
        """What a scatter takes to bring rows into the order and the byte order of the file, in bytes."""
        return 2 * _PIECE_BYTES if self.writable else 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self._headers[0].row_nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def writable(self) -> bool:
        return self._mode == "r+"

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``.

        Raises:
            ReadError: A file has shrunk, or cannot be read.
        """
        target = _bytes_of(out)
        for number, shard_rows, positions in self._split(rows):
            shard = self._shard(number)
            run, place = run_of(shard_rows), run_of(positions)
            if run is not None and place is not None:
                shard.read_run(run.start, target[place])
            else:
                with self._requests() as requests:
                    shard.read_rows(shard_rows, target, positions, requests)
        if self._swapped:
            out.byteswap(inplace=True)

    def scatter(self, rows: Rows, values: Array) -> None:
        """Write rows through to the file; other readers of it see them at once, ``flush`` makes them durable.

        Raises:
            WriteBackError: The store was opened with mode="r".
            OSError: What the file system says, with the name of the file.
        """
        if not self.writable:
            raise WriteBackError(f'{self!r} is read-only; open it with MmapStore(path, mode="r+")')
        step = max(1, _PIECE_BYTES // max(1, self.row_nbytes))
        for i in range(0, len(rows), step):
            piece = values[i : i + step]
            source = _bytes_of(np.ascontiguousarray(piece.byteswap() if self._swapped else piece))
            for number, shard_rows, positions in self._split(rows[i : i + step]):
                self._write(number, shard_rows, source if len(positions) == len(source) else source[positions])

    def flush(self) -> None:
        """Return when every row written so far is on the disk (fsync)."""
        with self._lock:
            dirty = dict(self._dirty)
        with contextlib.ExitStack() as stack:  # every shard gets its fsync, and the first error is raised
            for number, count in dirty.items():
                stack.callback(self._flush, number, count)

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._open.clear()
            while self._idle:
                self._idle.pop().close()

    def _write(self, number: int, rows: Rows, values: npt.NDArray[np.uint8]) -> None:
        shard = self._shard(number)
        try:
            with self._requests() as requests:
                shard.write_rows(rows, values, requests)
        finally:
            with self._lock:
                self._dirty[number] = self._dirty.get(number, 0) + 1

    def _flush(self, number: int, count: int) -> None:
        self._shard(number).flush()
        with self._lock:
            if self._dirty.get(number) == count:  # else it was written again meanwhile
                del self._dirty[number]

    @contextlib.contextmanager
    def _requests(self) -> Iterator[aio.Requests | None]:
        """A context for this thread's requests: the reader and the writer each take one, at the same time."""
        with self._lock:
            requests = self._idle.pop() if self._idle else None
        if requests is None or requests.inherited:
            requests = aio.Requests.make() if self.row_nbytes else None
        try:
            yield requests
        except BaseException:
            if requests is not None:
                requests.close()  # it may hold answers that nobody has fetched: the next one to use it would take them for his own
            raise
        if requests is not None:
            with self._lock:
                self._idle.append(requests)

    def _split(self, rows: Rows) -> list[tuple[int, Rows, Rows]]:
        """The rows by shard: (shard, rows within it, their positions in ``rows``)."""
        if len(self._headers) == 1:
            return [(0, rows, np.arange(len(rows)))]
        shard_of = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate(([0], self._ends[:-1]))
        parts: list[tuple[int, Rows, Rows]] = []
        for number in np.unique(shard_of).tolist():
            positions = np.flatnonzero(shard_of == number)
            parts.append((number, rows[positions] - starts[number], positions))
        return parts

    def _shard(self, number: int) -> Shard:
        """The shard, opened. One that falls out of the cache closes when the last thread that reads it is done."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed; open the file again")
            shard = self._open.pop(number, None) or Shard(self._headers[number], writable=self.writable)
            self._open[number] = shard
            if len(self._open) > _OPEN_SHARDS:
                oldest, evicted = self._open.popitem(last=False)
                if oldest in self._dirty:
                    evicted.flush()
                    del self._dirty[oldest]
            return shard


def store_of_memmap(array: np.memmap[Any, Any]) -> MmapStore | None:
    """A store of the file that ``numpy.load(path, mmap_mode=...)`` has mapped; None for any other array.

    A memory map would stay resident as far as it was touched, and would end the process where the file has shrunk.
    """
    if not isinstance(array.base, mmap.mmap) or array.filename is None or array.mode not in ("r", "r+"):
        return None  # a part of a map, or one whose changes are its own
    try:
        header = read_header(os.fspath(array.filename))
    except StoreError:
        return None
    if (header.offset, header.dtype, header.n_rows, *header.row_shape) != (array.offset, array.dtype, *array.shape):
        return None
    if os.stat(header.path).st_ino != _mapped_inode(array.ctypes.data):
        return None  # another file has taken its name since
    return MmapStore(header.path, mode=array.mode)


def _mapped_inode(address: int) -> int:
    """The inode of the file that is mapped at an address, as proc(5) tells."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, stop = (int(bound, 16) for bound in span.split("-"))
        if start <= address < stop:
            return int(inode)
    return 0


def _paths(path: Path | Sequence[Path]) -> list[str]:
    if isinstance(path, (str, os.PathLike)):
        name = os.fspath(path)
        if not glob.has_magic(name) or os.path.exists(name):
            return [name]
        found = sorted(glob.glob(name))
        if not found:
            raise FileMissing(f"{name}: no file matches this pattern (looked in {os.getcwd()})")
        return found
    try:
        names = [os.fspath(p) for p in path]
    except TypeError:
        raise ArgumentError(f"path={path!r}: expected a path, a pattern or a sequence of paths") from None
    if not names:
        raise ArgumentError("an empty list of files; expected at least one .npy file")
    return names


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """Shape (n, row_nbytes), on the same memory."""
    n = len(array)
    return array.reshape(-1).view(np.uint8).reshape(n, array.nbytes // n if n else 0)
