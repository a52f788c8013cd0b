"""JobParts and JobMemory: what an engine gathers in one job, and the memory of its batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pinfeed.devices.device import Tensor
from pinfeed.devices.layout import BatchPart, RowLayout
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.row_moves import StagedIndices

RowType = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of a row."""


class JobParts(NamedTuple):
    """The parts of a job, of which each has something for every row."""

    sources: Sequence[MemoryRows | StagedIndices]
    """Rows or row indices that the engine gathers."""
    row_types: Sequence[RowType]
    """Rows of each source, and then of each store that the device reads itself."""
    places: Sequence[int] | None = None
    """Position of each store's rows among these; None if they are the rows of the stores."""

    def layout(self, n: int) -> RowLayout:
        """Return the layout of ``n`` rows."""
        return RowLayout.of([BatchPart.of((n, *shape), dtype) for shape, dtype in self.row_types])

    @property
    def staged_nbytes(self) -> int:
        """Bytes that the engine gathers for each row."""
        return sum(source.row_nbytes for source in self.sources)


class JobMemory(NamedTuple):
    """Memory of the batches of one job."""

    tensors: deque[list[Tensor]]
    """Tensors of each batch."""
    outs: Sequence[int]
    """Places of the rows of each source; see ``Engine.submit``."""
    owner: object
    """Object that keeps the memory alive."""
    devices: Sequence[int] = ()
    """Address of the rows of each source on the device."""
    stream: int = 0
    """Handle of the stream whose later work may use this memory."""
