"""Filler: gathers the batches of an epoch into slots."""

from __future__ import annotations

from collections.abc import Callable

from pinfeed.pipeline.draws import BatchDraws
from pinfeed.pipeline.mover import Mover
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.source import HostBatch, failed_batch


class Filler:
    """Fills slots with the batches of an epoch. Reader threads call ``fill``.

    Args:
        mover: Mover of the slots.
        draws: The batches.
        gather: Gathers a batch into a slot, given its number, as ``Mover.fill`` does.
        first: Number of the first batch.
        batches_per_slot: Number of batches in a slot.
    """

    def __init__(
        self,
        mover: Mover,
        draws: BatchDraws,
        gather: Callable[[Slot, HostBatch, int], Slot],
        first: int,
        batches_per_slot: int,
    ) -> None:
        self.mover = mover
        self.draws = draws
        self.gather = gather
        self._make = draws.make
        self._first = first
        self._batches_per_slot = batches_per_slot

    def number(self, turn: int) -> int:
        """Return the number of the first batch of a turn."""
        return self._first + turn * self._batches_per_slot

    def fill(self, slot: Slot, turn: int) -> Slot | None:
        """Fill a slot with the next batches; return None after the last one.

        If one of several batches cannot be gathered, the slot carries the earlier ones. The error
        is raised when the loop requests the batch that failed. If the loop continues after errors,
        the error takes the place of its batch.

        Args:
            slot: Reserved slot.
            turn: Number of this call, as ``BatchDraws.make`` takes it.
        """
        batch = self._make(slot, turn)
        if batch is None:
            return None
        number = self._first + turn * self._batches_per_slot
        try:
            return self.gather(slot, batch, number)
        except Cancelled:
            raise
        except Exception as error:
            if batch.keeps_errors:
                return self.fail(slot, batch, error, number)
            n_batches = len(batch.batches)
            n_good = self._n_good(slot, batch, number) if n_batches > 1 else 0
            if n_good in (0, n_batches):
                # Either the first batch failed, or all succeed now and the failed one is unknown.
                raise
            slot.error = error
        return self.gather(slot, batch.cut(0, n_good), number)

    def fail(self, slot: Slot, batch: HostBatch, error: Exception, number: int) -> Slot:
        """Fill a slot with the error of its batch, in place of the batch."""
        failed = failed_batch(error)
        failed.state = batch.state
        return self.gather(slot, failed, number)

    def _n_good(self, slot: Slot, batch: HostBatch, number: int) -> int:
        """Return the number of batches before the first that cannot be gathered."""
        for i in range(len(batch.batches)):
            try:
                self.gather(slot, batch.cut(i, i + 1), number + i)
            except Exception:
                return i
        return len(batch.batches)
