"""PrefetchSchedule: the numbers of prefetched batches, of batches per slot, and of threads."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from pinfeed.memory.limits import DEFAULT_DEPTH, MemoryLimits

# Small batches are gathered together, until a slot takes some hundred microseconds of work.
_SLOT_BYTES = 2 << 20
_MAX_BATCHES_PER_SLOT = 8
# The gather of a smaller slot takes less time than waking a second thread.
_PARALLEL_BYTES = 256 << 10
_MAX_READERS = 8
# The loop uses the batches of one slot, the next one is full, and another one is filled.
_LEAST_SLOTS = 3
# An engine shares the cost of a slot among more batches, which are still in the last cache when the
# loop uses them.
_ENGINE_SLOT_BYTES = 2 << 20
_MAX_BATCHES_PER_ENGINE_SLOT = 16
_ENGINE_SLOTS = 3
_MAX_ID_READERS = 4


@dataclass(frozen=True)
class PrefetchSchedule:
    """Number of batches that are prefetched, and how reader threads gather them."""

    depth: int
    """Number of prefetched batches."""
    batches_per_slot: int = 1
    """Number of batches in a slot. The gather of a small batch is shorter than waking a thread."""
    n_readers: int = 1
    """Number of slots that are filled at the same time.

    If a training step takes longer than a gather, the loop frees one slot at a time, so at most one
    thread is busy. A loop that stalls keeps all threads busy.
    """
    n_transform_threads: int = 1
    """Maximum number of batches for which ``host_transform`` is called at the same time."""
    writes: bool = False
    """Whether the loop may write rows back."""
    has_caches: bool = False
    """Whether the loop may lend rows from caches on the device."""
    repeats: bool = True
    """Whether a row may occur twice in an epoch."""

    @property
    def has_writer(self) -> bool:
        """Whether rows may be written back, either by the loop or because they leave a cache."""
        return self.writes or self.has_caches

    @property
    def max_pending_writes(self) -> int:
        """Maximum number of incomplete write-backs while the loop continues.

        Two write-backs overlap: one is copied while the rows of the other are scattered.
        """
        return max(self.depth, 2) if self.depth else 0

    @property
    def max_unseen_writes(self) -> int:
        """Maximum number of earlier batches with writes that a gather may not have seen.

        These are the prefetched batches, and the batches with incomplete write-backs.
        """
        return self.depth + self.max_pending_writes

    @property
    def n_slots(self) -> int:
        """Number of slots."""
        return -(-(self.depth + 1) // self.batches_per_slot)

    def with_transform_threads(self, n_threads: int, *, are_readers: bool) -> PrefetchSchedule:
        """Return a schedule that calls ``host_transform`` for several batches at the same time.

        The loop still has ``depth`` finished batches, so it prefetches the others in addition. The
        synchronous loop calls the function in its own thread.

        Args:
            n_threads: Number of threads that call the function.
            are_readers: Whether these threads are the reader threads.
        """
        if n_threads == 1 or not self.depth:
            return self
        return dataclasses.replace(
            self,
            depth=self.depth + n_threads - 1,
            n_readers=max(self.n_readers, n_threads) if are_readers else self.n_readers,
            n_transform_threads=n_threads,
        )


def engine_schedule(nbytes: int) -> PrefetchSchedule:
    """Return the schedule for an engine on the CPU if the user gave no depth.

    Args:
        nbytes: Bytes of a batch; 0 if unknown.
    """
    batches_per_slot = 1
    if nbytes:
        batches_per_slot = min(_ENGINE_SLOT_BYTES // nbytes, _MAX_BATCHES_PER_ENGINE_SLOT)
    if batches_per_slot < 2:
        schedule = PrefetchSchedule(DEFAULT_DEPTH)
    else:
        schedule = PrefetchSchedule(_ENGINE_SLOTS * batches_per_slot - 1, batches_per_slot)
    # Until files are in memory, reader threads read them.
    return _with_readers(schedule, nbytes)


def n_id_readers(depth: int) -> int:
    """Return the number of reader threads of a loop that reads rows by the ids in its batches.

    They use at most half of the cores, because the loader, the training step and the writer
    thread need the others.
    """
    n_cores = len(os.sched_getaffinity(0))
    return max(1, min(depth + 1, n_cores // 2, _MAX_ID_READERS))


def choose_schedule(
    row_nbytes: int,
    batch_size: int | None,
    config: MemoryLimits | None,
    depth: int | None,
    *,
    is_ragged: bool,
) -> PrefetchSchedule:
    """Choose the numbers of batches to prefetch and of reader threads.

    Args:
        row_nbytes: Bytes of a row of all stores together, on average.
        batch_size: Rows per batch, if ``config`` is None.
        config: Memory limits; they may contain the depth and the batch size.
        depth: The user's choice, of which small batches fill at least three slots. With None, the
            loop prefetches 2 batches, or four slots of small batches.
        is_ragged: Whether some rows differ in length.
    """
    if config is not None:
        depth = config.depth if depth is None else depth
        batch_size = config.preferred_batch_size
    nbytes = (batch_size or 0) * row_nbytes
    batches_per_slot = 1
    # Batches that are gathered together are cut by rows, which ragged batches do not permit.
    if nbytes and not is_ragged:
        batches_per_slot = min(_SLOT_BYTES // nbytes, _MAX_BATCHES_PER_SLOT)
    if config is not None and config.cpu_memory_limit is not None and batches_per_slot > 1:
        batches_per_slot = min(batches_per_slot, config.cpu_memory_limit // 4 // (5 * nbytes))
    if depth is not None:
        # With equal slots, the loop prefetches no more batches. Limits are for single batches.
        most = 1 if config is not None else min(batches_per_slot, (depth + 1) // _LEAST_SLOTS)
        each = (n for n in range(most, 1, -1) if not (depth + 1) % n)
        schedule = PrefetchSchedule(depth, next(each, 1))
    elif batches_per_slot > 1:
        schedule = PrefetchSchedule(4 * batches_per_slot - 1, batches_per_slot)
    else:
        schedule = PrefetchSchedule(DEFAULT_DEPTH)
    return _with_readers(schedule, nbytes)


def single_batches(nbytes: int, depth: int) -> PrefetchSchedule:
    """Return the schedule of batches of ``nbytes`` that are gathered separately."""
    return _with_readers(PrefetchSchedule(depth), nbytes)


def _with_readers(schedule: PrefetchSchedule, nbytes: int) -> PrefetchSchedule:
    """Return a schedule with as many reader threads as its slots are worth.

    Args:
        schedule: The schedule.
        nbytes: Bytes of a batch; 0 if unknown.
    """
    if 0 < nbytes * schedule.batches_per_slot < _PARALLEL_BYTES:
        return schedule
    n_readers = min(schedule.n_slots, len(os.sched_getaffinity(0)), _MAX_READERS)
    return dataclasses.replace(schedule, n_readers=n_readers)
