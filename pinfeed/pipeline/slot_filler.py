"""SlotFiller: reader threads take batches from a source in turn, and gather them into slots."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator

from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch
from pinfeed.pipeline.transfer import Transfer


class SlotFiller:
    """Fills slots with the batches of an epoch.

    A source is a generator. One reader thread at a time asks it for a batch, in order; several may
    gather.

    Args:
        transfer: Transfer that fills the slots.
        thunks: Batches of the epoch; closed by ``close``.
        first: Number of the first batch.
        batches_per_slot: Number of batches in a slot.
    """

    def __init__(
        self,
        transfer: Transfer,
        thunks: Generator[BatchThunk, None, None],
        first: int,
        batches_per_slot: int,
    ) -> None:
        self._transfer = transfer
        self._counters = transfer.counters
        self._thunks: Generator[BatchThunk, None, None] | None = thunks
        self._first = first
        self._batches_per_slot = batches_per_slot
        self._n_taken = 0
        self._turn_has_changed = threading.Condition()

    def number(self, turn: int) -> int:
        """Return the number of the first batch of a turn."""
        return self._first + turn * self._batches_per_slot

    def fill(self, slot: Slot, turn: int) -> Slot | None:
        """Fill a slot with the next batches; return None after the last one.

        Args:
            slot: Slot that was reserved.
            turn: Number of this call. Calls begin in the order of turns, but may reach this
                function in any order.
        """
        with self._turn_has_changed:
            self._turn_has_changed.wait_for(lambda: self._n_taken == turn)
            start = self._counters.now()
            try:
                self._transfer.check_stop()
                thunk = next(self._thunks, None) if self._thunks is not None else None
            finally:
                self._n_taken += 1
                self._turn_has_changed.notify_all()
        if thunk is None:
            return None
        batch = thunk()
        slot.drawn_s = drawn = self._counters.now()
        slot.draw_s = drawn - start
        return self._gather(slot, batch, self.number(turn))

    def close(self) -> None:
        """Release what the source holds now, not when an error's traceback is freed."""
        thunks = self._thunks
        # After an interrupt has ended the wait for the readers, one of them may still run it.
        if thunks is not None and inspect.getgeneratorstate(thunks) != inspect.GEN_RUNNING:
            thunks.close()
            self._thunks = None

    def _gather(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather the batches of a slot.

        If one of several cannot be gathered, the slot carries those before it. The error is raised
        when the loop asks for the batch that failed.
        """
        try:
            return self._transfer.fill(slot, batch, number)
        except Cancelled:
            raise
        except Exception as error:
            n_batches = len(batch.batches)
            n_good = self._n_good(slot, batch, number) if n_batches > 1 else 0
            if n_good in (0, n_batches):
                # The first batch failed; or all succeed now, so the failed one is unknown.
                raise
            slot.error = error
        return self._transfer.fill(slot, batch.cut(0, n_good), number)

    def _n_good(self, slot: Slot, batch: HostBatch, number: int) -> int:
        """Return the number of batches before the first that cannot be gathered."""
        for i in range(len(batch.batches)):
            try:
                self._transfer.fill(slot, batch.cut(i, i + 1), number + i)
            except Exception:
                return i
        return len(batch.batches)
