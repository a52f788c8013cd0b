"""Choice of a read strategy for each store.

It depends on the row order, the size of the store, the free memory, and the share of the rows that
an epoch reads.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from pinfeed.memory.units import human
from pinfeed.readahead.read_plan import (
    SEEK_BYTES,
    Budget,
    PartReads,
    RaggedReads,
    ReadNote,
    ReadPlan,
    Reads,
    is_in_sequence,
    may_copy,
    notes_of,
    reads_of_items,
    reads_of_rows,
)
from pinfeed.readahead.resident_file import (
    InMemoryCopy,
    LaterCopy,
    MappedFile,
    ResidentFile,
    copy_allocation,
)
from pinfeed.readahead.strategy import (
    ChunkReads,
    DirectReads,
    FreeMemory,
    ReadStrategy,
)
from pinfeed.readahead.window_reads import WindowReads
from pinfeed.readahead.windows import (
    UNCOUNTED_CACHE,
    PageCacheReadahead,
    WindowReadahead,
    window_allocation,
    windows_in_sequence,
)
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.orders import Sequential
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.host_rows import run_gather
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.matrix import MatrixStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.sharded_file import ShardedStore
from pinfeed.stores.store import Store
from pinfeed.stores.window_store import WindowStore

# Chunks per block in the recommended block-shuffled order. A block may begin within a chunk, so it
# decodes up to one more chunk. A window of 16 blocks should not be too large.
_BLOCK_CHUNKS = 4

# Rows of a remote file that are read ahead at a time, in sequence.
_REMOTE_WINDOW_BYTES = 32 << 20

_BY_COLUMN = "gathered column by column"

Choice = tuple[ReadStrategy, str]
"""A strategy, and the reason for it as the plan shows it."""


def choose(
    stores: Sequence[Store],
    order: Any,
    n_batch_rows: int,
    free: FreeMemory,
    ragged: Sequence[RaggedStore] = (),
) -> ReadPlan:
    """Choose a strategy for each store.

    Args:
        stores: Stores with the same number of rows.
        order: An order, or any other iterable of row indices or batches.
        n_batch_rows: Rows of all batches that are read at the same time.
        free: Memory that may be used for rows of files.
        ragged: Stores of ragged rows.
    """
    mapped: list[ShardedStore] = []
    row_reads = [reads_of_rows(store, stores, order, n_batch_rows, mapped) for store in stores]
    # Rows are sorted or packed within windows, which follow each other as in the order.
    order = order.order if isinstance(order, LengthBatches) else order
    item_reads = [
        [reads_of_items(one, part, order, n_batch_rows, mapped) for part in one.parts]
        for one in ragged
    ]
    all_reads = [*row_reads, *itertools.chain.from_iterable(item_reads)]
    budget = Budget(free, [reads for reads in all_reads if reads is not None])
    strategies: list[ReadStrategy] = []
    ragged_reads: list[RaggedReads] = []
    notes: list[ReadNote] = []
    loaded: dict[int, tuple[ReadStrategy, str]] = {}

    def decide(reads: Reads, kind: str = "") -> ReadStrategy:
        file = reads.file
        if reads.views and id(file) in loaded:
            # Other windows of the same items load them.
            strategy, reason = loaded[id(file)]
        else:
            strategy, reason = _choose(file, budget.with_free(reads), are_items=bool(kind))
            others = strategy.for_others()
            if reads.views and others is not None:
                loaded[id(file)] = others, reason
        if isinstance(file, LocalFileStore) and isinstance(strategy, MappedFile):
            mapped.append(file)
        budget.take(strategy.items)
        notes.append(ReadNote(file.label, file.nbytes, kind + reason))
        return strategy

    for store, reads in zip(stores, row_reads, strict=True):
        if reads is None:
            # The rows are not in files.
            strategies.append(DirectReads(store))
            continue
        strategy = decide(reads)
        if isinstance(store, WindowStore):
            strategy = WindowReads(store, reads.views, strategy)
        strategies.append(strategy)
    for one, its_reads in zip(ragged, item_reads, strict=True):
        parts: list[PartReads] = []
        for part, reads in zip(one.parts, its_reads, strict=True):
            if reads is None:
                parts.append(PartReads(DirectReads(part), run_gather(part)))
                continue
            strategy = decide(reads, "ragged rows, ")
            gather = run_gather(reads.file)
            if isinstance(strategy, (ResidentFile, LaterCopy)):
                gather = strategy.gather_runs
            parts.append(PartReads(strategy, gather))
        ragged_reads.append(RaggedReads(one, parts))
    return ReadPlan(strategies, notes_of(notes), ragged_reads)


def _choose(file: FileStore, reads: Reads, *, are_items: bool = False) -> Choice:
    """Choose a strategy for the rows of one file.

    Args:
        file: The rows.
        reads: The reads of the rows.
        are_items: Whether the rows are items of ragged rows, which the order does not count.
    """
    if isinstance(file, (ChunkedStore, MatrixStore)):
        return _choose_for_slow_rows(file, reads)
    assert isinstance(file, ShardedStore)
    why = ""
    if isinstance(file, LocalFileStore):
        if file.nbytes_beside(reads.mapped) > reads.free.page_cache:
            why = f" (the file does not fit in {reads.free.origin})"
        elif _is_map_worth_it(file, reads) and (mapped := _map(file, reads)) is not None:
            return mapped, "read through the OS page cache, by a memory map (the file fits)"
    if is_in_sequence(reads.order):
        if not isinstance(file, RemoteStore):
            return DirectReads(file), f"read in sequence{why}"
        window_rows = min(file.n_rows, file.rows_in(_REMOTE_WINDOW_BYTES))
        even = windows_in_sequence(file.n_rows, window_rows)
        item = window_allocation(even, file.row_nbytes, reads.n_batch_rows)
        is_whole = isinstance(reads.order, Sequential) and not are_items
        if not is_whole or item.total > reads.free.memory:
            return _copy_later(file, DirectReads(file), "read in sequence", reads)
        ahead = WindowReadahead(file, even, reads.n_batch_rows)
        return _copy_later(file, ahead, "read ahead in sequence, in large requests", reads)
    if may_copy(file) and (copy := _copy(file, reads, "loaded")) is not None:
        return copy
    if reads.windows is not None:
        return _read_windows(file, reads, why)
    advice = "a block_shuffled order allows long contiguous reads"
    if isinstance(file, LocalFileStore) and file.keep_cache and _is_read_whole(reads):
        reason = f"{UNCOUNTED_CACHE}, prefetched sequentially in the background{why}; {advice}"
        return PageCacheReadahead(file), reason
    return DirectReads(file), f"read row by row, with many reads at a time{why}; {advice}"


def _choose_for_slow_rows(store: ChunkedStore | MatrixStore, reads: Reads) -> Choice:
    """Choose a strategy for rows that are decoded or converted, if possible each once."""
    if is_in_sequence(reads.order):
        if isinstance(store, MatrixStore):
            return _copy_later(store, DirectReads(store), _BY_COLUMN, reads)
        ahead = ChunkReads(store, in_sequence=True)
        return _copy_later(store, ahead, "decoded in sequence, each chunk once", reads)
    copy = _copy(store, reads, "converted" if isinstance(store, MatrixStore) else "decoded")
    if copy is not None:
        return copy
    problem = ""
    if reads.windows is not None:
        problem = _memory_problem(reads)
        if not problem:
            strategy = WindowReadahead(store, reads.windows, reads.n_batch_rows)
            once = "; a window decodes each chunk once" * isinstance(store, ChunkedStore)
            return strategy, f"read ahead window by window{once}"
    if isinstance(store, MatrixStore):
        return DirectReads(store), f"{_BY_COLUMN}; more memory allows a copy of the matrix"
    reason = f"each batch decodes the whole chunks of its rows, up to {store.piece_rows:,} each"
    if problem:
        advice = f"{problem}; a larger limit or a smaller window_blocks allows windows"
    else:
        n_rows = reads.views[0].n_rows if reads.views else store.n_rows
        block_rows = max(1, _BLOCK_CHUNKS * store.chunk_rows * n_rows // store.n_rows)
        advice = f"a block_shuffled order with block_rows={block_rows} decodes fewer"
    return ChunkReads(store), f"{reason}; {advice}"


def _is_map_worth_it(store: LocalFileStore, reads: Reads) -> bool:
    """Return whether loading whole files is worth it.

    If an epoch reads at most half of the rows, it is worth it only for short rows in random order.
    """
    if reads.share > 0.5:
        return True
    in_runs = is_in_sequence(reads.order) or reads.windows is not None
    return not in_runs and _is_read_whole(reads)


def _map(store: LocalFileStore, reads: Reads) -> MappedFile | None:
    """Return the strategy of mapped files; None if the files cannot be mapped."""
    if store.can_map:
        # The system may refuse address space. A file that has changed is an error when it is read.
        with contextlib.suppress(OSError):
            in_sequence = is_in_sequence(reads.order)
            return MappedFile(store, in_sequence=in_sequence, counted=reads.mapped)
    return None


def _copy(store: FileStore, reads: Reads, verb: str) -> Choice | None:
    """Return a copy of all rows, and the reason for it; None if it is not worth it or does not fit.

    Args:
        store: The rows, which are read-only.
        reads: The reads of the rows.
        verb: Past participle of the verb for the reason, such as ``"loaded"``.
    """
    copy = _copy_if_it_fits(store, reads)
    if copy is None:
        return None
    return copy, f"{verb} into RAM during the first epoch (it fits in {reads.free.origin})"


def _copy_later(store: FileStore, first: ReadStrategy, reason: str, reads: Reads) -> Choice:
    """Read rows in sequence in the first epoch, and copy them in the second, if they fit.

    A loop over rows in sequence often reads them only once, and needs no copy.
    """
    left = reads._replace(free=reads.free.without(first.items))
    copy = _copy_if_it_fits(store, left)
    if copy is None:
        return first, reason
    fits = f"it fits in {reads.free.origin}"
    return LaterCopy(store, first, copy), f"{reason}; a second epoch loads it into RAM ({fits})"


def _copy_if_it_fits(store: FileStore, reads: Reads) -> InMemoryCopy | None:
    """Return a copy of all rows, if an epoch reads enough of them, and the memory is free."""
    if reads.share > 0.5 and copy_allocation(store).total <= reads.free.memory:
        # The system may refuse memory that it reports as free.
        with contextlib.suppress(MemoryError):
            return InMemoryCopy(store)
    return None


def _memory_problem(reads: Reads) -> str:
    """Return why windows cannot be read ahead into memory; empty if they can."""
    assert reads.windows is not None
    item = window_allocation(reads.windows, reads.file.row_nbytes, reads.n_batch_rows)
    left = max(0, reads.free.memory)
    if item.total <= left:
        return ""
    return f"windows in RAM need {human(item.total)}, but {human(left)} remain"


def _read_windows(store: ShardedStore, reads: Reads, why: str) -> Choice:
    """Read windows ahead, into memory if that is possible, else into the page cache."""
    assert reads.windows is not None
    problem = "the file is open for writing" if store.writable else _memory_problem(reads)
    if not problem:
        strategy = WindowReadahead(store, reads.windows, reads.n_batch_rows)
        return strategy, f"read ahead window by window, in long contiguous reads{why}"
    reason = f"{UNCOUNTED_CACHE}, prefetched one window ahead ({problem})"
    return PageCacheReadahead(store), reason


def _is_read_whole(reads: Reads) -> bool:
    """Return whether reading the whole file in sequence is faster than its rows at random."""
    return reads.share * SEEK_BYTES >= reads.run_nbytes
