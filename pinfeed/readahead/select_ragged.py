"""Choice of a read strategy for the items of ragged rows."""

from __future__ import annotations

import contextlib
from typing import Any

from pinfeed.readahead.base import (
    DISK_SPEED,
    Choice,
    DirectReads,
    FreeMemory,
    block_hint,
    whole_file_hint,
)
from pinfeed.readahead.in_memory import copied
from pinfeed.readahead.mapped_file import MappedFile
from pinfeed.readahead.notes import ReadNote
from pinfeed.readahead.page_cache import UNCOUNTED_CACHE, PageCacheReadahead
from pinfeed.readahead.ragged import RaggedReads
from pinfeed.readahead.select import file_of, is_in_sequence
from pinfeed.readahead.whole_file import WholeFile
from pinfeed.rows.orders import Order
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.rows.windows import windows
from pinfeed.stores.base import row_nbytes
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.sharded_file import AnyShardedStore


def choose_ragged(store: RaggedStore, rows: Any, free: FreeMemory) -> RaggedReads:
    """Choose how ragged rows are read.

    Args:
        store: The ragged rows.
        rows: An order, or any other iterable of row indices or batches.
        free: Memory that may be used for the items.
    """
    items = file_of(store.items)
    if items is None or not items.row_nbytes:
        return RaggedReads(store, DirectReads(store.items), store.items, None)
    order = rows.order if isinstance(rows, ElementBatches) else rows
    if isinstance(items, LocalFileStore):
        strategy, reason = _choose_for_file(store, items, order, free)
    else:
        strategy, reason = _choose_for_slow_items(store, items, order, free)
    label = store.items.label if isinstance(store.items, ChunkedStore) else items.label
    note = ReadNote(label, items.nbytes, f"ragged rows, {reason}")
    source = strategy if isinstance(strategy, WholeFile) else items
    return RaggedReads(store, strategy, source, note)


def _choose_for_slow_items(
    store: RaggedStore, items: AnyShardedStore | ChunkedStore, order: Any, free: FreeMemory
) -> Choice:
    """Read items that are decoded or remote: once into memory, if that is worth it."""
    in_chunks = isinstance(items, ChunkedStore)
    verb = "decoded" if in_chunks else "loaded"
    if is_in_sequence(order):
        hint = f"{items.label} is {verb} in sequence. A copy in a local .npy file is read faster."
        reason = "decoded in sequence, each chunk once" if in_chunks else "read in sequence"
        return DirectReads(items, hint), reason
    copy = copied(items, _share(store, order), free, verb)
    if copy is not None:
        return copy
    if in_chunks:
        how = "decodes the whole chunks of its rows"
        advice = "A copy of the items in a .npy file needs no decoding."
    else:
        how = "requests its rows"
        advice = block_hint(store.mean_row_nbytes)
    hint = f"Each batch {how} of {items.label}. {advice} {whole_file_hint(items)}"
    return DirectReads(items, hint), f"each batch {how}"


def _share(store: RaggedStore, order: Any) -> float:
    """Return the share of the items that an epoch reads; 1 if unknown."""
    if not isinstance(order, Order):
        return 1.0
    nbytes = order.length(store.n_rows) * store.mean_row_nbytes
    return min(1.0, nbytes / (store.n_items * row_nbytes(store.items)))


def _choose_for_file(
    store: RaggedStore, items: LocalFileStore, order: Any, free: FreeMemory
) -> Choice:
    in_sequence = is_in_sequence(order)
    if items.nbytes <= free.page_cache and items.can_map:
        # The system may refuse address space. A file that has changed is an error when it is read.
        with contextlib.suppress(OSError):
            mapped = MappedFile(items, in_sequence=in_sequence)
            return mapped, "read through the OS page cache, by a memory map (the file fits)"
    if in_sequence:
        hint = f"{items.label} is read in sequence, {DISK_SPEED} {whole_file_hint(items)}"
        return DirectReads(items, hint), "read in sequence"
    if isinstance(order, Order) and windows(order, store.n_rows, 0) is not None:
        reason = f"{UNCOUNTED_CACHE}, prefetched one window ahead"
        return PageCacheReadahead(items), reason
    if items.keep_cache:
        reason = f"{UNCOUNTED_CACHE}, prefetched sequentially"
        advice = block_hint(store.mean_row_nbytes)
        return PageCacheReadahead(items, advice), f"{reason} in the background"
    hint = (
        f"Ragged rows of {items.label} are read one by one. {block_hint(store.mean_row_nbytes)} "
        f"{whole_file_hint(items)}"
    )
    return DirectReads(items, hint), "read row by row, with many reads at a time"
