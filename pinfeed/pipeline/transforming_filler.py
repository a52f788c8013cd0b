"""TransformingFiller: a Filler whose loop calls transforms on each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinfeed.pipeline.filler import Filler
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.batch_transform import TransformCall
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.spans import Lane
from pinfeed.threads.call import Pending


class TransformingFiller:
    """Fills slots, and calls the transforms on their batches, in the order of batches.

    Args:
        filler: Filler of the slots.
        transforms: The transforms.
    """

    def __init__(self, filler: Filler, transforms: LoopTransforms) -> None:
        self._filler = filler
        self._mover = filler.mover
        self._transforms = transforms
        if transforms.gather is not None:
            transforms.gather.begin(0, 1)

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self._mover.stop()
        if self._transforms.gather is not None:
            self._transforms.gather.stop()

    def fill(self, slot: Slot, turn: int) -> Slot | None:
        """Fill a slot with the next batch (reader).

        If ``host_transform`` takes rows of stores, this only adds these rows to the slot, and
        ``transform`` fills it.
        """
        gather = self._transforms.gather
        if gather is None:
            return self._filler.fill(slot, turn)
        batch = self._filler.draws.make(slot, turn)
        if batch is None:
            return None
        made_s = slot.made_s
        gather.fill(slot, batch, self._filler.number(turn))
        slot.rows = batch.data(slot.tensors)
        slot.tensors = []
        slot.batch_tensors.clear()
        slot.rows_s = self._mover.counters.now() - made_s
        return slot

    def transform(self, filled: Pending[Slot | None]) -> Slot | None:
        """Call the transforms on the batch of a slot, and return the slot.

        One thread calls this, in the order of batches.

        Args:
            filled: Call of ``fill``.
        """
        try:
            slot = filled.result()
        finally:
            # The error's traceback keeps this frame, which must not keep the call, because the call
            # keeps the error.
            del filled
        if slot is not None:
            self._transform(slot)
        return slot

    def fill_now(
        self, fill: Callable[[Slot, int], Slot | None], slot: Slot, turn: int
    ) -> Slot | None:
        """Call ``fill`` and the transforms in this thread, as the threads of a loop do."""
        with self._transforms.modes():
            filled = fill(slot, turn)
            if filled is not None:
                self._transform(filled)
        return filled

    def _transform(self, slot: Slot) -> None:
        transforms = self._transforms
        counters = self._mover.counters
        number = slot.number
        if transforms.gather is not None:
            assert transforms.host is not None
            rows = slot.rows
            batch = slot.batch
            assert batch is not None
            slot.rows = None
            self._mover.check_stop()
            made = transforms.on_rows(rows, batch, number)
            # Only the function may keep the memory of these rows.
            del rows, batch
            slot.host_transform_s = count_calls(
                counters, "host_transform", transforms.host.take_calls()
            )
            slot.made_s = counters.now()
            self._filler.gather(slot, made, number)
        if transforms.device is not None:
            call = transforms.on_device(slot.tensors, number)
            batch = slot.batch
            assert batch is not None
            try:
                self._mover.transform(slot, call)
            except Cancelled:
                raise
            except Exception as error:
                if not batch.keeps_errors:
                    raise
                self._filler.fail(slot, batch, error, number)
            calls = transforms.device.take_calls()
            # On an asynchronous device, the Transfer records the work that the transform queues.
            lane: Lane | None = "device_transform" if self._mover.device.unified else None
            slot.device_transform_s = count_calls(counters, lane, calls)


def count_calls(counters: Counters, lane: Lane | None, calls: Sequence[TransformCall]) -> float:
    """Return the seconds of calls of a transform, and record them in a timeline.

    Args:
        counters: Counters of the loop.
        lane: Lane of the timeline; None to record nothing.
        calls: The calls.
    """
    if counters.timeline is not None and lane is not None:
        for call in calls:
            counters.timeline.add(lane, *call)
    return sum(call.end_s - call.start_s for call in calls)
