"""Gathers of runs: consecutive rows of a store that are copied to positions in an array."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pinfeed.rows.runs import Runs
from pinfeed.stores.array import put_rows
from pinfeed.stores.base import Array, CheckStop, Gatherable, fast_way, never, unchecked_gather

# Bytes per step, and rows per step for a store that cannot gather runs.
_STEP_BYTES = 16 << 20
_STEP_ROWS = 1 << 13

RunGather = Callable[[Runs, Array], None]
"""Copies runs of rows into an array of shape (m, *row_shape); the caller checks the arguments."""


class RunRows:
    """Runs of rows that a batch needs: a ``HostArray`` that gathers them.

    Args:
        gather: Function that gathers runs of the store.
        runs: Runs in range, with their positions on the first axes of ``shape``.
        shape: Shape of the array; its last axes are ``row_shape``.
        dtype: Dtype of the store.
        n_axes: Number of axes of ``shape`` before ``row_shape``.
        padding: Value of the elements that no run fills; None if the runs fill all elements.
    """

    __slots__ = ("_gather", "_n_axes", "_padding", "_runs", "dtype", "shape")

    def __init__(
        self,
        gather: RunGather,
        runs: Runs,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        n_axes: int = 1,
        padding: Any = None,
    ) -> None:
        self._gather = gather
        self._runs = runs
        self._n_axes = n_axes
        self._padding = padding
        self.shape = shape
        self.dtype = dtype

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the runs into ``out``, step by step."""
        if self._padding is not None:
            out.fill(self._padding)
        row_shape = self.shape[self._n_axes :]
        rows = out.reshape(math.prod(self.shape[: self._n_axes]), *row_shape)
        nbytes = math.prod(row_shape) * self.dtype.itemsize
        for piece in self._runs.pieces(max(1, _STEP_BYTES // max(1, nbytes))):
            check_stop()
            self._gather(piece, rows)


def run_gather(store: Gatherable) -> RunGather:
    """Return a function that gathers runs of rows of a store, if need be row by row."""
    found: RunGather = fast_way(store, "gather_runs") or functools.partial(gather_rows, store)
    return found


def gather_rows(store: Gatherable, runs: Runs, out: Array) -> None:
    """Gather the rows of runs by their row indices."""
    gather = unchecked_gather(store)
    rows = runs.rows()
    target = runs.target
    positions = None if target is not None else runs.positions()
    step = max(1, min(_STEP_ROWS, _STEP_BYTES * len(out) // max(1, out.nbytes)))
    for i in range(0, len(rows), step):
        part = rows[i : i + step]
        if target is not None:
            begin = target.start + i
            gather(part, out[begin : begin + len(part)])
            continue
        assert positions is not None
        values = np.empty((len(part), *store.row_shape), store.dtype)
        gather(part, values)
        put_rows(out, positions[i : i + step], values)
