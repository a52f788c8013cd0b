"""RowViews: tensors on the memory of consecutive rows, batch by batch."""

from __future__ import annotations

import itertools
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from pinfeed.tensors.numpy_torch import to_torch


class RowViews:
    """Views of the rows of several arrays, one after the other.

    A batch that extends over the end of an array is a copy.

    Args:
        arrays: Arrays with rows of one shape and dtype, each of at least one row.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        with warnings.catch_warnings():
            # Whoever takes views promises not to write to them.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._parts = [to_torch(array) for array in arrays]
        self._ends = list(itertools.accumulate(map(len, arrays)))

    def batches(self, begin: int, end: int, size: int) -> Sequence[torch.Tensor]:
        """Return rows [begin, end) in batches of ``size`` rows."""
        number = bisect_right(self._ends, begin)
        if end <= self._ends[number]:
            views: Sequence[torch.Tensor] = self._rows(begin, end).split(size)
            return views
        starts = range(begin, end, size)
        return [self._rows(start, min(start + size, end)) for start in starts]

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        """Return rows [begin, end)."""
        found = []
        while begin < end:
            number = bisect_right(self._ends, begin)
            stop = min(end, self._ends[number])
            first = self._ends[number] - len(self._parts[number])
            found.append(self._parts[number][begin - first : stop - first])
            begin = stop
        return found[0] if len(found) == 1 else torch.cat(found)
