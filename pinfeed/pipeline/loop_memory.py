"""loop_allocations(): the sum of the memory that the parts of a loop declare."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.memory.depth import DEFAULT_DEPTH, n_held
from pinfeed.memory.plan import Allocation
from pinfeed.pipeline.part_memory import PartSize, part_allocations
from pinfeed.pipeline.recent_rows import shared_row_allocations
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot_gather import index_allocations
from pinfeed.rows.batches import ORDER_BYTES


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
    written = [part for part in parts if part.is_written]
    # If small batches are gathered together, a loop that writes prefetches fewer batches.
    n_ahead = min(depth, DEFAULT_DEPTH) if schedule.batches_per_slot > 1 else depth
    n_writes = n_held(n_ahead) if written else 0
    found = part_allocations(
        parts,
        schedule,
        n_writes,
        unified=unified or reads_for_host,
        what="rows for host_transform" if reads_for_host else "batches",
    )
    by_device = not unified and not all(part.is_staged for part in parts)
    found += index_allocations(n_rows, depth, n_writes, by_device=by_device)
    if written and n_ahead and schedule.repeats:
        largest = max(part.nbytes for part in written)
        found += shared_row_allocations(n_rows, n_ahead, largest, unified=unified)
    found.append(Allocation("the order of the rows", "host", 1, ORDER_BYTES))
    return [item for item in found if item.total]
