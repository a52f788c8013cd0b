"""SlotFiller: reader threads take batches from a source in turn, and gather them into slots."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence

from pinfeed.pipeline.batch_comparison import BatchComparison
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.recent_rows import HashedGroups, SharedRowSearch
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, failed_batch
from pinfeed.pipeline.sources.transforms import TransformCall
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.turns import Turns
from pinfeed.profiling.spans import Lane
from pinfeed.threads.call import Pending


class SlotFiller:
    """Fills slots with the batches of an epoch.

    A source is a generator. One reader thread at a time requests a batch from it, in order; several
    reader threads may gather.

    Args:
        transfer: Transfer that fills the slots.
        thunks: Batches of the epoch; closed by ``close``.
        first: Number of the first batch.
        schedule: Number of batches in a slot, and whether the loop may write rows back.
        transforms: The transforms.
    """

    def __init__(
        self,
        transfer: Transfer,
        thunks: Generator[BatchThunk, None, None],
        first: int,
        schedule: PrefetchSchedule,
        transforms: LoopTransforms,
    ) -> None:
        self._transfer = transfer
        self._counters = transfer.counters
        self._timeline = transfer.counters.timeline
        self._thunks: Generator[BatchThunk, None, None] | None = thunks
        self._first = first
        self._transforms = transforms
        self._host_gather = transforms.gather
        # The source calls ``host_transform``, unless the loop reads the rows for it.
        self._source_calls_transform = transforms.host is not None and transforms.gather is None
        self._batches_per_slot = schedule.batches_per_slot
        has_many_readers = schedule.n_readers > 1
        self._drawing = Turns(is_shared=has_many_readers)
        self._comparison: BatchComparison | None = None
        # Batches share no written rows without writes, or if every row of an epoch is distinct.
        if schedule.writes and schedule.repeats:
            self._comparison = BatchComparison(transfer, schedule.depth, is_shared=has_many_readers)

    def number(self, turn: int) -> int:
        """Return the number of the first batch of a turn."""
        return self._first + turn * self._batches_per_slot

    def compare(self, n_ahead: int) -> None:
        """Compare the rows of each batch with those of the ``n_ahead`` batches before it.

        The consumer thread calls this when no slot is being filled and all write-backs are
        completed. So later batches are not compared with earlier ones.
        """
        if self._comparison is not None:
            self._comparison.restart(n_ahead)

    def fill(self, slot: Slot, turn: int) -> Slot | None:
        """Fill a slot with the next batches; return None after the last one.

        If ``host_transform`` takes rows of stores, this only adds these rows to the slot, and
        ``transform`` fills it.

        Args:
            slot: Reserved slot.
            turn: Number of this call. Calls begin in the order of turns, but may reach this
                function in any order.
        """
        comparison = self._comparison
        hashed: HashedGroups | None = None
        search: SharedRowSearch | None = None
        try:
            batch, start, host_s = self._draw(turn)
            if batch is not None and comparison is not None:
                hashed = comparison.hash(batch)
        finally:
            if comparison is not None:
                # After an error, too, this call takes its turn, because the next one waits for it.
                search = comparison.add(hashed, turn, self.number(turn))
        if batch is None:
            return None
        if search is not None:
            batch.shared = search.find()
        slot.made_s = self._counters.now()
        slot.host_transform_s = host_s
        slot.source_s = slot.made_s - start - host_s
        if self._host_gather is not None:
            slot.rows = self._host_gather.read(batch, self._transfer.check_stop)
            slot.batch = batch
            slot.rows_s = self._counters.now() - slot.made_s
            self._add_read(slot, turn, start, slot.made_s + slot.rows_s)
            return slot
        self._gather(slot, batch, self.number(turn))
        if self._timeline is not None:
            took_s = slot.host_transform_s + slot.read_s
            self._add_read(slot, turn, slot.ready_s - took_s, slot.ready_s)
        return slot

    def transform(self, filled: Pending[Slot | None], turn: int) -> Slot | None:
        """Call the transforms on the batch of a slot, and return the slot.

        One thread calls this, in the order of turns.

        Args:
            filled: Call of ``fill``.
            turn: Number of its turn.
        """
        try:
            slot = filled.result()
        finally:
            # The error's traceback keeps this frame, which must not keep the call, because the call
            # keeps the error.
            del filled
        if slot is not None:
            self._transform(slot, self.number(turn))
        return slot

    def fill_now(self, slot: Slot, turn: int) -> Slot | None:
        """Call ``fill`` and ``transform`` in this thread, as the threads of a loop do."""
        with self._transforms.modes():
            filled = self.fill(slot, turn)
            if filled is not None and self._transforms.are_called_in_loop:
                self._transform(filled, self.number(turn))
        return filled

    def close(self) -> None:
        """Close the source now, not when an error's traceback is freed."""
        if self._comparison is not None:
            self._comparison.close()
        thunks = self._thunks
        # If an interrupt has cut off the wait for the reader threads, one may still run the source.
        if thunks is not None and inspect.getgeneratorstate(thunks) != inspect.GEN_RUNNING:
            thunks.close()
            self._thunks = None

    def _draw(self, turn: int) -> tuple[HostBatch | None, float, float]:
        """Return the next batch of the source, when its work began, and its host_transform's time.

        The batch is None after the last one.
        """
        host_s = 0.0
        self._drawing.wait_for(turn)
        start = self._counters.now()
        try:
            self._transfer.check_stop()
            thunk = next(self._thunks, None) if self._thunks is not None else None
        finally:
            if self._source_calls_transform:
                host_s = self._count_host_calls()
            self._drawing.end()
        return None if thunk is None else thunk(), start, host_s

    def _transform(self, slot: Slot, number: int) -> None:
        """Call the transforms on the batch of a slot."""
        transforms = self._transforms
        if transforms.gather is not None:
            rows = slot.rows
            batch = slot.batch
            assert batch is not None
            assert transforms.host is not None
            slot.rows = None
            self._transfer.check_stop()
            made = transforms.on_rows(rows, batch, number)
            # Only the function may keep the memory of these rows.
            del rows, batch
            slot.host_transform_s = self._count_host_calls()
            slot.made_s = self._counters.now()
            self._transfer.fill(slot, made, number)
        if transforms.device is not None:
            call = transforms.on_device(slot.tensors, number)
            batch = slot.batch
            assert batch is not None
            try:
                self._transfer.transform(slot, call)
            except Cancelled:
                raise
            except Exception as error:
                if not batch.keeps_errors:
                    raise
                self._fail(slot, batch, error, number)
            slot.device_transform_s = self._count(
                "device_transform", transforms.device.take_calls()
            )

    def _add_read(self, slot: Slot, turn: int, start_s: float, end_s: float) -> None:
        """Record that a reader has read the rows of a slot."""
        if self._timeline is not None and slot.batch is not None:
            n_batches = len(slot.batch.batches)
            self._timeline.add("read", self.number(turn), start_s, end_s, n_batches)

    def _count_host_calls(self) -> float:
        """Record the calls of ``host_transform`` so far, and return their seconds."""
        assert self._transforms.host is not None
        return self._count("host_transform", self._transforms.host.take_calls())

    def _count(self, lane: Lane, calls: Sequence[TransformCall]) -> float:
        """Record calls of a transform, and return their seconds."""
        timeline = self._timeline
        # On an asynchronous device, the Transfer records the work that the transform queues.
        if timeline is not None and (lane == "host_transform" or self._transfer.device.unified):
            for call in calls:
                timeline.add(lane, *call)
        return sum(call.end_s - call.start_s for call in calls)

    def _gather(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather the batches of a slot.

        If one of several batches cannot be gathered, the slot carries the earlier ones. The error
        is raised when the loop requests the batch that failed. If the loop continues after errors,
        the error takes the place of its batch.
        """
        try:
            return self._transfer.fill(slot, batch, number)
        except Cancelled:
            raise
        except Exception as error:
            if batch.keeps_errors:
                return self._fail(slot, batch, error, number)
            n_batches = len(batch.batches)
            n_good = self._n_good(slot, batch, number) if n_batches > 1 else 0
            if n_good in (0, n_batches):
                # Either the first batch failed, or all succeed now and the failed one is unknown.
                raise
            slot.error = error
        return self._transfer.fill(slot, batch.cut(0, n_good), number)

    def _fail(self, slot: Slot, batch: HostBatch, error: Exception, number: int) -> Slot:
        """Fill a slot with the error of its batch, in place of the batch."""
        failed = failed_batch(error)
        failed.state = batch.state
        return self._transfer.fill(slot, failed, number)

    def _n_good(self, slot: Slot, batch: HostBatch, number: int) -> int:
        """Return the number of batches before the first that cannot be gathered."""
        for i in range(len(batch.batches)):
            try:
                self._transfer.fill(slot, batch.cut(i, i + 1), number + i)
            except Exception:
                return i
        return len(batch.batches)
