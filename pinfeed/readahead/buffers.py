"""Read-ahead of the windows of an order: into buffers in memory, or into the page cache."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from pinfeed.memory.pages import BufferPool
from pinfeed.readahead.source_reads import Reads, buffer_allocation
from pinfeed.readahead.strategy import Choice, OpenBatch, ReadStrategy
from pinfeed.rows.orders import Rows, Sequential
from pinfeed.rows.runs import Runs
from pinfeed.rows.windows import Window, Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.file_store import FileStore, ShardedStore
from pinfeed.stores.host_rows import StoreRows, run_gather
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.store import Array
from pinfeed.threads.call import Pending
from pinfeed.threads.pool import ThreadPool

T = TypeVar("T")

RowRuns = Iterable[tuple[int, int]]
"""Row indices as runs [start, stop)."""

# The strategy advises the kernel in chunks, because each call may block until the disk has accepted
# it, and the loop may end in between.
_ADVISED_BYTES = 8 << 20

# Reads that wait for the disk at the same time.
_N_THREADS = 4
# Rows in sequence that are read ahead at a time, and the parts of them that are read at the same
# time, each in large requests.
_SEQUENCE_BYTES = 32 << 20
_N_PARTS = 2


class ReadaheadCursor(Generic[T]):
    """The windows of an epoch that batches need now, and those that are read ahead of them.

    Args:
        windows: Windows of the epoch.
        start: First position of the epoch that is served.
        stop: Position after the last one.
        begin: Begins to read a window, given its runs; its result stands for the window.
        may_begin_ahead: Returns whether a window may be begun before a batch needs it.
    """

    def __init__(
        self,
        windows: Windows,
        start: int,
        stop: int,
        begin: Callable[[RowRuns], T],
        may_begin_ahead: Callable[[], bool] = lambda: True,
    ) -> None:
        self._begin = begin
        self._may_begin_ahead = may_begin_ahead
        self._n_ahead = windows.n_ahead
        self._coming = windows.needed(start, stop)
        self._next = next(self._coming, None)
        # Windows that were begun, and that later positions may need.
        self._begun: list[tuple[Window, T]] = []

    def take(self, position: int, n: int) -> list[T]:
        """Return the windows of positions [position, position + n).

        The caller requests positions in ascending order.
        """
        end = position + n
        self._begun = [one for one in self._begun if one[0].end > position]
        n_now = sum(window.begin < end for window, _ in self._begun)
        while self._next is not None:
            if self._next.begin < end:
                n_now += 1
            elif len(self._begun) - n_now >= self._n_ahead or not self._may_begin_ahead():
                break
            self._begun.append((self._next, self._begin(self._next.runs)))
            self._next = next(self._coming, None)
        return [made for _, made in self._begun[:n_now]]


class BufferedReadahead(ReadStrategy):
    """Strategy that gathers rows from buffers in memory, each of which holds a window.

    One buffer is filled ahead; unfinished batches are gathered from the other buffers.

    Args:
        store: A read-only store.
        windows: Windows of an epoch, or of every epoch if these have none.
        n_batch_rows: Rows of all batches that are read at the same time.
    """

    _store: FileStore

    def __init__(self, store: FileStore, windows: Windows, n_batch_rows: int) -> None:
        super().__init__(store)
        self._usual = windows
        self._buffer_rows = windows.window_rows
        self.items = (buffer_allocation(windows, store.row_nbytes, n_batch_rows),)
        self._pool = BufferPool(self.items[0].count)
        # Buffers that take memory.
        self._live: weakref.WeakSet[_Buffer] = weakref.WeakSet()

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        file = reads.file
        if reads.in_sequence:
            return cls._plan_in_sequence(reads)
        if reads.windows is None or reads.buffer_problem:
            return None
        detail = ""
        if isinstance(file, ChunkedStore):
            detail = "; each buffer decodes a chunk once"
        elif isinstance(file, ShardedStore):
            detail = f", in long contiguous reads{reads.page_cache_problem}"
        strategy = cls(file, reads.windows, reads.n_batch_rows)
        return strategy, f"read ahead into buffers{detail}"

    @classmethod
    def _plan_in_sequence(cls, reads: Reads) -> Choice | None:
        """Return the strategy for files that are read best in large requests, such as remote ones.

        The stores of local files and of chunks read ahead themselves, or the kernel does.
        """
        file = reads.file
        is_whole = isinstance(reads.order, Sequential) and not reads.are_items
        if isinstance(file, ChunkedStore) or not file.reads_in_bulk or not is_whole:
            return None
        rows = min(file.n_rows, file.rows_in(_SEQUENCE_BYTES))
        strategy = cls(file, windows_in_sequence(file.n_rows, rows), reads.n_batch_rows)
        if strategy.items[0].total > reads.free.memory:
            return None
        return strategy, "read ahead in sequence, in large requests"

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        with ThreadPool(_N_THREADS, "pinfeed-readahead") as threads:
            cursor = ReadaheadCursor(
                windows or self._usual,
                start,
                stop,
                functools.partial(self._begin, threads),
                # After a short last window, batches of the previous epoch may need one more buffer.
                lambda: len(self._live) < self.items[0].count,
            )
            try:
                yield lambda position, n: BufferedRows(self._store, cursor.take(position, n))
            except GeneratorExit:
                # The training loop ended early. At the end of the data, in contrast, the last
                # batches may still wait for reads, so these are not cancelled.
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _begin(self, threads: ThreadPool, runs: RowRuns) -> _Buffer:
        # Windows of items are larger than usual if their rows have more gaps than usual.
        kept = _first_rows(runs, self._buffer_rows)
        memory = self._pool.take(self._buffer_rows * self._store.row_nbytes)
        buffer = _Buffer(self._store, kept, memory, threads)
        self._live.add(buffer)
        return buffer

    def close(self) -> None:
        """Free the buffers."""
        self._pool.close()


def windows_in_sequence(n_rows: int, window_rows: int) -> Windows:
    """Return the windows of a sequential order, each in parts that are read at the same time."""
    step = -(-window_rows // _N_PARTS)

    def needed(start: int, stop: int) -> Iterator[Window]:
        for begin in range(start // window_rows * window_rows, min(stop, n_rows), window_rows):
            end = min(n_rows, begin + window_rows)
            runs = [(first, min(end, first + step)) for first in range(begin, end, step)]
            yield Window(begin, end, runs)

    is_single = window_rows >= n_rows
    return Windows(
        needed, lambda n: -(-n // window_rows) + 1, window_rows, step, is_single=is_single
    )


class _Buffer:
    """Memory for the rows of a window, which reader threads are filling."""

    def __init__(self, store: FileStore, runs: RowRuns, memory: Array, threads: ThreadPool) -> None:
        starts, stops = np.array(list(runs), np.int64).T
        ends = np.cumsum(stops - starts)
        self._starts = starts
        self._stops = stops
        # Added to a row index of a run, this gives its position in memory.
        self._shifts = ends - stops
        n_rows = int(ends[-1])
        found = memory[: n_rows * store.row_nbytes].view(store.dtype)
        array = found.reshape(n_rows, *store.row_shape)
        self._rows = ArrayStore(array)
        gather = run_gather(store)
        wanted = Runs(starts, stops - starts, self._shifts + starts)
        self._reads: Sequence[Pending[None]] = [
            threads.submit(gather, part, array) for part in _joined(store, wanted)
        ]

    def find(self, starts: Rows, lengths: Rows | int = 1) -> Rows:
        """Return the positions of runs in the buffer, -1 for those that it does not have whole."""
        run = np.searchsorted(self._starts, starts, side="right") - 1
        is_here = (run >= 0) & (starts + lengths <= self._stops[run])
        return np.where(is_here, starts + self._shifts[run], -1)

    def wait(self) -> ArrayStore:
        """Return the rows of the buffer, once they have been read."""
        for read in self._reads:
            read.result()
        return self._rows


def _first_rows(runs: RowRuns, most: int) -> list[tuple[int, int]]:
    """Return runs [start, stop) without the rows after the first ``most`` ones."""
    found = []
    for start, stop in runs:
        if most <= 0:
            break
        found.append((start, min(stop, start + most)))
        most -= stop - start
    return found


def _joined(store: FileStore, runs: Runs) -> Iterator[Runs]:
    """Yield the runs of each read of a buffer.

    Each run is read separately. Runs that share a chunk of the file are read together, so that the
    chunk is decoded once.
    """
    begins = np.arange(len(runs.starts))
    if isinstance(store, ChunkedStore):
        first = np.searchsorted(store.bounds, runs.starts, side="right")
        last = np.searchsorted(store.bounds, runs.starts + runs.lengths - 1, side="right")
        begins = begins[np.append(True, first[1:] != last[:-1])]
    for begin, end in itertools.pairwise([*begins.tolist(), len(runs.starts)]):
        yield Runs(*(numbers[begin:end] for numbers in runs))


class BufferedRows:
    """Rows that a batch needs, in buffers or else in the file.

    It is the function that makes these rows.

    Args:
        store: The file.
        buffers: Buffers that may have the rows.
    """

    def __init__(self, store: FileStore, buffers: Sequence[_Buffer]) -> None:
        self._store = store
        self._buffers = buffers
        self.row_shape = store.row_shape
        self.dtype = store.dtype

    def __call__(self, rows: Rows) -> StoreRows:
        return StoreRows(self, rows)

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``. The caller has checked all arguments."""
        left = np.arange(len(rows))
        for buffer in self._buffers:
            found = buffer.find(rows if len(left) == len(rows) else rows[left])
            is_here = found >= 0
            if len(left) == len(rows) and is_here.all():
                buffer.wait().gather_unchecked(found, out)
                return
            if is_here.any():
                buffer.wait().gather_at(found[is_here], out, left[is_here])
                left = left[~is_here]
        if len(left):
            # Sources of a mixture without windows.
            run_gather(self._store)(Runs.of_rows(rows[left], left), out)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``.

        A run that no buffer has whole is read from the file. The caller has checked all arguments.
        """
        left = runs.take(np.flatnonzero(runs.lengths))
        for buffer in self._buffers:
            found = buffer.find(left.starts, left.lengths)
            is_here = found >= 0
            if is_here.any():
                here = Runs(found[is_here], left.lengths[is_here], left.places[is_here])
                buffer.wait().gather_runs(here, out)
                left = left.take(np.flatnonzero(~is_here))
        if len(left.starts):
            # Sources of a mixture without windows.
            run_gather(self._store)(left, out)


class PageCacheReadahead(ReadStrategy):
    """Strategy that gathers rows from a file and lets the kernel fill the page cache ahead.

    In a block-shuffled epoch, the kernel reads one window ahead. In any other order,
    it reads the whole file once, in sequence. A disk reads many times faster in sequence than in
    random order, so random reads soon find their rows in the page cache.

    Args:
        store: The rows.
    """

    _store: LocalFileStore

    def __init__(self, store: LocalFileStore) -> None:
        super().__init__(store)
        self._n_advised = 0
        self._stopping = False
        self._chunk_rows = store.rows_in(_ADVISED_BYTES)

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        file = reads.file
        if reads.in_sequence or not isinstance(file, LocalFileStore):
            return None
        reason = "read through the OS page cache, which the plan does not count, prefetched"
        if reads.windows is not None:
            return cls(file), f"{reason} one window ahead ({reads.buffer_problem})"
        if not file.keep_cache or not reads.wants_whole_file:
            return None
        how = f"sequentially in the background{reads.page_cache_problem}"
        advice = "a block_shuffled order allows long contiguous reads"
        return cls(file), f"{reason} {how}; {advice}"

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        self._stopping = False
        with ThreadPool(1, "pinfeed-advise") as adviser:
            cursor = None
            if windows is None:
                adviser.submit(self._advise_all)
            else:
                cursor = ReadaheadCursor(
                    windows, start, stop, lambda runs: adviser.submit(self._advise, runs)
                )

            def open_batch(position: int, n: int) -> Callable[[Rows], StoreRows]:
                if cursor is not None:
                    cursor.take(position, n)
                return functools.partial(StoreRows, self._store)

            try:
                yield open_batch
            finally:
                self._stopping = True

    def _advise_all(self) -> None:
        while self._n_advised < self._store.n_rows and not self._stopping:
            end = min(self._n_advised + self._chunk_rows, self._store.n_rows)
            self._store.will_gather(self._n_advised, end)
            self._n_advised = end

    def _advise(self, runs: RowRuns) -> None:
        for start, stop in runs:
            if not self._stopping:
                self._store.will_gather(start, stop)
