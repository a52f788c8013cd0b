"""Files whose rows are loaded into memory: during the first epoch, or during the second one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from pinfeed.errors import logger
from pinfeed.memory.pages import huge
from pinfeed.memory.plan import Allocation
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.readahead.buffers import BufferedReadahead
from pinfeed.readahead.source_reads import Reads, copy_allocation
from pinfeed.readahead.strategy import (
    AnyBatch,
    Choice,
    ChunkReads,
    DirectReads,
    OpenBatch,
    ReadStrategy,
)
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.rows.windows import Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.chunked import ChunkedStore, even_bounds
from pinfeed.stores.file_store import FileStore, ShardedStore, rows_version
from pinfeed.stores.host_rows import RunGather, StoreRows, memory_rows_of, run_gather
from pinfeed.stores.local_file import LocalFileStore, MappedStore
from pinfeed.stores.store import Array
from pinfeed.threads.pool import ThreadPool

# Large enough for sequential disk reads, and small enough that the end of a loop does not wait long
# for the current chunk.
CHUNK_BYTES = 8 << 20
# A batch waits for its rows to be loaded if the rest of the file has at most this many bytes,
# instead of reading them from the disk twice. At 1 GB/s, it waits half a second.
_REST_BYTES = 512 << 20


class ResidentFile(ReadStrategy):
    """Strategy that loads the rows of a file chunk by chunk, and gathers those that are loaded.

    In the first epoch, a thread loads the rows in sequence. Until the load is nearly complete, rows
    that are not in memory yet are read one by one. After that, readers wait for the load instead,
    because random reads slow it down. If the epoch is sequential or block-shuffled, chunks are
    loaded in the order in which batches need them, and readers wait for them. Subclasses define
    where the rows are kept.

    Args:
        store: The rows.
        waits: Whether readers always wait for the rows that they need; these rows are loaded first.
    """

    _readers_load = True
    """Whether several threads load faster than one."""

    _store: FileStore
    _rows: ArrayStore | MappedStore

    def __init__(self, store: FileStore, *, waits: bool = False) -> None:
        super().__init__(store)
        self.row_shape = store.row_shape
        self.dtype = store.dtype
        self._waits_always = waits
        self._starts = even_bounds(store.n_rows, store.rows_in(CHUNK_BYTES))
        if isinstance(store, ChunkedStore):
            # Parts that a file stores together are not divided.
            bounds = store.load_bounds
            self._starts = np.unique(bounds[np.searchsorted(bounds, self._starts)])
        n_chunks = len(self._starts) - 1
        self._is_loaded = np.zeros(n_chunks, np.bool_)
        self._complete = False
        # Guards the chunks that are to be loaded, and the end of loading.
        self._changed = threading.Condition()
        self._is_begun = np.zeros(n_chunks, np.bool_)
        self._chunks_to_load: Iterator[int] = iter(())
        self._has_windows = False
        self._stopping = False

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        self._find_loaded()
        self._complete = bool(self._is_loaded.all())
        if self._complete:
            rows = self._rows
            yield AnyBatch(functools.partial(StoreRows, rows, gather=rows.gather_unchecked))
            return
        self._is_begun = self._is_loaded.copy()
        self._chunks_to_load = self._load_order(windows, start, stop)
        self._has_windows = windows is not None
        self._stopping = False
        with ThreadPool(1, "pinfeed-load") as thread:
            thread.submit(self._load_all)
            try:
                yield AnyBatch(functools.partial(StoreRows, self))
            finally:
                self._stop()

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows of a batch into ``out``. The caller has checked all arguments."""
        if self._complete:
            self._rows.gather_unchecked(rows, out)
        else:
            self.gather_runs(Runs.of_rows(rows), out)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments."""
        if self._complete:
            self._rows.gather_runs(runs, out)
            return
        runs = runs.merged()
        first = self._chunk_of(runs.starts)
        n_chunks = self._chunk_of(runs.starts + runs.lengths - 1) - first + 1
        self._wait_for(np.unique(Runs(first, n_chunks, first).rows()))
        n_loaded = np.concatenate(([0], np.cumsum(self._is_loaded)))
        is_loaded = n_loaded[first + n_chunks] - n_loaded[first] == n_chunks
        for source, has_runs in ((self._rows, is_loaded), (self._store, ~is_loaded)):
            if has_runs.any():
                run_gather(source)(runs.take(np.flatnonzero(has_runs)), out)

    def memory_rows(self) -> MemoryRows | None:
        self._find_loaded()
        return memory_rows_of(self._rows) if self._is_loaded.all() else None

    def memory_rows_when_loaded(self) -> MemoryRows | None:
        return memory_rows_of(self._rows)

    def run_gather(self) -> RunGather:
        return self.gather_runs

    def close(self) -> None:
        """Free the memory; a gather that is running keeps it until it ends."""
        self._is_loaded[:] = False
        self._complete = False

    def _find_loaded(self) -> None:
        """Find out which chunks are in memory, before an epoch."""

    def _load(self, start: int, stop: int) -> None:
        """Load the rows [start, stop) into memory."""
        raise NotImplementedError

    def _bounds(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk, and the row after its last one."""
        return int(self._starts[chunk]), int(self._starts[chunk + 1])

    def _chunk_of(self, rows: Rows) -> Rows:
        """Return the chunk of each row."""
        chunks: Rows = np.searchsorted(self._starts, rows, side="right") - 1
        return chunks

    def _load_order(self, windows: Windows | None, start: int, stop: int) -> Iterator[int]:
        """Yield the chunks in the order in which to load them; some occur more than once."""
        if windows is not None:
            # Later positions need few other rows.
            for window in windows.needed(start, min(stop, start + self._store.n_rows)):
                for first, end in window.runs:
                    begin, last = self._chunk_of(np.array([first, end - 1])).tolist()
                    yield from range(begin, last + 1)
        yield from range(len(self._is_loaded))

    def _load_all(self) -> None:
        while self._load_next():
            pass

    def _load_next(self) -> bool:
        """Load one chunk, and return True; or return False if all chunks are loaded."""
        with self._changed:
            if self._stopping:
                return False
            chunk = next((i for i in self._chunks_to_load if not self._is_begun[i]), None)
            if chunk is None:
                return False
            self._is_begun[chunk] = True
        try:
            self._load(*self._bounds(chunk))
        except Exception as error:
            # The batch that needs the rows reads them itself, and raises the error.
            logger.info(
                "rows are read one by one, because loading %r into memory ended with %r",
                self._store,
                error,
            )
            self._stop()
            return False
        with self._changed:
            self._is_loaded[chunk] = True
            self._complete = bool(self._is_loaded.all())
            self._changed.notify_all()
        return True

    def _wait_for(self, chunks: Rows) -> None:
        """Wait until chunks are in memory, or until waiting is no longer worth it.

        The waiting reader thread helps to load, if that is faster.
        """
        while len(missing := chunks[~self._is_loaded[chunks]]) and self._is_worth_waiting():
            # The chunks of a window are already in order.
            if self._waits_always and not self._has_windows:
                self._continue_at(int(missing[0]))
            if not (self._readers_load and self._load_next()):
                with self._changed:
                    self._changed.wait_for(
                        lambda: bool(self._is_loaded[chunks].all()) or not self._is_worth_waiting()
                    )

    def _is_worth_waiting(self) -> bool:
        """Return whether to wait for rows instead of reading them one by one."""
        rest = int(np.count_nonzero(~self._is_loaded)) * CHUNK_BYTES
        waits = self._waits_always or self._has_windows or rest <= _REST_BYTES
        return waits and not self._stopping

    def _continue_at(self, chunk: int) -> None:
        """Continue at a chunk whose load has not begun; an epoch may begin at any row."""
        with self._changed:
            if not self._is_begun[chunk]:
                n_chunks = len(self._is_begun)
                self._chunks_to_load = itertools.chain(range(chunk, n_chunks), range(chunk))

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


class InMemoryCopy(ResidentFile):
    """Strategy that keeps a copy of all rows of a read-only store in memory.

    A file that was written after the load is loaded again before the next epoch. So is a file that
    the program has mapped for writing.

    Args:
        store: The rows.

    Raises:
        MemoryError: If the system does not have enough memory.
    """

    _rows: ArrayStore

    def __init__(self, store: FileStore) -> None:
        # If a read of one row takes as long as one of many, readers wait until these are loaded.
        super().__init__(store, waits=store.reads_in_bulk)
        self.items = (copy_allocation(store),)
        nbytes = store.n_rows * store.row_nbytes
        rows = huge(nbytes)[:nbytes].view(store.dtype)
        self._rows = ArrayStore(rows.reshape(store.n_rows, *store.row_shape))
        self._version: object = None

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        if reads.in_sequence or (copy := cls.that_fits(reads)) is None:
            return None
        fits = f"it fits in {reads.free.origin}"
        return copy, f"{reads.file.loaded} into RAM during the first epoch ({fits})"

    @classmethod
    def that_fits(cls, reads: Reads) -> InMemoryCopy | None:
        """Return a copy, if an epoch reads enough of the rows, and the memory is free."""
        needed = copy_allocation(reads.file).total
        if not reads.file.writable and reads.share > 0.5 and needed <= reads.free.memory:
            # The system may refuse memory that it reports as free.
            with contextlib.suppress(MemoryError):
                return cls(reads.file)
        return None

    def close(self) -> None:
        """Free the memory; a gather that is running keeps it until it ends."""
        super().close()
        del self._rows

    def _find_loaded(self) -> None:
        """Forget the loaded rows if the file has changed, or if that cannot be known."""
        version = rows_version([self._store])
        if version != self._version:
            self._version = version
            self._is_loaded[:] = False

    def _load(self, start: int, stop: int) -> None:
        run_gather(self._store)(Runs.one(start, stop - start), self._rows.array[start:stop])


class MappedFile(ResidentFile):
    """Strategy that gathers the rows of local files from the page cache, without copying the files.

    Args:
        store: The rows.
        in_sequence: Whether consecutive batches have consecutive rows.
        counted: Stores whose files are counted elsewhere. Bytes that the store shares with them, as
            inputs and targets of one file do, are in the page cache only once.

    Raises:
        OSError: If the system has no address space for the maps, or a file has changed.
    """

    _readers_load = False
    _rows: MappedStore

    def __init__(
        self, store: LocalFileStore, *, in_sequence: bool, counted: Sequence[ShardedStore] = ()
    ) -> None:
        super().__init__(store, waits=in_sequence)
        nbytes = store.nbytes_beside(counted)
        if nbytes:
            self.items = (Allocation("rows of a file", "page cache", 1, nbytes),)
        self._rows = store.map_rows()

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        file = reads.file
        if not isinstance(file, LocalFileStore) or reads.page_cache_problem:
            return None
        # Loading whole files is worth it for most of the rows, or for short rows in random order.
        in_runs = reads.in_sequence or reads.windows is not None
        is_worth_it = reads.share > 0.5 or (not in_runs and reads.wants_whole_file)
        if not is_worth_it or not file.can_map:
            return None
        # The system may refuse address space. A file that has changed is an error when it is read.
        with contextlib.suppress(OSError):
            strategy = cls(file, in_sequence=reads.in_sequence, counted=reads.free.mapped)
            return strategy, "read through the OS page cache, by a memory map (the file fits)"
        return None

    def close(self) -> None:
        """Unmap the files; a gather that is running keeps its map until it ends."""
        super().close()
        self._rows.close()

    def _find_loaded(self) -> None:
        """Find out which chunks the page cache holds; the kernel may have dropped some."""
        for chunk in range(len(self._is_loaded)):
            is_cached = self._rows.is_cached(*self._bounds(chunk))
            if is_cached is not None:
                self._is_loaded[chunk] = is_cached

    def _load(self, start: int, stop: int) -> None:
        self._rows.populate(start, stop)


class CopyInSecondEpoch(ReadStrategy):
    """Strategy of the first epoch, and a copy of all rows for later epochs.

    A loop over rows in sequence often reads them only once, and needs no copy.

    Args:
        store: The rows.
        first: Reads the rows in the first epoch.
        copy: The copy, which takes no physical memory before its first epoch.
    """

    def __init__(self, store: FileStore, first: ReadStrategy, copy: InMemoryCopy) -> None:
        super().__init__(store)
        self._first = first
        self._copy = copy
        self._current = first
        self._is_first = True
        self.items = first.items + copy.items

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        # The page cache keeps local files, with or without a map.
        if not reads.in_sequence or isinstance(reads.file, LocalFileStore):
            return None
        kinds = (BufferedReadahead, ChunkReads, DirectReads)
        first, reason = next(filter(None, (kind.plan(reads) for kind in kinds)))
        left = dataclasses.replace(reads, free=reads.free.without(first.items))
        copy = InMemoryCopy.that_fits(left)
        if copy is None:
            return None
        fits = f"it fits in {reads.free.origin}"
        strategy = cls(reads.file, first, copy)
        return strategy, f"{reason}; a second epoch loads it into RAM ({fits})"

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        strategy = self._first if self._is_first else self._copy
        self._is_first = False
        with strategy.open_epoch(windows, start, stop) as open_batch:
            # The last batches of an epoch may be read after it has ended.
            self._current = strategy
            yield open_batch

    def run_gather(self) -> RunGather:
        return lambda runs, out: self._current.run_gather()(runs, out)

    def memory_rows(self) -> MemoryRows | None:
        return self._copy.memory_rows()

    def memory_rows_when_loaded(self) -> MemoryRows | None:
        return self._copy.memory_rows_when_loaded()

    @property
    def may_open_ahead(self) -> bool:
        # The second epoch loads the copy, even if the loop reads only the first one.
        return self._current is self._copy

    def close(self) -> None:
        self._first.close()
        self._copy.close()
