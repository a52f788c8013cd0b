"""LoaderLoop: a loop without threads over a loader, whose batches stay on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.loop import Loop, LoopParts
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.host_leaves import host_batch_of
from pinfeed.pipeline.sources.loader_source import END, LoaderSource, next_batch
from pinfeed.pipeline.sources.source import Cancelled, HostBatch


class LoaderLoop(Loop):
    """A loop without threads over a loader, whose batches stay on the CPU.

    A batch of CPU tensors is the loader's own object, and takes the short way: every function that
    the loop calls between two training steps is no longer in the caches of the processor.

    Args:
        parts: Mover and functions of the loop.
        source: Source of the batches, whose ``is_plain`` is True.
        batches: The loader's batches of the epoch.
    """

    def __init__(self, parts: LoopParts, source: LoaderSource, batches: Iterator[Any]) -> None:
        # The import is local, because the pipeline is loaded without torch.
        from pinfeed.tensors.numpy_torch import size_of_tensors

        super().__init__(parts)
        self._transfer = cast("HostTransfer", parts.mover)
        self._state = source.state
        self._batches = batches
        self._size_of = size_of_tensors

    def _slots(self) -> Callable[[], Slot | None]:
        return self._next

    def _next(self) -> Slot | None:
        """Return the only slot with the loader's next batch, or None after the last one."""
        if self._transfer.is_stopping:
            raise Cancelled
        batch = next_batch(self._batches)
        if batch is END:
            return None
        state = self._state()
        counters = self._counters
        slot = self._free[0]
        slot.source_done_s = slot.ready_s = counters.now()
        slot.source_s = slot.read_s = slot.ready_s - counters.requested_s
        number = self._n_requested - 1
        size = self._size_of(batch)
        if size is None:
            # Other values are moved, or belong to a nested structure.
            slot = self._transfer.fill(slot, host_batch_of(batch), number)
        else:
            slot.number = number
            slot.nbytes = size[1]
            slot.batch = HostBatch((), next, ((size[0], 0),))
            slot.batch_tensors.append([batch])
        slot.batch.state = state
        return slot

    def _forget_slots(self) -> None:
        super()._forget_slots()
        self._batches = iter(())
