"""name_calls: marks the work on each batch with a name that the profiler of a GPU shows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.pipeline.loop import FillParts


def name_calls(parts: FillParts) -> None:
    """Mark the calls of a loop, for example as ``pinfeed read 12``."""
    device = parts.mover.device
    first, step = parts.first, parts.schedule.batches_per_slot

    def of_turn(slot: Any, turn: int) -> int:
        return first + turn * step

    def in_order() -> Callable[..., int]:
        numbers = itertools.count(first, step)
        return lambda *args: next(numbers)

    def named(lane: str, number: Callable[..., int], fn: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_call_named, device, lane, number, fn)

    parts.is_named = True
    parts.fill = named("read", of_turn, parts.fill)
    parts.fill_now = named("read", of_turn, parts.fill_now)
    parts.lend = named("lend", lambda slot: int(slot.number), parts.lend)
    parts.wait = named("wait", in_order(), parts.wait)
    if parts.transform is not None:
        parts.transform = named("transform", in_order(), parts.transform)


def _call_named(
    device: Device, lane: str, number: Callable[..., int], fn: Callable[..., Any], *args: Any
) -> Any:
    with device.named(f"pinfeed {lane} {number(*args)}"):
        try:
            return fn(*args)
        finally:
            # An error's traceback keeps this frame, which must not keep a call, because the call
            # keeps the error.
            del fn, args
