"""EngineWrites: write-backs of a loop whose rows an engine moves, in one call without Python.

The rows are in arrays in memory, and no row of an epoch occurs twice. So no batch needs values that
are not written yet. ``pinfeed/native/write.c`` shows the protocol of streams and events. Here is
what stays in Python: memory of torch, and errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.native.library import address_of
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.writer import RowWriter
from pinfeed.pipeline.device_rows import DeviceParts, DeviceRows
from pinfeed.pipeline.loop_threads import N_SCATTER_HELPERS, LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.source import BatchValues
from pinfeed.pipeline.write_queue import LoopWrites
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import Store


def are_in_memory(stores: Sequence[Store]) -> bool:
    """Return whether all rows that may be written are in arrays in memory."""
    return all(type(store) in (ArrayStore, PinnedStore) for store in stores if store.writable)


class EngineWrites(LoopWrites):
    """Write-backs of one loop, and their errors.

    Args:
        mover: Mover of the loop's batches.
        stores: Stores of the rows.
        memory_rows: Rows of each store.
        batch_size: Most rows of a batch.
        schedule: Schedule of the loop.
        threads: Threads of the loop.
    """

    def __init__(
        self,
        mover: DeviceRows,
        stores: Sequence[Store],
        memory_rows: Sequence[MemoryRows],
        batch_size: int,
        schedule: PrefetchSchedule,
        threads: LoopThreads,
    ) -> None:
        super().__init__(threads)
        self._mover = mover
        self._device = mover.device
        self._counters = mover.counters
        self._batch_size = batch_size
        self._limit = schedule.max_pending_writes
        self._n_threads = 1 + N_SCATTER_HELPERS if schedule.depth else 0
        self._seconds = 0.0
        written = {k: store for k, store in enumerate(stores) if store.writable}
        self._parts = DeviceParts(self._device, "scatter", written, memory_rows)
        self._full = self._parts.job.layout(batch_size)

    def write(self, batch: BatchValues, *, copied: bool, check: bool) -> None:
        """Queue values of a batch (consumer); all are copied."""
        number, (group,), (tensors,) = batch
        self.require_running()
        writer = self._threads.row_writer or self._threads.open_row_writer(self._opened)
        most_pending = max(0, self._limit - 1)
        waited_s = 0.0
        if writer.n_pending > most_pending:
            start = self._counters.now()
            writer.wait(most_pending)
            waited_s = self._counters.now() - start
        if check:
            self.check()
        n = len(group.rows)
        layout = self._full if n == self._batch_size else self._parts.job.layout(n)
        compute = self._device.current_stream()
        held, _ = self._device.empty_parts(layout, compute)
        held_at = list(map(self._device.address, held))
        values_at = [0] * len(held)
        for k, tensor in enumerate(tensors or ()):
            if tensor is not None:
                # The program may have changed its stream since it allocated this.
                self._device.share(tensor, compute)
                place = self._parts.places[k]
                values_at[place] = self._device.dense_address(tensor)
                if not values_at[place]:
                    self._device.copy(tensor, held[place], compute)
                    values_at[place] = held_at[place]
        memory = group.rows, held
        rows = address_of(group.rows)
        writer.write(compute.handle, rows, n, layout.offsets, values_at, held_at, memory)
        if self._limit and not waited_s:
            return
        # A wait costs nothing while the device still computes the values.
        is_idle = writer.is_computed()
        start = self._counters.now() - waited_s
        if not self._limit:
            writer.wait()
        self._counters.count_write_wait(start, idle=is_idle, batch=number)

    def check(self) -> None:
        self._collect()
        self._raise_noted(is_over=not self._threads.has_ended)

    def finish(self) -> None:
        writer = self._threads.row_writer
        if writer is None:
            return
        start = self._counters.now()
        writer.wait()
        # A GPU may still work on the last training steps.
        self._counters.count_write_wait(start, idle=False)
        self._collect()

    def _collect(self) -> None:
        """Count the time of the writer, and note its error."""
        writer = self._threads.row_writer
        if writer is None:
            return
        seconds = writer.seconds
        self._counters.counts.write_s += seconds - self._seconds
        self._seconds = seconds
        if writer.error and not self._has_failed:
            try:
                self._mover.driver.raise_error(writer.error)
            except Exception as error:
                self._note(error)

    def _opened(self) -> RowWriter:
        """Open the writer."""
        mover = self._mover
        parts = self._parts
        ends = [*self._full.offsets, self._full.nbytes]
        return RowWriter(
            mover.driver,
            mover.transfer.write_stream.handle,
            mover.transfer.write_staging(ends[parts.n_staged]),
            max(1, self._limit),
            parts.sources,
            n_threads=self._n_threads,
            n_staged=parts.n_staged,
            direct=parts.direct,
            # The device has compiled the kernels.
            owner=self._device,
        )
