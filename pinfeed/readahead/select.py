"""Which strategy a store gets: decided from the order, its size, the memory that may be used, and the share of its rows that an epoch has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.memory.demand import window_allocation
from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.readahead.base import DirectReads, ReadStrategy
from pinfeed.readahead.files import AS_FAST, whole_file
from pinfeed.readahead.in_memory import InMemoryCopy, resident_item
from pinfeed.readahead.page_cache import PageCacheReadahead
from pinfeed.readahead.windows import WindowReadahead
from pinfeed.rows.orders import Order, PerRank, Sequential
from pinfeed.rows.windows import Windows, windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import Store
from pinfeed.stores.file import MmapStore
from pinfeed.stores.sharded_file import AnyShardedStore, ShardedStore

# What a disk reads in sequence in the time of one random read: 20,000 to 60,000 of them a second
# and 1.2 to 2.5 GB/s were measured.
_SEEK_BYTES = 64 << 10


@dataclass(frozen=True)
class ReadPlan:
    """How the rows of each store are brought."""

    strategies: Sequence[ReadStrategy]
    notes: tuple[str, ...]
    """A line for each file: what was chosen, and why."""

    @property
    def items(self) -> tuple[Allocation, ...]:
        """The memory that it takes."""
        return tuple(item for strategy in self.strategies for item in strategy.items)


def choose(stores: Sequence[Store], order: Any, n_batch_rows: int, free: int) -> ReadPlan:
    """Choose.

    Args:
        stores: Of equally many rows.
        order: An order, or any other iterable of rows.
        n_batch_rows: Rows of all batches under way.
        free: Host memory that may be used for rows of files, in bytes.
    """
    strategies: list[ReadStrategy] = []
    notes: list[str] = []
    for store in stores:
        if not isinstance(store, ShardedStore) or not store.row_nbytes:
            own = f"It is gather() of the {type(store).__name__} that is waited for: longer rows or larger batches ask it less often."
            strategies.append(
                DirectReads(store) if isinstance(store, ArrayStore) else DirectReads(store, own)
            )
            continue
        strategy, why = _choose(store, order, n_batch_rows, free)
        free -= sum(item.total for item in strategy.items)
        strategies.append(strategy)
        notes.append(f"{store.label}, {human(store.n_rows * store.row_nbytes)}: {why}")
    return ReadPlan(strategies, tuple(notes))


def window_sizes(stores: Sequence[Store], order: Any) -> tuple[tuple[int, int], ...]:
    """Rows of a window and bytes of a row, for each file that windows can be read ahead of."""
    files = [store for store in stores if isinstance(store, ShardedStore) and not store.writable]
    found = [(_windows(store, order), store.row_nbytes) for store in files]
    return tuple(
        (windows.window_rows, row_nbytes) for windows, row_nbytes in found if windows is not None
    )


def _choose(
    store: AnyShardedStore, order: Any, n_batch_rows: int, free: int
) -> tuple[ReadStrategy, str]:
    if _in_sequence(order):
        hint = f"{store.label} is read in sequence, {AS_FAST} {whole_file(store)}"
        return DirectReads(store, hint), "read in sequence"
    share, item = _share(store, order), resident_item(store)
    if not store.writable and share > 0.5 and item.total <= free:
        with contextlib.suppress(OSError):
            # The system may refuse what is free by its own account.
            return (
                InMemoryCopy(store),
                f"brought into memory while its rows are served: it fits, and an epoch has {share:.0%} of its rows",
            )
    found = _windows(store, order)
    if found is not None:
        item = window_allocation(found.window_rows, store.row_nbytes, n_batch_rows)
        if not store.writable and item.total <= free:
            return WindowReadahead(
                store, found.window_rows, n_batch_rows
            ), "its windows are read ahead in long runs"
        why = (
            "it is open for writing"
            if store.writable
            else f"memory for them would be {human(item.total)}, {human(max(0, free))} are left"
        )
        return PageCacheReadahead(
            store
        ), f"rows come from the page cache, which is filled a window ahead ({why})"
    if (
        isinstance(store, MmapStore)
        and store.keep_cache
        and share * store.n_rows * _SEEK_BYTES >= store.n_rows * store.row_nbytes
    ):
        return PageCacheReadahead(
            store
        ), "rows come from the page cache, which is filled in sequence meanwhile"
    hint = (
        f"Rows of {store.label} are read one by one; neighbours come together, and are read in long runs, with "
        f"rows=pinfeed.rows.block_shuffled(seed, block_rows={-(-_SEEK_BYTES // store.row_nbytes)}). {whole_file(store)}"
    )
    return (
        DirectReads(store, hint),
        "rows are read one by one, many at a time; in a block_shuffled order they would come in long runs",
    )


def _in_sequence(order: Any) -> bool:
    """Whether the rows of a batch follow one another: of all ranks' rows, a rank's share of ``Ranks`` has whole batches."""
    return isinstance(order, Sequential) or (
        isinstance(order, PerRank) and isinstance(order.order, Sequential) and order.hand != 1
    )


def _windows(store: AnyShardedStore, order: Any) -> Windows | None:
    """The windows of an order, if its blocks are worth a seek."""
    found = windows(order, store.n_rows, 0) if isinstance(order, Order) else None
    return (
        found
        if found is not None and found.order.block_rows * store.row_nbytes >= _SEEK_BYTES
        else None
    )


def _share(store: AnyShardedStore, order: Any) -> float:
    """The share of the rows that an epoch has; where nobody knows, all of them."""
    return min(1.0, order.length(store.n_rows) / store.n_rows) if isinstance(order, Order) else 1.0
