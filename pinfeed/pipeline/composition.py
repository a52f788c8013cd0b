"""make_loop: puts a loop together from what it needs, and from nothing else.

| a loop that ... | has |
|---|---|
| reads rows in memory | an engine of native threads, and a mover that allocates |
| also writes them back, on a GPU | a writer, which is a native thread |
| passes on a loader's batches | the loader's iterator and, with a GPU, a mover without threads |
| reads otherwise | draws, a filler and a mover |
| trains rows that the device reads and writes itself | also a window of batches |
| otherwise writes rows back, or has caches | also a writer and its queue |
| writes rows that may recur | also draws that compare rows |
| calls transforms | a filler that does so, in one thread or in several |
| records a timeline | also a filler that records reads, and names calls for a GPU's profiler |
| continues with the next epoch | draws of many epochs |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pinfeed.devices.device import Tensor
from pinfeed.pipeline.device_batches import DeviceBatches
from pinfeed.pipeline.device_rows import DeviceRows
from pinfeed.pipeline.engine_loop import EngineLoop
from pinfeed.pipeline.engine_writes import are_in_memory
from pinfeed.pipeline.filler import (
    ComparedDraws,
    Draws,
    Filler,
    Mover,
    TransformingFiller,
    close_unless_running,
)
from pinfeed.pipeline.host_transfer import HostTransfer, HostWrites
from pinfeed.pipeline.loader_loop import LoaderLoop, MovingLoaderLoop
from pinfeed.pipeline.loop import Loop, LoopParts
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.position import EpochPosition
from pinfeed.pipeline.prefetch_loop import EpochsAhead, FillParts, PrefetchLoop, SynchronousLoop
from pinfeed.pipeline.recorded_filler import RecordedFiller, name_calls
from pinfeed.pipeline.row_window import RowWindow, WindowWrites
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.loader_source import LoaderSource
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.sources.source import BatchThunks, Source
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.write_queue import LoopWrites, WriteQueue
from pinfeed.pipeline.writer import Writer
from pinfeed.profiling.counters import Counters
from pinfeed.rows.order_batches import OrderBatches
from pinfeed.rows.orders import Sequential, Shuffled
from pinfeed.stores.host_rows import memory_rows_of

if TYPE_CHECKING:
    from pinfeed.native.memory_rows import MemoryRows

Lend = Callable[[Slot], deque[list[Tensor]]]


def make_loop(
    mover: Mover,
    source: Source,
    position: EpochPosition,
    schedule: PrefetchSchedule,
    transforms: LoopTransforms,
    *,
    continuous: bool = False,
) -> Loop:
    """Return a new loop.

    Args:
        mover: Mover of the batches. No other loop may use it at the same time.
        source: Source of the batches.
        position: Epoch, and first batch.
        schedule: Number of batches to prefetch, and of reader threads.
        transforms: The transforms.
        continuous: Whether the loop may read the next epoch before it ends this one.
    """
    rows_mover = _rows_mover(mover, source, schedule, transforms)
    if rows_mover is not None and isinstance(source, RowSource):
        memory_rows = source.memory_rows()
        if memory_rows is not None:
            return _engine_loop(rows_mover, source, position, schedule, memory_rows)
        # Until the rows are in memory, each epoch may be the last one that needs reader threads.
        continuous = continuous and not source.may_be_in_memory
    if isinstance(source, LoaderSource) and source.is_plain and not transforms:
        loader_mover = _loader_mover(mover, schedule)
        if loader_mover is not None:
            return _loader_loop(loader_mover, source, position, schedule)
    parts = _fill_parts(mover, source, position, schedule, transforms, continuous=continuous)
    return PrefetchLoop(parts) if schedule.depth else SynchronousLoop(parts)


def _fill_parts(
    mover: Mover,
    source: Source,
    position: EpochPosition,
    schedule: PrefetchSchedule,
    transforms: LoopTransforms,
    *,
    continuous: bool,
) -> FillParts:
    """Return the parts of a loop whose slots are filled by calls in Python."""
    begin = (position.epoch, position.batch, position.checksum)
    epochs = None
    # Reader threads iterate over the batches, one at a time.
    if continuous and schedule.depth and not schedule.has_writer:
        epochs = EpochsAhead(source, begin, schedule)
        thunks = epochs.thunks()
    else:
        thunks = source.epoch(*begin, schedule.batches_per_slot)
    moves, writer, open_writes = _write_parts(mover, source, schedule)
    opened = contextlib.ExitStack()
    thunks = _in_context(opened, source, thunks)
    # The source calls ``host_transform``, unless the loop reads the rows for it.
    host = transforms.host if transforms.gather is None else None
    draws: Draws | ComparedDraws
    draws = drawn = Draws(mover, thunks, schedule.n_readers, host)
    if writer is not None and _needs_comparison(source, schedule):
        in_window = isinstance(moves, RowWindow)
        draws = ComparedDraws(drawn, writer, schedule, finds_unread=in_window)
    opened.callback(draws.close)
    timeline = mover.counters.timeline
    lend = moves.lend
    if transforms:
        in_fill = timeline is None and _reads_quickly(source, schedule, transforms)
        filler: Filler = TransformingFiller(
            mover, draws, moves.fill, schedule, transforms, in_fill=in_fill
        )
        lend = functools.partial(_lend_transformed, mover.counters, lend)
    else:
        filler = Filler(mover, draws, moves.fill)
    if timeline is not None:
        filler = RecordedFiller(filler, timeline, mover.device, position.epoch)
    parts = FillParts(
        mover=mover,
        close=functools.partial(_close, source, opened),
        first=position.batch,
        epoch=position.epoch,
        schedule=schedule,
        filler=filler,
        lend=lend,
        stop=functools.partial(_stop, source, filler.stop),
        quiesce=moves.quiesce,
        reserve=getattr(moves, "reserve", None),
        queue=getattr(moves, "queue", None),
        open_writes=open_writes,
        epochs=epochs,
        # A fill on a GPU may wait for copies, and the code of the user may need its own thread.
        may_help=mover.device.unified and isinstance(source, RowSource) and not transforms,
    )
    if timeline is not None and not mover.device.unified:
        name_calls(parts)
    return parts


def _reads_quickly(source: Source, schedule: PrefetchSchedule, transforms: LoopTransforms) -> bool:
    """Return whether rows for ``host_transform`` are read faster than another thread wakes up."""
    return (
        transforms.gather is not None
        and schedule.n_readers == schedule.n_transform_threads == 1
        and isinstance(source, RowSource)
        and all(memory_rows_of(store) is not None for store in source.stores)
    )


def _rows_mover(
    mover: Mover, source: Source, schedule: PrefetchSchedule, transforms: LoopTransforms
) -> HostTransfer | DeviceRows | None:
    """Return the mover of a loop whose rows an engine may gather; None for other loops."""
    if transforms or not isinstance(source, RowSource):
        return None
    if not isinstance(source.batches, OrderBatches):
        return None
    if isinstance(mover, HostTransfer):
        return None if schedule.has_writer else mover
    if schedule.has_caches or (schedule.writes and schedule.repeats):
        # A batch may need values that were written after its rows were gathered.
        return None
    driver = mover.device.engine_driver
    # A timeline has timed events.
    if driver is None or mover.counters.timeline is not None:
        return None
    return DeviceRows(mover, driver)


def _engine_loop(
    mover: HostTransfer | DeviceRows,
    source: RowSource,
    position: EpochPosition,
    schedule: PrefetchSchedule,
    memory_rows: Sequence[MemoryRows],
) -> EngineLoop:
    """Return a loop whose rows, which an order draws, an engine gathers."""
    batches = source.batches
    assert isinstance(batches, OrderBatches)
    spans = batches.spans(position.epoch, position.batch, schedule.batches_per_slot)
    open_writes = None
    if isinstance(mover, DeviceRows) and schedule.writes and not are_in_memory(source.stores):
        open_writes = _queue_of(mover.transfer, schedule)
    parts = LoopParts(
        mover=mover,
        first=position.batch,
        # One thread draws row indices, if the loop prefetches.
        schedule=dataclasses.replace(schedule, n_readers=1),
        lend=mover.lend,
        stop=mover.stop,
        close=lambda n_requested: close_unless_running(spans),
        quiesce=mover.quiesce,
        open_writes=open_writes,
    )
    # To draw these rows takes less time than to take them from another thread, which also needs the
    # interpreter's lock.
    draws_ahead = type(batches.order) not in (Sequential, Shuffled)
    return EngineLoop(
        parts, source, batches.batch_size, memory_rows, spans, draws_ahead=draws_ahead
    )


def _write_parts(
    mover: Mover, source: Source, schedule: PrefetchSchedule
) -> tuple[Any, Writer | None, Callable[[LoopThreads], LoopWrites] | None]:
    """Return what moves the batches of a loop, its writer, and how its write-backs are made."""
    if not schedule.has_writer:
        return mover, None, None
    writer = mover if isinstance(mover, Transfer) else HostWrites(mover)
    if isinstance(mover, Transfer) and _moves_all_rows(mover, source):
        window = RowWindow(mover, schedule.depth)
        return window, writer, functools.partial(WindowWrites, window)
    return writer, writer, _queue_of(writer, schedule)


def _moves_all_rows(mover: Transfer, source: Source) -> bool:
    """Return whether the device reads and writes all rows of a training loop itself."""
    stores = source.trained_stores
    # Rows to gather are given as int32.
    return bool(stores) and all(
        mover.device.reaches(store) and store.n_rows < 1 << 31 for store in stores
    )


def _queue_of(
    writer: Transfer | HostWrites, schedule: PrefetchSchedule
) -> Callable[[LoopThreads], LoopWrites]:
    """Return a function that makes the write-backs of a loop by a thread, given its threads."""
    return lambda threads: WriteQueue(writer, threads, schedule.max_pending_writes)


def _loader_mover(mover: Mover, schedule: PrefetchSchedule) -> HostTransfer | DeviceBatches | None:
    """Return the mover of a loop over a loader that needs no thread; None for other loops."""
    if mover.counters.timeline is not None:
        return None
    if isinstance(mover, HostTransfer):
        # Tensors on the CPU are already on a device of this name.
        return mover if mover.device.name == "cpu" and not schedule.depth else None
    driver = mover.device.engine_driver
    return None if driver is None else DeviceBatches(mover, driver)


def _loader_loop(
    mover: HostTransfer | DeviceBatches,
    source: LoaderSource,
    position: EpochPosition,
    schedule: PrefetchSchedule,
) -> LoaderLoop:
    """Return a loop that passes the batches of a loader on."""
    parts = LoopParts(
        mover=mover,
        first=position.batch,
        schedule=schedule,
        lend=mover.lend,
        stop=functools.partial(_stop, source, mover.stop),
        close=source.rewind,
        quiesce=mover.quiesce,
    )
    make = LoaderLoop if isinstance(mover, HostTransfer) else MovingLoaderLoop
    batches = source.own_batches(position.epoch, position.batch, may_wait=False)
    return make(parts, source, batches)


def _needs_comparison(source: Source, schedule: PrefetchSchedule) -> bool:
    """Return whether a batch may have written rows twice, or in common with one in flight."""
    is_in_flight = schedule.depth or not source.has_distinct_rows
    return bool(schedule.writes and schedule.repeats and is_in_flight)


def _in_context(opened: contextlib.ExitStack, source: Source, thunks: BatchThunks) -> BatchThunks:
    """Yield the batches of a source, in its context, which ``opened`` ends.

    The readers may complete the last batches only after they have drawn the end.
    """
    opened.enter_context(source.loop_context())
    yield from thunks


def _stop(source: Source, stop_fills: Callable[[], object]) -> None:
    source.stop()
    stop_fills()


def _close(source: Source, opened: contextlib.ExitStack, n_requested: int) -> None:
    opened.close()
    source.rewind(n_requested)


def _lend_transformed(counters: Counters, lend: Lend, slot: Slot) -> deque[list[Tensor]]:
    """Lend a slot, and count the time of its transforms."""
    tensors = lend(slot)
    counters.counts.host_transform_s += slot.host_transform_s
    counters.counts.device_transform_s += slot.device_transform_s
    return tensors
