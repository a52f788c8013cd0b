"""JobMemory: the memory of the batches that an engine gathers in one job."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pinfeed.devices.device import Tensor
from pinfeed.devices.layout import BatchPart, RowLayout


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


def row_layout(row_types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], n: int) -> RowLayout:
    """Return the layout of ``n`` rows of each source.

    Args:
        row_types: Shape and dtype of a row of each source.
        n: Number of rows.
    """
    return RowLayout.of([BatchPart((n, *shape), dtype) for shape, dtype in row_types])
