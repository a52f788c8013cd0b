"""loop_allocations(): the memory that a loop takes, listed for the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pinfeed.devices.device import OVERLAP_CHUNK_BYTES
from pinfeed.devices.layout import aligned
from pinfeed.memory.limits import n_batches, n_held
from pinfeed.memory.pages import block_nbytes
from pinfeed.memory.plan import Allocation, Place
from pinfeed.pipeline.forwarding import SPARE_ROW_NBYTES
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.order_batches import ORDER_BYTES
from pinfeed.rows.orders import known
from pinfeed.stores.paths import mapping_at
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.store import row_nbytes

# For each row of a kept batch: its index, and its position.
_KEPT_ROW_NBYTES = 8 + 4
# For each offset or length of a ragged row, and for each number of a packed batch.
_INDEX_NBYTES = 8
_PACKED_NBYTES = 4


class PartSize(NamedTuple):
    """Size of a part of a batch."""

    nbytes: int
    """Most bytes that the memory of the part may have."""
    reserved: int = 0
    """Bytes that every batch reserves in advance."""
    is_staged: bool = False
    """Whether the device cannot read the part directly."""
    is_written: bool = False
    """Whether the part may be written back."""


def loop_allocations(
    parts: Sequence[PartSize],
    n_rows: int,
    schedule: PrefetchSchedule,
    *,
    unified: bool,
    reads_for_host: bool = False,
) -> list[Allocation]:
    """List all buffers that a loop holds at a time if it drops its batches.

    Args:
        parts: Parts of the largest batch.
        n_rows: Rows of this batch.
        schedule: Number of batches to prefetch, and whether rows may recur.
        unified: Whether the batches live in host memory.
        reads_for_host: Whether the rows are read for ``host_transform``.
    """
    depth = schedule.depth
    on_host = unified or reads_for_host
    place: Place = "host" if on_host else "device"
    nbytes_of = _in_pages if on_host else _on_device
    written = [part for part in parts if part.is_written]
    staged = [] if on_host else [part for part in parts if part.is_staged]
    staged_writes = [part for part in staged if part.is_written]
    n_writes = n_held(depth) if written else 0
    what = "rows for host_transform" if reads_for_host else "batches"
    n = n_batches(depth, schedule.batches_per_slot)
    found = [
        Allocation(what, place, n, nbytes_of(parts)),
        Allocation("values that are written back", place, n_writes, nbytes_of(written)),
        Allocation("staging", "pinned", depth + 1, _in_pages(staged)),
        # Two write-backs overlap.
        Allocation("staging of a write-back", "pinned", 2, _in_pages(staged_writes)),
    ]
    by_device = not unified and not all(part.is_staged for part in parts)
    found += index_allocations(n_rows, depth, n_writes, by_device=by_device)
    if written and depth and schedule.repeats:
        largest = max(part.nbytes for part in written)
        found += shared_row_allocations(n_rows, depth, largest, unified=unified)
    found.append(Allocation("the order of the rows", "host", 1, ORDER_BYTES))
    return [item for item in found if item.total]


def _in_pages(parts: Sequence[PartSize]) -> int:
    """Return the bytes of the parts in host memory, each in whole pages."""
    return sum(block_nbytes(part.nbytes) for part in parts)


def _on_device(parts: Sequence[PartSize]) -> int:
    # Parts without bytes count, too.
    return sum(aligned(max(1, part.nbytes)) for part in parts)


def index_allocations(n_rows: int, depth: int, n_held: int, *, by_device: bool) -> list[Allocation]:
    """List the memory of row indices.

    Args:
        n_rows: Rows of a batch.
        depth: Number of prefetched batches.
        n_held: Number of write-backs that are in memory at a time.
        by_device: Whether the device reads some parts itself.
    """
    nbytes = n_rows * np.dtype(np.int64).itemsize
    found = [Allocation("row indices", "host", depth + 3 + n_held, nbytes)]
    if by_device:
        # Kernels take the row indices of each batch, also to write it back.
        n_uploaded = depth + 2 + n_held
        # Two write-backs overlap.
        n_staged = depth + 1 + min(n_held, 2)
        found += [
            Allocation("page-locked row indices", "pinned", n_staged, block_nbytes(nbytes)),
            Allocation("uploaded row indices", "device", n_uploaded, aligned(nbytes)),
        ]
    return found


def shared_row_allocations(
    n_rows: int, n_ahead: int, largest: int, *, unified: bool
) -> list[Allocation]:
    """List the buffers that find and copy rows that a batch shares with earlier ones.

    Args:
        n_rows: Rows of a batch.
        n_ahead: Number of prefetched batches, at least 1.
        largest: Bytes of the largest part of a batch that may be written back.
        unified: Whether the batches live in host memory.
    """
    n_written = n_held(n_ahead)
    n_batches = n_ahead + 2
    # At most, every row is in every batch with which it is compared.
    positions = 2 * n_rows * n_written * np.dtype(np.int32).itemsize
    compared = n_rows * SPARE_ROW_NBYTES + positions
    found = [
        Allocation("rows of recent batches", "host", n_written, n_rows * _KEPT_ROW_NBYTES),
        Allocation("comparison of rows", "host", 1, compared),
        Allocation("positions of shared rows", "host", n_batches, positions),
    ]
    if unified:
        return found
    # The device copies whole rows, with their indices in both batches.
    copied = max(largest // n_rows, min(OVERLAP_CHUNK_BYTES, largest)) + 2 * n_rows * 8
    staged = block_nbytes(positions)
    return [
        *found,
        Allocation("staged positions of shared rows", "pinned", n_ahead + 1, staged),
        Allocation("uploaded positions of shared rows", "device", n_batches, staged),
        Allocation("shared rows that are copied", "device", 1, aligned(copied)),
    ]


def order_allocations(rows: Any) -> list[Allocation]:
    """List the arrays that an order keeps, such as masks, row indices and lengths, and its windows.

    Orders that share an array count it once. Memory-mapped arrays are in the page cache. Windows of
    rows that are sorted or packed together count if they exceed the memory of any order.

    Args:
        rows: An order, or any other iterable of row indices or batches.
    """
    # Two views of the same memory are two objects.
    distinct = {(array.ctypes.data, array.nbytes): array for array in known(rows).kept_arrays}
    nbytes: dict[Place, int] = {"host": 0, "page cache": 0}
    for array in distinct.values():
        is_mapped = mapping_at(array.ctypes.data) is not None
        nbytes["page cache" if is_mapped else "host"] += array.nbytes
    found = [Allocation("arrays of the order", place, 1, n) for place, n in nbytes.items() if n]
    window_nbytes = known(rows).window_nbytes
    if window_nbytes > ORDER_BYTES:
        found.append(Allocation("windows of the order", "host", 1, window_nbytes))
    return found


def ragged_parts(
    store: RaggedStore, rows: Any, n_rows: int, *, is_limited: bool, is_staged: bool
) -> list[PartSize]:
    """Return the sizes of the ragged arrays of a batch.

    With limits, or with batches that are bounded by elements, every batch reserves memory for the
    largest batch. Without either, one very long row would multiply the memory of all batches.
    Batches then reserve memory for a usual batch, which grows if a larger batch occurs.

    Args:
        store: The ragged rows.
        rows: An order, or any other iterable of row indices or batches.
        n_rows: Number of rows of the batch.
        is_limited: Whether there are memory limits.
        is_staged: Whether the batches are moved to a device.
    """
    padded = store.layout == "padded"
    max_elements = None
    copies = known(rows).most_copies
    if isinstance(rows, LengthBatches):
        max_elements = rows.most_elements(padded=padded)
        copies = rows.order.most_copies
    elements, bounds = _most_elements(store, n_rows, copies, max_elements)
    most = [*(elements * row_nbytes(part) for part in store.parts), bounds]
    if is_limited or max_elements is not None:
        return [PartSize(nbytes, nbytes, is_staged) for nbytes in most]
    n_usual = store.row_lengths.usual_elements(n_rows, padded=padded)
    usual = [*(n_usual * row_nbytes(part) for part in store.parts), bounds]
    # Memory that grows is rounded up by at most a sixteenth.
    return [
        PartSize(nbytes + -(-nbytes // 16), min(nbytes, reserved), is_staged)
        for nbytes, reserved in zip(most, usual, strict=True)
    ]


def _most_elements(
    store: RaggedStore, n_rows: int, copies: int | None, max_elements: int | None
) -> tuple[int, int]:
    """Return the most elements of a batch, and the most bytes of the bounds of its rows.

    Args:
        store: The ragged rows.
        n_rows: Number of rows of the batch.
        copies: Most occurrences of one row in the batch; None for any number.
        max_elements: Most elements of the batch, with padding; None for no limit.
    """
    if store.layout == "padded" or copies is None:
        elements = n_rows * store.row_lengths.longest
    else:
        elements = copies * store.row_lengths.most_elements(-(-n_rows // copies))
    if max_elements is not None:
        elements = min(elements, max_elements)
    if store.layout == "packed":
        # Each row may end a sequence, whose padding has a bound, too.
        return elements, (2 * elements + 2 * n_rows + 1) * _PACKED_NBYTES
    return elements, (n_rows if store.layout == "padded" else n_rows + 1) * _INDEX_NBYTES
