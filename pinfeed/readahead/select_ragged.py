"""Choice of a read strategy for the items of ragged rows."""

from __future__ import annotations

import contextlib
from typing import Any

from pinfeed.memory.units import human
from pinfeed.readahead.base import (
    DISK_SPEED,
    DirectReads,
    ReadStrategy,
    block_hint,
    whole_file_hint,
)
from pinfeed.readahead.mapped_file import MappedFile
from pinfeed.readahead.page_cache import PageCacheReadahead
from pinfeed.readahead.ragged import RaggedReads
from pinfeed.readahead.select import is_in_sequence
from pinfeed.rows.orders import Order
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.rows.windows import windows
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.ragged import RaggedStore


def choose_ragged(store: RaggedStore, rows: Any, page_cache: int) -> RaggedReads:
    """Choose how ragged rows are read.

    Args:
        store: The ragged rows.
        rows: An order, or any other iterable of row indices or batches.
        page_cache: Page cache that may be used, in bytes.
    """
    items = store.items
    if not isinstance(items, LocalFileStore) or not items.row_nbytes:
        return RaggedReads(store, DirectReads(items), items, "")
    nbytes = items.nbytes
    name = f"{items.label}, {human(nbytes)}"
    order = rows.order if isinstance(rows, ElementBatches) else rows
    in_sequence = is_in_sequence(order)
    if nbytes <= page_cache and items.can_map:
        # The system may refuse address space. A file that has changed is an error when it is read.
        with contextlib.suppress(OSError):
            mapped = MappedFile(items, in_sequence=in_sequence)
            reason = "ragged rows, read through the OS page cache, by a memory map (the file fits)"
            return RaggedReads(store, mapped, mapped, f"{name}: {reason}")
    strategy, reason = _unmapped(store, items, order, in_sequence=in_sequence)
    return RaggedReads(store, strategy, items, f"{name}: {reason}")


def _unmapped(
    store: RaggedStore, items: LocalFileStore, order: Any, *, in_sequence: bool
) -> tuple[ReadStrategy, str]:
    """Return a strategy for a file that is not mapped, and the reason for it."""
    if in_sequence:
        hint = f"{items.label} is read in sequence, {DISK_SPEED} {whole_file_hint(items)}"
        return DirectReads(items, hint), "ragged rows, read in sequence"
    if isinstance(order, Order) and windows(order, store.n_rows, 0) is not None:
        reason = "ragged rows, read through the OS page cache, prefetched one window ahead"
        return PageCacheReadahead(items), reason
    if items.keep_cache:
        reason = "ragged rows, read through the OS page cache, prefetched sequentially"
        advice = block_hint(store.mean_row_nbytes)
        return PageCacheReadahead(items, advice), f"{reason} in the background"
    hint = (
        f"Ragged rows of {items.label} are read one by one. {block_hint(store.mean_row_nbytes)} "
        f"{whole_file_hint(items)}"
    )
    return DirectReads(items, hint), "ragged rows, read row by row, with many reads at a time"
