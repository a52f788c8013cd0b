"""Choice of a read strategy for each store.

It depends on the row order, the size of the store, the free memory, and the share of the rows that
an epoch reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.readahead.base import (
    DISK_SPEED,
    Choice,
    DirectReads,
    FreeMemory,
    ReadStrategy,
    block_hint,
    whole_file_hint,
)
from pinfeed.readahead.chunk_reads import ChunkReads
from pinfeed.readahead.in_memory import copied
from pinfeed.readahead.mapped_file import MappedFile
from pinfeed.readahead.notes import ReadNote, notes_of
from pinfeed.readahead.page_cache import UNCOUNTED_CACHE, PageCacheReadahead
from pinfeed.readahead.ragged import RaggedReads
from pinfeed.readahead.windows import WindowReadahead, window_allocation
from pinfeed.rows.orders import Order, PerRank, Sequential
from pinfeed.rows.windows import Windows, windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import FileStore, Store, rows_in
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.file import MmapStore
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.sharded_file import AnyShardedStore, ShardedStore

SEEK_BYTES = 64 << 10
"""Bytes that a disk reads in sequence in the time of one random read.

Measured disks gave 20,000 to 60,000 random reads per second, and 1.2 to 2.5 GB/s in sequence.
"""

BLOCKS_ALLOW = "a block_shuffled order allows long contiguous reads"
"""End of the reason for a strategy that another row order would make faster."""

# Chunks per block in the recommended block-shuffled order. A block may begin within a chunk, so it
# decodes up to one more chunk. A window of 16 blocks should not be too large.
_BLOCK_CHUNKS = 4

# Rows of a remote file that are read ahead at a time, in sequence.
_REMOTE_WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class ReadPlan:
    """Read strategies of all stores."""

    strategies: Sequence[ReadStrategy]
    notes: tuple[str, ...]
    """Sentences with the strategy for each file, and the reason for it; see ``notes_of``."""
    ragged: Sequence[RaggedReads] = ()
    """Method of reading the rows of each ragged store."""
    resident: tuple[Allocation, ...] = ()
    """Memory of the stores in addition to their rows, if it is not counted elsewhere."""

    @property
    def items(self) -> tuple[Allocation, ...]:
        """Most memory that the strategies use."""
        found = self.resident + tuple(
            item for strategy in self.strategies for item in strategy.items
        )
        return found + tuple(item for reads in self.ragged for item in reads.items)

    @property
    def closes(self) -> list[Callable[[], None]]:
        """Functions that free the memory of each strategy."""
        return [strategy.close for strategy in self.strategies] + [
            reads.close for reads in self.ragged
        ]


def choose(stores: Sequence[Store], order: Any, n_batch_rows: int, free: FreeMemory) -> ReadPlan:
    """Choose a strategy for each store.

    Args:
        stores: Stores with the same number of rows.
        order: An order, or any other iterable of row indices.
        n_batch_rows: Rows of all batches that are read at the same time.
        free: Memory that may be used for rows of files.
    """
    strategies: list[ReadStrategy] = []
    notes: list[ReadNote] = []
    mapped: list[AnyShardedStore] = []
    for store in stores:
        file = file_of(store)
        if file is not None and file.row_nbytes:
            if isinstance(file, ChunkedStore):
                strategy, reason = _choose_for_chunks(file, order, n_batch_rows, free)
            else:
                strategy, reason = _choose_for_file(file, order, n_batch_rows, free, mapped)
                if isinstance(strategy, MappedFile):
                    mapped.append(file)
            free = free.without(strategy.items)
            label = store.label if isinstance(store, ChunkedStore) else file.label
            notes.append(ReadNote(label, file.nbytes, reason))
        elif isinstance(store, ArrayStore):
            strategy = DirectReads(store)
        else:
            hint = (
                f"The loop waits for gather() of the {type(store).__name__}. Longer rows or "
                "larger batches need fewer calls."
            )
            strategy = DirectReads(store, hint)
        strategies.append(strategy)
    return ReadPlan(strategies, notes_of(notes))


def windows_ahead(stores: Sequence[Store], order: Any) -> Callable[[int], list[Allocation]]:
    """Return a function from the rows of all batches in memory to the windows of each file.

    Only files whose windows can be read ahead count.
    """
    files = [file for file in map(file_of, stores) if file is not None and _may_copy(file)]
    found = [(_windows(file, order), file.row_nbytes) for file in files]
    return lambda n_batch_rows: [
        window_allocation(windows.window_rows, row_nbytes, n_batch_rows)
        for windows, row_nbytes in found
        if windows is not None
    ]


def file_of(store: Store) -> AnyShardedStore | ChunkedStore | None:
    """Return the store that reads the rows of a store from files; None if they are not in files."""
    if isinstance(store, ChunkedStore):
        return store.native or store
    return store if isinstance(store, ShardedStore) else None


def _choose_for_file(
    store: AnyShardedStore,
    order: Any,
    n_batch_rows: int,
    free: FreeMemory,
    mapped: Sequence[AnyShardedStore],
) -> Choice:
    """Choose a strategy for one store, given those whose files are mapped already."""
    share = _share(store, order)
    why = ""
    if isinstance(store, MmapStore) and store.nbytes_beside(mapped) > free.page_cache:
        why = f" (the file does not fit in {free.origin})"
    found_map = _map(store, order, share, free.page_cache, mapped)
    if found_map is not None:
        return found_map, "read through the OS page cache, by a memory map (the file fits)"
    if isinstance(store, RemoteStore) and isinstance(order, Sequential):
        window_rows = min(store.n_rows, rows_in(store, _REMOTE_WINDOW_BYTES))
        item = window_allocation(window_rows, store.row_nbytes, n_batch_rows)
        if item.total <= free.memory:
            ahead = WindowReadahead(store, window_rows, n_batch_rows, in_sequence=True)
            return ahead, "read ahead in sequence, in large requests"
    if is_in_sequence(order):
        hint = f"{store.label} is read in sequence, {DISK_SPEED} {whole_file_hint(store)}"
        return DirectReads(store, hint), f"read in sequence{why}"
    if _may_copy(store) and (copy := copied(store, share, free, "loaded")) is not None:
        return copy
    found = _windows(store, order)
    if found is not None:
        return _read_windows(store, found, n_batch_rows, free.memory, why)
    return _read_in_any_order(store, share, why)


def _read_windows(
    store: AnyShardedStore, windows: Windows, n_batch_rows: int, free: int, why: str
) -> Choice:
    """Read windows ahead, into memory if that is possible, else into the page cache."""
    item = window_allocation(windows.window_rows, store.row_nbytes, n_batch_rows)
    if store.writable:
        problem = "the file is open for writing"
    elif store.overlaps:
        problem = "rows overlap, so copies would need more memory than the file"
    elif item.total > free:
        problem = f"windows in RAM need {human(item.total)}, but {human(max(0, free))} remain"
    else:
        strategy = WindowReadahead(store, windows.window_rows, n_batch_rows)
        return strategy, f"read ahead window by window, in long contiguous reads{why}"
    reason = f"{UNCOUNTED_CACHE}, prefetched one window ahead ({problem})"
    return PageCacheReadahead(store), reason


def _choose_for_chunks(
    store: ChunkedStore, order: Any, n_batch_rows: int, free: FreeMemory
) -> Choice:
    if is_in_sequence(order):
        hint = (
            f"{store.label} is decoded in sequence, at the speed of its codec. A codec such as "
            "lz4 is faster than gzip, and a copy in a .npy file needs no decoding."
        )
        in_sequence = ChunkReads(store, hint, in_sequence=True)
        return in_sequence, "decoded in sequence, each chunk once"
    copy = copied(store, _share(store, order), free, "decoded")
    if copy is not None:
        return copy
    block_rows = _BLOCK_CHUNKS * store.chunk_rows
    problem = ""
    advice = f"a block_shuffled order with block_rows={block_rows} decodes fewer"
    found = _windows(store, order)
    if found is not None:
        item = window_allocation(found.window_rows, store.row_nbytes, n_batch_rows)
        if item.total <= free.memory:
            strategy = WindowReadahead(store, found.window_rows, n_batch_rows)
            return strategy, "read ahead window by window; a window decodes each chunk once"
        left = human(max(0, free.memory))
        problem = f" (windows in RAM need {human(item.total)}, but {left} remain)"
        advice = "a larger limit or a smaller window_blocks allows windows"
    hint = (
        f"Each batch decodes the whole chunks of its rows of {store.label}, up to "
        f"{store.chunk_rows:,} rows each. rows=pinfeed.rows.block_shuffled(seed, "
        f"block_rows={block_rows}, window_blocks=...) decodes each chunk little more than once in "
        "an epoch, if two windows fit in memory. A copy in a .npy file needs no decoding. "
        f"{whole_file_hint(store)}"
    )
    reason = (
        f"each batch decodes the whole chunks of its rows, up to {human(store.chunk_nbytes)} "
        f"each{problem}; {advice}"
    )
    return ChunkReads(store, hint), reason


def _map(
    store: AnyShardedStore,
    order: Any,
    share: float,
    page_cache: int,
    mapped: Sequence[AnyShardedStore],
) -> MappedFile | None:
    """Map the files if the page cache can hold them, and if loading whole files is worth it.

    If an epoch reads at most half of the rows, it is worth it only for short rows in random order.
    """
    if not isinstance(store, MmapStore) or store.nbytes_beside(mapped) > page_cache:
        return None
    if not store.can_map:
        return None
    if share <= 0.5:
        in_runs = is_in_sequence(order) or _windows(store, order) is not None
        if in_runs or not _is_read_whole(store, share):
            return None
    # The system may refuse address space. A file that has changed is an error when it is read.
    with contextlib.suppress(OSError):
        return MappedFile(store, in_sequence=is_in_sequence(order), counted=mapped)
    return None


def _may_copy(store: AnyShardedStore | ChunkedStore) -> bool:
    """Return whether rows may be copied into memory before they are needed."""
    return isinstance(store, ChunkedStore) or not (store.writable or store.overlaps)


def _is_read_whole(store: AnyShardedStore, share: float) -> bool:
    """Return whether reading the whole file in sequence is faster than its rows at random."""
    return share * SEEK_BYTES >= store.row_nbytes


def _read_in_any_order(store: AnyShardedStore, share: float, why: str) -> Choice:
    """Read rows that are neither in memory nor in windows."""
    advice = block_hint(store.nbytes / store.n_rows)
    if isinstance(store, MmapStore) and store.keep_cache and _is_read_whole(store, share):
        how = f"{UNCOUNTED_CACHE}, prefetched sequentially in the background"
        strategy: ReadStrategy = PageCacheReadahead(store, advice)
    else:
        how = "read row by row, with many reads at a time"
        hint = f"Rows of {store.label} are read one by one. {advice} {whole_file_hint(store)}"
        strategy = DirectReads(store, hint)
    return strategy, f"{how}{why}; {BLOCKS_ALLOW}"


def is_in_sequence(order: Any) -> bool:
    """Return whether the rows of a batch are consecutive.

    With ``Ranks``, each rank reads whole batches of a sequential order, not every n-th row.
    """
    if isinstance(order, PerRank):
        return isinstance(order.order, Sequential) and order.hand != 1
    return isinstance(order, Sequential)


def _windows(store: FileStore, order: Any) -> Windows | None:
    """Return the windows of an order, if its blocks are large enough to be worth a seek.

    Decoding a chunk takes longer than a seek, so windows of any size are worth it for chunks.
    """
    if not isinstance(order, Order):
        return None
    found = windows(order, store.n_rows, 0)
    if found is None or isinstance(store, ChunkedStore):
        return found
    return found if found.order.block_rows * store.nbytes >= SEEK_BYTES * store.n_rows else None


def _share(store: FileStore, order: Any) -> float:
    """Return the largest share of the file that an epoch reads; 1 if unknown.

    Each row that an order repeats, and each byte of rows that overlap, counts as often as it is
    read.
    """
    if not isinstance(order, Order):
        return 1.0
    return min(1.0, order.length(store.n_rows) * store.row_nbytes / store.nbytes)
