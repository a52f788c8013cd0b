"""make_loop: puts a loop together from what it needs, and from nothing else.

| a loop that ... | has |
|---|---|
| reads rows in memory, on the CPU | a crew of native threads, and a mover that allocates |
| reads otherwise | draws, a filler and a mover |
| has several readers, or a source that calls ``host_transform`` | draws in turns |
| writes rows back, or has caches | also a writer and its queue |
| writes rows that may recur | also draws that compare rows |
| calls transforms | a filler that does so |
| records a timeline | also a wrapper that records reads, and names calls for a GPU's profiler |
| measures its depth | a loop that changes between prefetching and the synchronous loop |
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from pinfeed.devices.device import Device, Tensor
from pinfeed.pipeline.crew_loop import CrewLoop
from pinfeed.pipeline.depth_choice import DepthChoice
from pinfeed.pipeline.draws import (
    BatchDraws,
    ComparedDraws,
    Draws,
    Mover,
    SharedDraws,
    Thunks,
    close_unless_running,
)
from pinfeed.pipeline.filler import Filler, TransformingFiller
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.host_writes import HostWrites
from pinfeed.pipeline.loop import FillParts, Loop, LoopParts, SynchronousLoop
from pinfeed.pipeline.loop_threads import call_named
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.position import EpochPosition
from pinfeed.pipeline.prefetch_loop import MeasuredLoop, PrefetchLoop
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.sources.source import Source
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.writer import Writer
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.timeline import Timeline
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import Sequential

Fill = Callable[[Slot, int], Slot | None]
Lend = Callable[[Slot], deque[list[Tensor]]]


def make_loop(
    mover: Mover,
    source: Source,
    position: EpochPosition,
    choice: DepthChoice,
    transforms: LoopTransforms,
) -> Loop:
    """Return a new loop.

    Args:
        mover: Mover of the batches. No other loop may use it at the same time.
        source: Source of the batches.
        position: Epoch, and first batch.
        choice: Number of batches to prefetch, and of reader threads.
        transforms: The transforms.
    """
    schedule = choice.schedule
    first = position.batch
    if isinstance(mover, HostTransfer) and isinstance(source, RowSource) and not transforms:
        crew_loop = _crew_loop(mover, source, position, schedule)
        if crew_loop is not None:
            return crew_loop
    # Reader threads iterate over the batches, one at a time.
    thunks = source.epoch(
        position.epoch, position.batch, position.checksum, schedule.batches_per_slot
    )
    writer: Transfer | HostWrites | None = None
    if schedule.has_writer:
        writer = mover if isinstance(mover, Transfer) else HostWrites(mover)
    # The writer of a device that uses host memory wraps methods of its mover.
    moves: Any = mover if writer is None else writer
    draws = _draws(mover, thunks, first, schedule, transforms, writer)
    filler: Filler
    if transforms:
        filler = TransformingFiller(mover, draws, moves.fill, first, schedule, transforms)
    else:
        filler = Filler(mover, draws, moves.fill, first, schedule)
    fill: Fill = filler.fill
    timeline = mover.counters.timeline
    if timeline is not None:
        fill = functools.partial(_fill_recorded, timeline, fill)
    parts = FillParts(
        mover=mover,
        draws=draws,
        close=draws.close,
        first=first,
        schedule=schedule,
        fill=fill,
        fill_now=fill,
        lend=moves.lend,
        stop=functools.partial(_stop, source, mover.stop),
        quiesce=moves.quiesce,
        reserve=getattr(moves, "reserve", None),
        writer=writer,
        # A fill on a GPU may wait for copies, and the code of the user may need its own thread.
        may_help=mover.device.unified and isinstance(source, RowSource) and not transforms,
    )
    if isinstance(filler, TransformingFiller):
        parts.stop = functools.partial(_stop, source, filler.stop)
        parts.fill_now = functools.partial(filler.fill_now, fill)
        parts.transform = filler.transform if transforms.are_called_in_loop else None
        parts.lend = functools.partial(_lend_transformed, mover.counters, moves.lend)
    if timeline is not None and not mover.device.unified:
        _name_calls(parts)
    if parts.reserve is not None:
        parts.fill_now = functools.partial(_reserve_and_fill, parts.reserve, parts.fill_now)
    if schedule.measures_depth:
        return MeasuredLoop(parts, choice)
    return PrefetchLoop(parts) if schedule.depth else SynchronousLoop(parts)


def _crew_loop(
    mover: HostTransfer, source: RowSource, position: EpochPosition, schedule: PrefetchSchedule
) -> CrewLoop | None:
    """Return a loop whose rows a crew copies, if all rows are in memory and an order draws them."""
    batches = source.batches
    if schedule.has_writer or schedule.measures_depth or not isinstance(batches, OrderBatches):
        return None
    memory_rows = source.memory_rows()
    if memory_rows is None:
        return None
    spans = batches.spans(position.epoch, position.batch, schedule.batches_per_slot)
    parts = LoopParts(
        mover=mover,
        first=position.batch,
        # One thread draws row indices, if the loop prefetches.
        schedule=dataclasses.replace(schedule, n_readers=1),
        lend=mover.lend,
        stop=mover.stop,
        close=functools.partial(close_unless_running, spans),
        quiesce=mover.quiesce,
    )
    # To draw consecutive rows takes less time than to take them from another thread.
    draws_ahead = type(batches.order) is not Sequential
    return CrewLoop(parts, source, batches.batch_size, memory_rows, spans, draws_ahead=draws_ahead)


def _draws(
    mover: Mover,
    thunks: Thunks,
    first: int,
    schedule: PrefetchSchedule,
    transforms: LoopTransforms,
    writer: Writer | None,
) -> BatchDraws:
    """Return the draws of a loop."""
    draws = Draws(mover, thunks)
    # The source calls ``host_transform``, unless the loop reads the rows for it.
    host = transforms.host if transforms.gather is None else None
    if host is not None or schedule.n_readers > 1:
        draws = SharedDraws(mover, thunks, schedule.n_readers, host)
    # Batches share no written rows without writes, or if every row of an epoch is distinct.
    if writer is not None and schedule.writes and schedule.repeats:
        return ComparedDraws(draws, writer, first, schedule)
    return draws


def _stop(source: Source, stop_fills: Callable[[], object]) -> None:
    source.stop()
    stop_fills()


def _reserve_and_fill(
    reserve: Callable[[Slot], object], fill_now: Fill, slot: Slot, turn: int
) -> Slot | None:
    reserve(slot)
    return fill_now(slot, turn)


def _lend_transformed(counters: Counters, lend: Lend, slot: Slot) -> deque[list[Tensor]]:
    """Lend a slot, and count the time of its transforms."""
    counters.count_transforms(
        slot.host_transform_s,
        slot.device_transform_s,
        slot.read_s,
        slot.copy_wait_s,
        slot.ready_s,
    )
    return lend(slot)


def _fill_recorded(timeline: Timeline, fill: Fill, slot: Slot, turn: int) -> Slot | None:
    """Fill a slot, and record the time in which a reader has read its rows."""
    filled = fill(slot, turn)
    if filled is not None and filled.batch is not None:
        n_batches = len(filled.batch.batches)
        if filled.rows is not None:
            begin_s, end_s = (
                filled.source_done_s - filled.source_s,
                filled.source_done_s + filled.rows_s,
            )
        else:
            end_s = filled.ready_s
            begin_s = end_s - filled.host_transform_s - filled.read_s
        timeline.add("read", filled.number, begin_s, end_s, n_batches)
    return filled


def _name_calls(parts: FillParts) -> None:
    """Mark the calls of a loop for the profiler of a GPU, for example as ``pinfeed read 12``."""
    first, step = parts.first, parts.schedule.batches_per_slot
    named = functools.partial(functools.partial, _call_numbered, parts.mover.device)

    def of_turn(slot: Any, turn: int) -> int:
        return first + turn * step

    def in_order() -> Callable[..., int]:
        numbers = itertools.count(first, step)
        return lambda *args: next(numbers)

    parts.is_named = True
    parts.fill = named("read", of_turn, parts.fill)
    parts.fill_now = named("read", of_turn, parts.fill_now)
    parts.lend = named("lend", lambda slot: int(slot.number), parts.lend)
    parts.wait = named("wait", in_order(), parts.wait)
    if parts.transform is not None:
        parts.transform = named("transform", in_order(), parts.transform)


def _call_numbered(
    device: Device, lane: str, number: Callable[..., int], fn: Callable[..., Any], *args: Any
) -> Any:
    try:
        return call_named(device, f"{lane} {number(*args)}", fn, *args)
    finally:
        # For the same reason as in call_named.
        del fn, args
