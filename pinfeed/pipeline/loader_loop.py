"""Loops without threads over a loader: LoaderLoop on the CPU, MovingLoaderLoop on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, cast

from pinfeed.errors import ClosedError
from pinfeed.pipeline.device_batches import DeviceBatches, MovedBatch
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop import CLOSED_WHILE_WAITING, Loop, LoopParts
from pinfeed.pipeline.part_memory import known_nbytes
from pinfeed.pipeline.sources.loader_source import LoaderSource, StatefulSource, is_end
from pinfeed.pipeline.sources.source import host_batch_of
from pinfeed.pipeline.sources.user_calls import ENDS_SILENTLY, raise_if_silent
from pinfeed.threads.exit import exit_hook


class PassedBatch(LentBatch):
    """The batch of a loader that a loop has received without a copy.

    Args:
        number: Number of the batch in its epoch.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.checksum = 0
        self.state: Any = None
        self.data: list[Any] = []
        """The batch in the user's structure, until it is taken."""
        self.take = self.data.pop  # type: ignore[method-assign]


class LoaderLoop(Loop):
    """A loop without threads over a loader, whose batches stay on the CPU.

    It makes few calls, because a training step drops them from the caches of the processor.

    Args:
        parts: Mover and functions of the loop.
        source: Source of the batches, whose ``is_plain`` is True.
        batches: The loader's batches of the epoch.
    """

    def __init__(self, parts: LoopParts, source: LoaderSource, batches: Iterator[Any]) -> None:
        # The import is local, because the pipeline is loaded without torch.
        from pinfeed.tensors.numpy_torch import passed_on

        super().__init__(parts)
        self._state = source.state if isinstance(source, StatefulSource) else None
        self._batches = batches
        self._passed_on = passed_on

    def batches(self) -> Generator[LentBatch, None, None]:
        """Yield the batches in order, for the training steps."""
        counters = self._counters
        counts = counters.counts
        mover: Any = self._parts.mover
        threads = self.threads
        lent_batch = PassedBatch(self._parts.first)
        self.consumer = threading.get_ident()
        try:
            while not mover.is_stopping and threads.n_forks == exit_hook.n_forks:
                try:
                    batch = next(self._batches)
                except ENDS_SILENTLY as error:
                    if isinstance(error, StopIteration) and is_end(error):
                        return
                    raise_if_silent(error)
                    raise
                if self._state is not None:
                    lent_batch.state = self._state()
                batch, n_rows, nbytes = self._passed_on(batch) or self._moved(batch)
                ready_s = counters.now()
                source_s = ready_s - counters.requested_s
                counts.read_s += source_s
                counts.source_s += source_s
                counters.receive(lent_batch.number, n_rows, nbytes, ready_s, idle=True)
                lent_batch.data.append(batch)
                del batch
                yield lent_batch
                lent_batch.number += 1
                self._n_requested += 1
            threads.require_running()
            raise ClosedError(CLOSED_WHILE_WAITING)
        finally:
            self._leave()

    def _moved(self, batch: Any) -> tuple[Any, int, int]:
        """Return a batch with all its values on the CPU, its samples, and the known bytes."""
        host_batch = host_batch_of(batch)
        device = self._parts.mover.device
        values = [device.adopt(part, None) for part in host_batch.parts]
        return host_batch.data(values), host_batch.batches[0][0], sum(map(known_nbytes, values))

    def _forget_slots(self) -> None:
        super()._forget_slots()
        self._batches = iter(())


class MovingLoaderLoop(LoaderLoop):
    """A loop without threads over a loader, whose batches move to a device.

    The device is asynchronous. So while it does the training step that was queued last, this loop
    takes the next batch from the loader, and queues its copies.

    Args:
        parts: Mover and functions of the loop.
        source: Source of the batches, whose ``is_plain`` is True.
        batches: The loader's batches of the epoch.
    """

    def __init__(self, parts: LoopParts, source: LoaderSource, batches: Iterator[Any]) -> None:
        super().__init__(parts, source, batches)
        self._mover = cast("DeviceBatches", parts.mover)
        # Batches that are on their way, in order.
        self._ahead: deque[MovedBatch] = deque()
        self._has_more = True
        # Error of the batch after these, if it could not be taken.
        self._errors: list[Exception] = []

    def batches(self) -> Generator[LentBatch, None, None]:
        """Yield the batches in order, for the training steps."""
        counters = self._counters
        ahead = self._ahead
        n_ahead = self._parts.schedule.depth
        lent_batch = PassedBatch(self._parts.first)
        self.consumer = threading.get_ident()
        exit_hook.loops.add(self._reference)
        try:
            while not self._mover.is_stopping:
                while self._has_more and len(ahead) <= n_ahead:
                    self._take()
                if not ahead:
                    if self._errors:
                        raise self._errors.pop()
                    return
                moved = ahead.popleft()
                is_idle = self._mover.receive(moved)
                lent_batch.state = moved.state
                lent_batch.data.append(moved.data)
                n_rows, nbytes = moved.n_rows, moved.nbytes
                del moved
                now = counters.now()
                counters.receive(lent_batch.number, n_rows, nbytes, now, idle=is_idle)
                yield lent_batch
                lent_batch.number += 1
                self._request()
            raise ClosedError(CLOSED_WHILE_WAITING)
        finally:
            self._leave()

    def _take(self) -> None:
        """Take the next batch from the loader, and queue its copies; keep an error for later."""
        counters = self._counters
        begin_s = counters.now()
        try:
            self._mover.finish_reads()
            try:
                batch = next(self._batches)
            except ENDS_SILENTLY as error:
                if isinstance(error, StopIteration) and is_end(error):
                    self._has_more = False
                    return
                raise_if_silent(error)
                raise
            counters.counts.source_s += counters.now() - begin_s
            state = None if self._state is None else self._state()
            self._ahead.append(self._mover.move(batch, state))
        except Exception as error:
            # The batches before it come first.
            self._errors.append(error)
            self._has_more = False
        counters.counts.read_s += counters.now() - begin_s

    def _forget_slots(self) -> None:
        super()._forget_slots()
        # The mover keeps their memory until the copies are done.
        self._ahead.clear()
