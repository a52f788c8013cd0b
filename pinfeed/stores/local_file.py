"""LocalFileStore: rows of files on a local disk, read and written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, WriteBackError
from pinfeed.memory.host import FreeHostMemory, free_host_memory
from pinfeed.memory.proc_maps import file_key
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.base import Array, checked_scatter
from pinfeed.stores.disk.file_reader import SPAN_BYTES, FileReader, inode_of
from pinfeed.stores.disk.file_system import is_safe_to_map
from pinfeed.stores.formats.row_layout import RowLayout
from pinfeed.stores.mapped_file import MappedFileStore
from pinfeed.stores.sharded_file import MAX_OPEN, ShardedStore, as_bytes
from pinfeed.validation.arguments import check_flag

# Rows are written in chunks of this size; a scatter may copy a chunk.
_CHUNK_BYTES = 4 << 20
# Gathers that run at the same time: windows are read ahead by this many threads.
_N_GATHERS = 4


class LocalFileStore(ShardedStore[FileReader]):
    """Rows of local files. A scatter writes rows through to the files.

    Args:
        layouts: Layout of the rows of each file.
        mode: ``"r"``, or ``"r+"`` to write rows.
        keep_cache: Whether the page cache keeps the data that was read; None keeps it if the files
            fit in the memory that is free when reading begins.
        memory_map: Whether rows may be gathered from memory maps of the files.

    Raises:
        StoreError: If the shards do not match, or if there are no rows.
        ArgumentError: If ``mode``, ``keep_cache`` or ``memory_map`` is invalid, or if a file is
            given twice and opened for writing.
    """

    _PROCESS_STATE: ClassVar[tuple[str, ...]] = (
        *ShardedStore._PROCESS_STATE,
        "_n_writes",
        "_inodes",
    )

    def __init__(
        self,
        layouts: Sequence[RowLayout],
        mode: str,
        keep_cache: bool | None,
        memory_map: bool,
    ) -> None:
        if mode not in ("r", "r+"):
            raise ArgumentError(f"mode={mode!r}: expected 'r' or 'r+'")
        if keep_cache is not None:
            check_flag(keep_cache, "keep_cache")
        check_flag(memory_map, "memory_map")
        self._mode = mode
        self._keep_cache = keep_cache
        self._memory_map = memory_map
        super().__init__(layouts)
        if mode == "r+" and len(set(map(file_key, self.paths))) < len(self.paths):
            raise ArgumentError(
                f"a file occurs twice in the shards {self.paths}; with mode='r+', give each file "
                "once"
            )

    def _init_process_state(self) -> None:
        super()._init_process_state()
        # Number of writes of each shard that has not been flushed since.
        self._n_writes: dict[int, int] = {}
        self._inodes = [inode_of(os.stat(layout.path)) for layout in self._layouts]

    @property
    def writable(self) -> bool:  # type: ignore[override]  # a class attribute of the base
        return self._mode == "r+"

    @property
    def resident_bytes(self) -> int:  # type: ignore[override]  # as above
        """Memory for a scatter, or for a gather of rows that overlap or have gaps, in bytes.

        A scatter reorders and byte-swaps rows. A gather reads a span of the file for several rows.
        """
        if self.writable:
            return 2 * _CHUNK_BYTES
        has_spans = any(layout.gap for layout in self._layouts)
        return _N_GATHERS * (SPAN_BYTES + self.row_nbytes) if has_spans else 0

    @property
    def keep_cache(self) -> bool:
        """Whether the page cache keeps the data that was read."""
        if self._keep_cache is None:
            self.decide_cache(free_host_memory())
        return bool(self._keep_cache)

    def decide_cache(self, free: FreeHostMemory) -> None:
        """Decide whether the page cache keeps the data, unless that was decided before."""
        if self._keep_cache is None:
            self._keep_cache = self.nbytes <= free.page_cache

    @property
    def is_native(self) -> bool:
        """Whether the rows are in the byte order of this machine."""
        return not self._swapped

    @property
    def can_map(self) -> bool:
        """Whether rows may be gathered from memory maps of the files.

        A subclass that overrides ``gather`` is not mapped, because its rows may differ from those
        of the files.
        """
        return (
            self._memory_map
            and type(self).gather is ShardedStore.gather
            and type(self).gather_at is ShardedStore.gather_at
            and self.keep_cache
            and len(self._layouts) <= MAX_OPEN
            and all(map(is_safe_to_map, self.paths))
        )

    @property
    def version(self) -> object:
        """A value that changes when a file is written or replaced."""
        try:
            stats = [os.stat(path) for path in self.paths]
        except FileNotFoundError:
            # A file that is open can still be read.
            return None
        return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

    def map_rows(self) -> MappedFileStore:
        """Return a store that gathers the rows from memory maps of the files.

        Raises:
            OSError: If a file cannot be mapped, has shrunk, or was replaced.
        """
        return MappedFileStore(self._layouts, lambda number: self._reader(number).map())

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        Raises:
            ReadError: If a file has shrunk or cannot be read.
        """
        self._gather_runs(runs, out)

    def will_gather(self, start: int, stop: int) -> None:
        """Advise the kernel to read the rows [start, stop) into the page cache."""
        for number, first, n_rows in self._parts(start, stop):
            self._reader(number).will_read(first, n_rows)

    def scatter(self, rows: Rows, values: Array) -> None:
        """Write rows through to the files.

        Other readers of the files see the rows at once; ``flush`` makes them durable.

        Raises:
            WriteBackError: If the store was opened with mode="r", or ``values`` has another shape
                or dtype than the rows.
            RowIndexError: If a row is out of range or negative.
            OSError: If the file system refuses; the error names the file.
        """
        if not self.writable:
            raise WriteBackError(f'{self!r} is read-only; open it with MmapStore(path, mode="r+")')
        rows = checked_scatter(self, rows, values)
        step = max(1, _CHUNK_BYTES // max(1, self.row_nbytes))
        for i in range(0, len(rows), step):
            chunk = values[i : i + step]
            source = as_bytes(np.ascontiguousarray(chunk.byteswap() if self._swapped else chunk))
            for number, shard_rows, positions in self._by_shard(rows[i : i + step]):
                is_whole = len(positions) == len(source)
                self._write(number, shard_rows, source if is_whole else source[positions])

    def flush(self) -> None:
        """Wait until every row written so far is on the disk (fsync)."""
        with self._lock:
            n_writes = dict(self._n_writes)
        with contextlib.ExitStack() as stack:
            # All shards are flushed, even if one fails; the stack raises the error afterwards.
            for number, count in n_writes.items():
                stack.callback(self._flush, number, count)

    def close(self) -> None:
        """Flush and close the files. Further calls do nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            super().close()

    def _open_reader(self, number: int) -> FileReader:
        return FileReader(
            self._layouts[number],
            inode=self._inodes[number],
            writable=self.writable,
            keep_cache=self.keep_cache,
        )

    def _before_evicting(self, number: int, reader: FileReader) -> None:
        if number in self._n_writes:
            reader.flush()
            del self._n_writes[number]

    def _write(self, number: int, rows: Rows, values: npt.NDArray[np.uint8]) -> None:
        reader = self._reader(number)
        try:
            reader.write_rows(rows, values)
        finally:
            with self._lock:
                self._n_writes[number] = self._n_writes.get(number, 0) + 1

    def _flush(self, number: int, count: int) -> None:
        self._reader(number).flush()
        with self._lock:
            # If the count differs, another thread has written the shard since.
            if self._n_writes.get(number) == count:
                del self._n_writes[number]
