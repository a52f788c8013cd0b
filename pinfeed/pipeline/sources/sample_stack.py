"""SampleStack: the samples of a batch, each written to its place as soon as it is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class SampleStack:
    """The samples of a batch, which several threads make, stacked as ``default_collate`` does.

    The first sample that is made gives the layout of the batch. Samples are kept until the memory
    of the batch is known, and from then on written to it.

    Args:
        n: Number of samples.
        stacks: Whether to stack the samples. Otherwise, they are only kept.

    Attributes:
        kept: The samples that are not in the memory of the batch, by position. If they are to be
            stacked, these are their leaves.
        stacks: Whether the samples are stacked; None until the first one is made. Some samples
            cannot be stacked.
    """

    def __init__(self, n: int, *, stacks: bool) -> None:
        self._n = n
        self.kept: dict[int, Any] = {}
        self.stacks: bool | None = None if stacks else False
        self._layout: Any = None
        # For each leaf its array or list; None until the memory of the batch is known.
        self._places: list[Any] | None = None
        self._lock = threading.Lock()

    @property
    def columns(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each stacked array."""
        found = [column for column in self._layout.columns if column is not None]
        return [((self._n, *column.shape), column.dtype) for column in found]

    def put(self, position: int, sample: Any) -> None:
        """Add the sample at a position. Several threads may call this.

        Raises:
            ArgumentError: If the sample cannot be stacked with the others.
            TypeError: If ``default_collate`` refuses the sample.
        """
        if self.stacks is None:
            self._begin(sample)
        value = self._layout.leaves(sample) if self.stacks else sample
        if self._places is None:
            with self._lock:
                if self._places is None:
                    self.kept[position] = value
                    return
        self._layout.write(value, position, self._places)

    def place(self, arrays: Sequence[Array]) -> None:
        """Set the memory of the batch, one array for each of ``columns``."""
        left = iter(arrays)
        places = [
            [None] * self._n if column is None else next(left) for column in self._layout.columns
        ]
        with self._lock:
            self._places = places
            kept = self.kept
            self.kept = {}
        for position, leaves in kept.items():
            self._layout.write(leaves, position, places)

    def close_gaps(self, positions: Sequence[int]) -> None:
        """Move the samples at ascending positions to the beginning of the batch."""
        assert self._places is not None
        for place in self._places:
            for i, position in enumerate(positions):
                if i != position:
                    place[i] = place[position]

    def rebuild(self, tensors: Iterator[Any], n: int) -> Any:
        """Return the first ``n`` samples as a batch.

        Args:
            tensors: A tensor for each of ``columns``.
            n: Number of samples.
        """
        assert self._places is not None
        stacked = [
            place if column is None else next(tensors)
            for place, column in zip(self._places, self._layout.columns, strict=True)
        ]
        if n < self._n:
            stacked = [column[:n] for column in stacked]
        return self._layout.rebuild(stacked)

    def _begin(self, sample: Any) -> None:
        """Take the layout of the batch from a sample, unless another thread has done so."""
        from pinfeed.pipeline.sources.sample_layout import SampleLayout

        with self._lock:
            if self.stacks is None:
                self._layout = SampleLayout(sample)
                self.stacks = self._layout.stacks
