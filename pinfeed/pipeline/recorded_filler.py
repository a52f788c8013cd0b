"""RecordedFiller: a filler whose work a timeline records, and a GPU's profiler shows by names."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pinfeed.devices.device import Device, Tensor
from pinfeed.pipeline.filler import Filler, Step
from pinfeed.pipeline.loop_threads import call_named
from pinfeed.pipeline.prefetch_loop import FillParts
from pinfeed.pipeline.slot import DeviceSlot, Slot
from pinfeed.profiling.timeline import Timeline


class RecordedFiller(Filler):
    """Fills slots as another filler does, and records the time in which it has read their rows.

    A GPU's profiler shows each call under a name, for example ``pinfeed read 12``.

    Args:
        filler: The other filler.
        timeline: The timeline, in which the loop has begun.
        device: Device of the loop.
        epoch: First epoch of the loop. Each later one counts as a loop of the timeline.
    """

    def __init__(self, filler: Filler, timeline: Timeline, device: Device, epoch: int) -> None:
        self._filler = filler
        self._timeline = timeline
        self._device = device
        self._first_loop = timeline.loop - epoch
        self.stop = filler.stop  # type: ignore[method-assign]
        self.context = filler.context

    @property
    def steps(self) -> Sequence[Step]:
        call = functools.partial(self._call, "transform")
        return [
            step._replace(function=functools.partial(call, step.function))
            for step in self._filler.steps
        ]

    def fill(self, slot: Slot) -> Slot | None:
        if isinstance(slot, DeviceSlot):
            loop = self._first_loop + slot.epoch
            slot.context = functools.partial(self._timeline.work_for, loop)
        filled: Slot | None = self._call("read", self._fill, slot)
        return filled

    def _call(self, lane: str, function: Callable[[Slot], Any], slot: Slot) -> Any:
        with self._timeline.work_for(self._first_loop + slot.epoch):
            return named(self._device, lane, function, slot)

    def _fill(self, slot: Slot) -> Slot | None:
        filled = self._filler.fill(slot)
        if filled is None or filled.batch is None:
            return filled
        if filled.rows is not None:
            begin_s = filled.source_done_s - filled.source_s
            end_s = filled.source_done_s + filled.rows_s
        else:
            end_s = filled.ready_s
            begin_s = end_s - filled.host_transform_s - filled.read_s
        self._timeline.add("read", filled.number, begin_s, end_s, len(filled.batch.batches))
        return filled


def named(device: Device, lane: str, function: Callable[[Slot], Any], slot: Slot) -> Any:
    """Call a function on a slot; the profiler of an asynchronous device shows a name."""
    if device.unified:
        return function(slot)
    return call_named(device, f"{lane} {slot.number}", function, slot)


def name_calls(parts: FillParts) -> None:
    """Name the calls that the thread of a loop makes, and its write-backs."""
    device = parts.mover.device
    numbers = itertools.count(parts.first, parts.schedule.batches_per_slot)
    lend, wait = parts.lend, parts.wait

    def named_lend(slot: Slot) -> deque[list[Tensor]]:
        tensors: deque[list[Tensor]] = named(device, "lend", lend, slot)
        return tensors

    def named_wait(filled: Any) -> Any:
        try:
            return call_named(device, f"wait {next(numbers)}", wait, filled)
        finally:
            # For the same reason as in call_named.
            del filled

    parts.is_named = True
    parts.lend = named_lend
    parts.wait = named_wait
