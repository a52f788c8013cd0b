"""MmapStore: rows of a file on disk, or of several shards seen as one, never read whole.

It does what a memory map is used for, without one: rows go from the page cache straight to where
they belong, consecutive ones by preadv, scattered ones by native AIO. So nothing of the file stays
resident in the process, and a file that shrinks is an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, FileMissing, StoreError, WriteBackError
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import safe_repr
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, checked_scatter, shape_to_make, whole_numbers
from pinfeed.stores.disk import linux_aio
from pinfeed.stores.disk.file_reader import FileReader, inode_of
from pinfeed.stores.formats.npy import create, holds, read_header
from pinfeed.stores.formats.row_layout import RowLayout, require_regular
from pinfeed.stores.paths import Path, local_path, local_paths
from pinfeed.stores.sharded_file import ShardedStore, bytes_of
from pinfeed.tensors.dtypes import dtype_of, numpy_dtype_of
from pinfeed.validation.arguments import (
    check_file_to_make,
    check_flag,
    check_path,
    explain_arguments,
)

logger = logging.getLogger("pinfeed")

HINTS = {
    **dict.fromkeys(
        ("mmap_mode", "readonly", "writable"),
        "give mode='r' to read, or mode='r+' to write rows back to the file",
    ),
    **dict.fromkeys(
        ("shape", "offset"),
        "a .npy file says it itself; for a file without a header use MmapStore.raw(path, shape=..., dtype=...)",
    ),
    **dict.fromkeys(("filename", "file"), "the path comes first, without a name"),
}
"""Advice, by the names that numpy has for it."""

# Rows are written in pieces of this size, of which there may be copies.
_PIECE_BYTES = 4 << 20


class MmapStore(ShardedStore[FileReader]):
    """Rows of a .npy file on disk; ``raw`` and ``safetensors`` open other files.

    Args:
        path: A file, a pattern (``"features-*.npy"``, in sorted order) or a sequence of files;
            several are shards of one store and may differ in their number of rows.
        mode: ``"r"``, or ``"r+"`` to write rows back through to the file.
        dtype: Take the items for this dtype of the same size: ``"bfloat16"``, which a .npy file
            cannot name (numpy saves it as ``V2``).
        keep_cache: Whether the kernel's page cache keeps what was read. False leaves it as it was
            found. None keeps it if the files fit in the memory that is free when reading begins.

    Raises:
        FileMissing: A file, or every file of a pattern, is missing.
        StoreError: Not a .npy file, truncated, no rows, Fortran order, a dtype that torch has not,
            or shards that do not match.
        ArgumentError: If ``path`` is no path, ``mode`` neither "r" nor "r+", or ``keep_cache``
            neither True, False nor None.
        UnknownArgument: If there is no such argument. The message says what to give instead.
    """

    _here: ClassVar[tuple[str, ...]] = (*ShardedStore._here, "_dirty", "_contexts", "_inodes")

    @explain_arguments(HINTS)
    def __init__(
        self,
        path: Path | Sequence[Path],
        *,
        mode: str = "r",
        dtype: npt.DTypeLike | None = None,
        keep_cache: bool | None = None,
    ) -> None:
        wanted = None if dtype is None else dtype_of(dtype, "MmapStore")
        self._begin([read_header(p, wanted) for p in local_paths(path)], mode, keep_cache)

    @classmethod
    def raw(
        cls,
        path: Path | Sequence[Path],
        *,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        offset: int = 0,
        mode: str = "r",
        keep_cache: bool | None = None,
    ) -> MmapStore:
        """Rows of a file that holds nothing else, or has them after ``offset`` bytes.

        Args:
            path: As above.
            shape: (n_rows, *row_shape) of each file, whole numbers, at least 1; with n_rows -1, as
                many rows as the file has.
            dtype: Of the items, as numpy or torch spells it; ``">f4"`` for the other byte order.
            offset: Bytes before the first row.
            mode: As above.
            keep_cache: As above.

        Raises:
            FileMissing: As above.
            StoreError: Truncated, no rows, another shape or offset than said above, bytes left over
                with n_rows -1, or a dtype that torch has not.
        """
        store = cls.__new__(cls)
        store._begin(
            [_raw_extent(p, shape, dtype, offset) for p in local_paths(path)], mode, keep_cache
        )
        return store

    @classmethod
    def safetensors(
        cls,
        path: Path | Sequence[Path],
        name: str,
        *,
        mode: str = "r",
        keep_cache: bool | None = None,
    ) -> MmapStore:
        """Rows of the tensor ``name`` of a safetensors file, whose header that format's own library reads.

        Args:
            path: As above.
            name: Of the tensor; its first axis are the rows.
            mode: As above.
            keep_cache: As above.

        Raises:
            MissingDependency: The library is not installed.
            FileMissing: As above.
            StoreError: Not a safetensors file, no such tensor, no rows, or a dtype that torch has
                not.
        """
        from pinfeed.stores.formats.safetensors import read_extent

        store = cls.__new__(cls)
        store._begin([read_extent(p, name) for p in local_paths(path)], mode, keep_cache)
        return store

    @classmethod
    def create(
        cls,
        path: Path,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike = "float32",
        *,
        overwrite: bool = False,
    ) -> MmapStore:
        """A new .npy file of zeros, shape (n_rows, *row_shape), open for writing; it takes room on the disk as it is written.

        Raises:
            StoreError: If the file is there already, and ``overwrite`` is False; or if the shape
                has no rows, rows of no bytes, something else than whole numbers, or more bytes than
                a file can have; or if there is no such dtype, or ``path`` is a directory. No file
                is made then, or replaced.
            FileMissing: If the directory of the file does not exist.
            ArgumentError: If ``path`` is no path, or ``overwrite`` is neither True nor False.
        """
        check_flag(overwrite, "overwrite")
        items, name = dtype_of(dtype, "MmapStore"), check_file_to_make(local_path(check_path(path)))
        sizes = shape_to_make(shape, items, name)
        if min(sizes) < 1:
            raise StoreError(
                f"{name}: shape {sizes} has rows of no bytes; expected at least 1 in each place"
            )
        create(name, sizes, items, overwrite=overwrite)
        return cls(path, mode="r+", dtype=items)

    @contextlib.contextmanager
    def mapped(self) -> Iterator[Array]:
        """All rows of the one file as an array, to be filled as a whole, and on the disk when the context ends.

        Room on the disk is taken first: a map that finds none later would end the process.

        Raises:
            StoreError: There are several files, or they are not open for writing.
            OSError: The disk is full.
        """
        if len(self._extents) > 1 or not self.writable or self._swapped:
            raise StoreError(
                f"{self!r} cannot be filled as a whole; expected one file, open for writing, in this machine's byte order"
            )
        extent = self._extents[0]
        with open(extent.path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, extent.end)
            array = np.memmap(
                file, self.dtype, "r+", extent.offset, (extent.n_rows, *extent.row_shape)
            )
            yield np.asarray(array)
            array.flush()

    def _begin(self, extents: Sequence[RowLayout], mode: str, keep_cache: bool | None) -> None:
        if mode not in ("r", "r+"):
            raise ArgumentError(f"mode={mode!r}: expected 'r' or 'r+'")
        if keep_cache is not None:
            check_flag(keep_cache, "keep_cache")
        self._mode = mode
        self._keep_cache = keep_cache
        super().__init__(extents)
        if mode == "r+" and len(set(map(os.path.realpath, self.paths))) < len(self.paths):
            raise ArgumentError(
                f"a file stands twice among the shards {self.paths}; with mode='r+' give each once"
            )

    def _begin_here(self) -> None:
        super()._begin_here()
        # Shards that were written since their last fsync, and how often.
        self._dirty: dict[int, int] = {}
        self._contexts = linux_aio.AioContextPool()
        self._inodes = [inode_of(os.stat(extent.path)) for extent in self._extents]

    @safe_repr
    def __repr__(self) -> str:
        return f"MmapStore({self.paths[0] if len(self.paths) == 1 else self.paths!r}, mode={self._mode!r})"

    def __enter__(self) -> MmapStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def writable(self) -> bool:  # type: ignore[override]  # the base has it once and for all
        return self._mode == "r+"

    @property
    def resident_bytes(self) -> int:  # type: ignore[override]  # as above
        """What a scatter takes to bring rows into the order and the byte order of the file, in bytes."""
        return 2 * _PIECE_BYTES if self.writable else 0

    @functools.cached_property
    def keep_cache(self) -> bool:
        """Whether the page cache keeps what is read."""
        if self._keep_cache is not None:
            return self._keep_cache
        return self.n_rows * self.row_nbytes <= free_host_bytes()

    @property
    def version(self) -> object:
        """Something else once a file was written or replaced."""
        try:
            stats = [os.stat(path) for path in self.paths]
        except FileNotFoundError:
            # An open file goes on.
            return None
        return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

    def will_gather(self, start: int, stop: int) -> None:
        """Tell the kernel that the rows [start, stop) will be read soon; it brings them into the page cache meanwhile."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = min(stop, int(self._ends[number]))
            self._shard(number).will_read(start - int(self._starts[number]), end - start)
            start, number = end, number + 1

    def scatter(self, rows: Rows, values: Array) -> None:
        """Write rows through to the file; other readers of it see them at once, ``flush`` makes them durable.

        Raises:
            WriteBackError: The store was opened with mode="r", or ``values`` has another shape or
                dtype than the rows.
            RowIndexError: If a row is out of range or negative.
            OSError: What the file system says, with the name of the file.
        """
        if not self.writable:
            raise WriteBackError(f'{self!r} is read-only; open it with MmapStore(path, mode="r+")')
        rows = checked_scatter(self, rows, values)
        step = max(1, _PIECE_BYTES // max(1, self.row_nbytes))
        for i in range(0, len(rows), step):
            piece = values[i : i + step]
            source = bytes_of(np.ascontiguousarray(piece.byteswap() if self._swapped else piece))
            for number, shard_rows, positions in self._split(rows[i : i + step]):
                self._write(
                    number,
                    shard_rows,
                    source if len(positions) == len(source) else source[positions],
                )

    def flush(self) -> None:
        """Return when every row written so far is on the disk (fsync)."""
        with self._lock:
            dirty = dict(self._dirty)
        with contextlib.ExitStack() as stack:
            # Every shard gets its fsync, and the first error is raised.
            for number, count in dirty.items():
                stack.callback(self._flush, number, count)

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            super().close()
            self._contexts.close()

    def _open_shard(self, number: int) -> FileReader:
        extent, wanted = self._extents[number], self._inodes[number]
        return FileReader(
            extent, self._contexts, inode=wanted, writable=self.writable, keep_cache=self.keep_cache
        )

    def _evict(self, number: int, shard: FileReader) -> None:
        if number in self._dirty:
            shard.flush()
            del self._dirty[number]

    def _write(self, number: int, rows: Rows, values: npt.NDArray[np.uint8]) -> None:
        shard = self._shard(number)
        try:
            shard.write_rows(rows, values)
        finally:
            with self._lock:
                self._dirty[number] = self._dirty.get(number, 0) + 1

    def _flush(self, number: int, count: int) -> None:
        self._shard(number).flush()
        with self._lock:
            if self._dirty.get(number) == count:
                # Else it was written again meanwhile.
                del self._dirty[number]


def open_created(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> MmapStore:
    """Open for writing a file that ``MmapStore.create`` made with this shape and dtype.

    Raises:
        StoreError: If the file is another one, or is truncated.
    """
    items, name = dtype_of(dtype, "MmapStore"), local_path(path)
    if not holds(name, shape, items):
        raise StoreError(
            f"{name} is there already, and is no .npy file of shape {shape}, {items}; expected another path, or overwrite=True to "
            "replace the file"
        )
    return MmapStore(name, mode="r+", dtype=items)


def _raw_extent(path: str, shape: Sequence[int], dtype: npt.DTypeLike, offset: int) -> RowLayout:
    items = numpy_dtype_of(dtype, path)
    size = _size(path)
    n_rows, *row_shape = whole_numbers(shape, path)
    if type(offset) is bool or not hasattr(offset, "__index__"):
        raise StoreError(f"{path}: offset={offset!r}; expected a whole number of bytes")
    if n_rows < -1 or min(row_shape, default=0) < 0 or offset < 0:
        raise StoreError(
            f"{path}: shape={shape}, offset={offset}; expected (n_rows, ...), or (-1, ...) for as many as there are"
        )
    row_nbytes = items.itemsize * math.prod(row_shape)
    if not row_nbytes:
        raise StoreError(
            f"{path}: shape={shape} of {items} has rows of no bytes; expected at least 1 in each place"
        )
    if n_rows == -1:
        n_rows, rest = divmod(max(0, size - offset), row_nbytes)
        if rest:
            raise StoreError(
                f"{path}: {size} bytes less offset={offset} are {n_rows} rows of {row_nbytes} bytes and {rest} bytes more; "
                "give the shape, dtype and offset that the file was written with, or the number of rows"
            )
    return RowLayout(path, items, n_rows, tuple(row_shape), int(offset)).check(size)


def _size(path: str) -> int:
    try:
        require_regular(path)
        status = os.stat(path)
    except FileNotFoundError:
        raise FileMissing(f"{path}: no such file (looked in {os.getcwd()})") from None
    if stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{path} is a directory; expected a file, or a pattern such as {path}/*")
    return status.st_size


def store_of_memmap(array: np.memmap[Any, Any]) -> MmapStore | None:
    """A store of the file that ``numpy.load(path, mmap_mode=...)`` has mapped; None for any other array.

    A memory map would stay resident as far as it was touched, and would end the process where the
    file has shrunk.
    """
    if (
        not isinstance(array.base, mmap.mmap)
        or array.filename is None
        or array.mode not in ("r", "r+")
    ):
        # A part of a map, or one whose changes are its own.
        return None
    try:
        header = read_header(os.fspath(array.filename))
    except StoreError:
        return None
    if (header.offset, header.dtype, header.n_rows, *header.row_shape) != (
        array.offset,
        array.dtype,
        *array.shape,
    ):
        return None
    try:
        inode = _mapped_inode(array.ctypes.data)
    except OSError as error:
        logger.warning(
            "%s: which file the memory map is of cannot be read (%s); the map is served as the array that it is, and what is touched of "
            "it stays resident; give the path in place of the map",
            header.path,
            error,
        )
        return None
    # Another file may have taken its name since.
    return MmapStore(header.path, mode=array.mode) if os.stat(header.path).st_ino == inode else None


def _mapped_inode(address: int) -> int:
    """The inode of the file that is mapped at an address, as proc(5) tells.

    Raises:
        OSError: If there is no ``/proc`` to read.
    """
    with open("/proc/self/maps") as file:
        for line in file:
            span, _, _, _, inode, *_ = line.split()
            start, stop = (int(bound, 16) for bound in span.split("-"))
            if start <= address < stop:
                return int(inode)
    return 0
