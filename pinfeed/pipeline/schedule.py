"""PrefetchSchedule: how many batches are prefetched, how many per slot, and by how many threads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pinfeed.memory.depth import DEFAULT_DEPTH
from pinfeed.memory.limits import MemoryLimits
from pinfeed.stores.base import Store, row_nbytes

# Small batches are gathered together, until a slot is some hundred microseconds of work.
_SLOT_BYTES = 2 << 20
_MAX_BATCHES_PER_SLOT = 8
# A smaller slot is gathered sooner than a second thread wakes up.
_PARALLEL_BYTES = 256 << 10
_MAX_READERS = 8


@dataclass(frozen=True)
class PrefetchSchedule:
    """Number of batches that are prefetched, and how reader threads gather them."""

    depth: int
    """Number of batches ahead of the loop."""
    batches_per_slot: int = 1
    """Number of batches in a slot. A small batch takes less time than waking a thread."""
    n_readers: int = 1
    """Number of slots that are filled at the same time.

    If a training step takes longer than a gather, the loop asks for one slot at a time, so at most
    one thread is busy. A loop that stalls keeps all threads busy.
    """
    is_measured: bool = False
    """Whether the loop is timed with prefetching and without, to keep the faster of the two."""
    writes: bool = False
    """Whether the loop may write rows back."""
    repeats: bool = True
    """Whether a row may occur twice in an epoch."""

    @property
    def max_pending_writes(self) -> int:
        """Maximum number of write-backs that are not completed when the loop goes on.

        Two of them overlap: one is copied while the rows of the other are scattered.
        """
        return max(self.depth, 2) if self.depth else 0

    @property
    def max_unseen_writes(self) -> int:
        """Maximum number of earlier batches whose writes a gather may not have seen.

        These are the batches that wait to be lent, and the write-backs that are not completed.
        """
        return self.depth + self.max_pending_writes

    @property
    def n_slots(self) -> int:
        """Number of slots."""
        return -(-(self.depth + 1) // self.batches_per_slot)


def choose_schedule(
    stores: Sequence[Store], batch_size: int | None, config: MemoryLimits | None, depth: int | None
) -> PrefetchSchedule:
    """Choose how far to prefetch, and with how many reader threads.

    Args:
        stores: Stores of the rows.
        batch_size: Rows per batch, if ``config`` is None.
        config: Memory limits; they may give the depth and the batch size.
        depth: The user's choice. With None, 2 batches are prefetched, or four slots of small ones.
    """
    if config is not None:
        depth = config.depth if depth is None else depth
        batch_size = config.preferred_batch_size
    nbytes = (batch_size or 0) * sum(row_nbytes(store) for store in stores)
    batches_per_slot = 1
    if nbytes and depth is None:
        batches_per_slot = min(_SLOT_BYTES // nbytes, _MAX_BATCHES_PER_SLOT)
    if config is not None and config.cpu_memory_limit is not None and batches_per_slot > 1:
        batches_per_slot = min(batches_per_slot, config.cpu_memory_limit // 4 // (5 * nbytes))
    if depth is None:
        depth = 4 * batches_per_slot - 1 if batches_per_slot > 1 else DEFAULT_DEPTH
    schedule = PrefetchSchedule(depth, max(1, batches_per_slot))
    if 0 < nbytes * batches_per_slot < _PARALLEL_BYTES:
        return schedule
    n_readers = min(schedule.n_slots, len(os.sched_getaffinity(0)), _MAX_READERS)
    return dataclasses.replace(schedule, n_readers=n_readers)
