"""LocalFileStore: rows of files on a local disk; MappedStore: the same rows in memory maps."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, WriteBackError
from pinfeed.memory.host import FreeHostMemory, free_host_memory
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs, cut_run
from pinfeed.stores.file_reader import FileReader
from pinfeed.stores.file_store import FileStore, RowLayout, ShardedStore, as_bytes
from pinfeed.stores.page_cache import FileMap, is_safe_to_map, joined_rows
from pinfeed.stores.paths import file_key, file_version
from pinfeed.stores.store import Array, checked_scatter
from pinfeed.validation.arguments import check_choice, check_flag

# Most files that are open at the same time.
_MAX_OPEN = 64
# Rows are written in chunks of this size; a scatter may copy a chunk.
_CHUNK_BYTES = 4 << 20
# Longest tick of the clock for the times of files.
_TICK_NS = 10_000_000


class LocalFileStore(ShardedStore):
    """Rows of local files. A scatter writes rows through to the files.

    Each file is opened when it is needed; at most 64 files are open at the same time.

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

    _PROCESS_STATE: ClassVar[tuple[str, ...]] = ("_open", "_lock", "_n_writes", "_inodes")

    def __init__(
        self, layouts: Sequence[RowLayout], mode: str, keep_cache: bool | None, memory_map: bool
    ) -> None:
        check_choice(mode, "mode", ("r", "r+"))
        if keep_cache is not None:
            check_flag(keep_cache, "keep_cache")
        check_flag(memory_map, "memory_map")
        self._mode = mode
        self.writable = mode == "r+"
        self._keep_cache = keep_cache
        self._memory_map = memory_map
        # Files are opened later, when the process may be in another folder.
        super().__init__([replace(one, path=os.path.abspath(one.path)) for one in layouts])
        if mode == "r+" and len(set(map(file_key, self.paths))) < len(self.paths):
            raise ArgumentError(
                f"a file occurs twice in the shards {self.paths}; with mode='r+', give each file "
                "once"
            )

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._open: OrderedDict[int, FileReader] = OrderedDict()
        # Reader threads and the writer thread use the store at the same time.
        self._lock = threading.Lock()
        # Number of writes of each shard that has not been flushed since.
        self._n_writes: dict[int, int] = {}
        self._inodes = [file_key(path) for path in self.paths]

    def _renew_after_fork(self) -> None:
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        if self.writable:
            raise TypeError(
                f"{self!r} is open for writing, and cannot be pickled or copied, because both "
                "stores would write to the same files; pass the path, and open it in the process "
                "that writes"
            )
        return super().__getstate__()

    @property
    def resident_bytes(self) -> int:
        """Memory for a scatter, which reorders and byte-swaps rows, in bytes."""
        return 2 * _CHUNK_BYTES if self.writable else 0

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
    def can_be_memory_rows(self) -> bool:
        return self.can_map and not self._swapped

    def has_rows_of(self, other: FileStore | None) -> bool:
        if type(other) is not type(self) or self.writable or other.writable:
            return self is other
        return (self._layouts, self._keep_cache, self._memory_map) == (
            other._layouts,
            other._keep_cache,
            other._memory_map,
        )

    @property
    def can_map(self) -> bool:
        """Whether rows may be gathered from memory maps of the files.

        A subclass that overrides ``gather`` or ``gather_runs`` is not mapped, because its rows may
        differ from those of the files.
        """
        return (
            self._memory_map
            and type(self).gather is FileStore.gather
            and type(self).gather_runs is ShardedStore.gather_runs
            and self.keep_cache
            and len(self._layouts) <= _MAX_OPEN
            and all(map(is_safe_to_map, self.paths))
        )

    @property
    def version(self) -> object:
        """A value that changes when a file is written or replaced."""
        try:
            # Programs can set the time of the last write, but not the time of the last change.
            changed_ns = [os.stat(path).st_ctime_ns for path in self.paths]
            version = list(map(file_version, self.paths)), changed_ns
        except FileNotFoundError:
            # A file that is open can still be read.
            return None
        # Another write in the same tick of the clock would not change the time.
        is_settled = not 0 <= time.time_ns() - max(changed_ns) < _TICK_NS
        return version if is_settled else object()

    def map_rows(self) -> MappedStore:
        """Return a store that gathers the rows from memory maps of the files.

        Raises:
            OSError: If a file cannot be mapped, has shrunk, or was replaced.
        """
        numbers = [number for number, layout in enumerate(self._layouts) if layout.n_rows]
        maps = [self._reader(number).map() for number in numbers]
        return MappedStore([self._layouts[number] for number in numbers], maps)

    def will_gather(self, start: int, stop: int) -> None:
        """Advise the kernel to read the rows [start, stop) into the page cache."""
        for number, first, n_rows in cut_run(start, stop, self._ends):
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
            raise WriteBackError(f'{self!r} is read-only; open it with NpyStore(path, mode="r+")')
        rows = checked_scatter(self, rows, values)
        step = max(1, _CHUNK_BYTES // max(1, self.row_nbytes))
        for i in range(0, len(rows), step):
            chunk = values[i : i + step]
            source = as_bytes(np.ascontiguousarray(chunk.byteswap() if self._swapped else chunk))
            for number, written in self._by_shard(Runs.of_rows(rows[i : i + step])):
                is_whole = len(written.places) == len(source)
                self._write(number, written.starts, source if is_whole else source[written.places])

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
            self._open.clear()

    def _reader(self, number: int) -> FileReader:
        """Return the open reader of a shard.

        A reader that is evicted closes its file when the last thread that uses it is done.
        """
        with self._lock:
            self._require_open()
            reader = self._open.pop(number, None) or FileReader(
                self._layouts[number],
                inode=self._inodes[number],
                writable=self.writable,
                keep_cache=self.keep_cache,
            )
            self._open[number] = reader
            if len(self._open) > _MAX_OPEN:
                evicted, other = self._open.popitem(last=False)
                if evicted in self._n_writes:
                    other.flush()
                    del self._n_writes[evicted]
            return reader

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
