"""ViewLoop: a loop whose batches are views of consecutive rows, without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pinfeed.pipeline.loop import Loop, LoopParts
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.rows.batches import sizes

if TYPE_CHECKING:
    from pinfeed.tensors.row_views import RowViews

# Batches share the cost of a slot. They take no memory, but their tensors do.
_BATCHES_PER_SLOT = 64


class ViewLoop(Loop):
    """A loop that cuts the rows of each store into views.

    Args:
        parts: Mover of the loop, and its functions.
        source: Source of the rows.
        views: Views of the rows of each store.
        batch_size: Rows of a batch.
        positions: First row, and the row after the last one.
    """

    def __init__(
        self,
        parts: LoopParts,
        source: RowSource,
        views: Sequence[RowViews],
        batch_size: int,
        positions: tuple[int, int],
    ) -> None:
        super().__init__(parts)
        self._source = source
        self._views = views
        self._batch_size = batch_size
        self._position, self._stop = positions
        self._number = parts.first

    def _slots(self) -> Callable[[], Slot | None]:
        return self._next

    def _next(self) -> Slot | None:
        begin = self._position
        if begin >= self._stop:
            return None
        size = self._batch_size
        self._position = end = min(begin + size * _BATCHES_PER_SLOT, self._stop)
        slot = self._free.popleft()
        slot.number = self._number
        slot.batch = HostBatch((), self._source.rebuild, sizes(end - begin, size))
        parts = [views.batches(begin, end, size) for views in self._views]
        slot.batch_tensors = deque(map(list, zip(*parts, strict=True)))
        slot.nbytes = sum(tensor.nbytes for part in parts for tensor in part)
        self._number += len(slot.batch_tensors)
        slot.ready_s = self._counters.now()
        return slot
