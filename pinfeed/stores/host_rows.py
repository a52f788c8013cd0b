"""Rows of stores that batches need, and the ways to gather them into host memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.store import Array, run_of

# Rows are gathered in steps, because a loop that ends waits for the current step. A step takes a
# few milliseconds from memory, and less than a second from a disk with 20,000 seeks per second.
_STEP_BYTES = 16 << 20
_STEP_ROWS = 1 << 13

# From this number of rows on, numpy assigns them faster if each is one item, which takes some us
# to prepare.
_MANY_ROWS = 192

CheckStop = Callable[[], object]
"""Raises an error if the loop has ended, so that nothing else need be read."""


def never() -> None:
    """Do nothing: the default ``CheckStop``, for reads that nothing stops."""


class UnreadPart(Protocol):
    """One array of a batch that is still on the host."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the array."""

    def read(self, out: Array, check_stop: CheckStop = ...) -> None:
        """Fill ``out``, of this shape and dtype, and call ``check_stop`` between long steps."""


@dataclass(slots=True, eq=False)
class FunctionPart:
    """An ``UnreadPart`` that a function fills.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.
        fill: Fills an array, given ``check_stop``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[Array, CheckStop], object]

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Fill ``out`` by the function."""
        self.fill(out, check_stop)


class Gatherable(Protocol):
    """Rows that can be gathered: the part of a Store that readers need."""

    @property
    def row_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def gather(self, rows: Rows, out: Array) -> None: ...


Gather = Callable[[Rows, Array], None]
"""Copies rows into an array, like ``Store.gather``."""


def fast_way(store: Gatherable, name: str) -> Any:
    """Return a member of a store that reads its rows faster than ``gather``.

    Such a member belongs to the methods that gather of the same class. If a subclass or an object
    replaces one of these, it may return other rows, so the result is None.
    """
    replaceable = {"gather", "gather_unchecked"}
    if replaceable.isdisjoint(getattr(store, "__dict__", ())):
        for kind in type(store).__mro__:
            if name in vars(kind):
                return getattr(store, name)
            if not replaceable.isdisjoint(vars(kind)):
                break
    return None


def unchecked_gather(store: Gatherable) -> Gather:
    """Return the method that gathers the rows of a store, without checks if it has one."""
    found: Gather = fast_way(store, "gather_unchecked") or store.gather
    return found


def memory_rows_of(store: Gatherable) -> MemoryRows | None:
    """Return where the rows of a store are, if compiled functions may copy them."""
    found: MemoryRows | None = fast_way(store, "memory_rows")
    return found


class StoreRows:
    """Rows of one store that a batch needs: an ``UnreadPart`` that gathers them.

    Args:
        store: The store, or other rows that can be gathered.
        rows: Row indices, shape (n,); they may repeat.
        gather: Function that gathers rows of the store; None uses its method ``gather``.
    """

    __slots__ = ("_gather", "dtype", "rows", "shape", "store")

    def __init__(self, store: Gatherable, rows: Rows, gather: Gather | None = None) -> None:
        self.store = store
        self.rows = rows
        self.shape = (len(rows), *store.row_shape)
        self.dtype = store.dtype
        self._gather = gather or store.gather

    def cut(self, begin: int, end: int) -> StoreRows:
        """Return rows [begin, end) of these."""
        return StoreRows(self.store, self.rows[begin:end], self._gather)

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the rows into ``out``, step by step."""
        n = len(out)
        if 0 < n <= _STEP_ROWS and out.nbytes <= _STEP_BYTES:
            self._gather(self.rows, out)
            return
        step = max(1, min(_STEP_ROWS, _STEP_BYTES * n // max(1, out.nbytes)))
        for i in range(0, n, step):
            check_stop()
            self._gather(self.rows[i : i + step], out[i : i + step])


def part_nbytes(part: UnreadPart) -> int:
    """Return the bytes of one array of a batch."""
    return math.prod(part.shape) * part.dtype.itemsize


RunGather = Callable[[Runs, Array], None]
"""Copies runs of rows into an array of shape (m, *row_shape); the caller checks the arguments."""


@dataclass(slots=True, eq=False)
class RunRows:
    """Runs of rows that a batch needs: an ``UnreadPart`` that gathers them.

    Args:
        gather: Function that gathers runs of the store.
        runs: Runs in range, with their positions on the first axes of ``shape``.
        shape: Shape of the array; its last axes are ``row_shape``.
        dtype: Dtype of the store.
        n_axes: Number of axes of ``shape`` before ``row_shape``.
        padding: Value of the elements that no run fills; None if the runs fill all elements.
    """

    gather: RunGather
    runs: Runs
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    n_axes: int
    padding: Any

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the runs into ``out``, step by step."""
        if self.padding is not None:
            out.fill(self.padding)
        row_shape = self.shape[self.n_axes :]
        rows = out.reshape(math.prod(self.shape[: self.n_axes]), *row_shape)
        nbytes = math.prod(row_shape) * self.dtype.itemsize
        for piece in self.runs.pieces(max(1, _STEP_BYTES // max(1, nbytes))):
            check_stop()
            self.gather(piece, rows)


def runs_of(rows: Rows) -> Runs:
    """Return rows as runs: a single one if they are consecutive, or one for each row."""
    run = run_of(rows)
    return Runs.of_rows(rows) if run is None else Runs.one(run.start, len(rows))


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


def put_rows(target: Array, rows: Rows, values: Array) -> None:
    """Assign ``target[rows] = values``, for row indices that are in range."""
    if (
        len(rows) >= _MANY_ROWS
        and (nbytes := target.dtype.itemsize * math.prod(target.shape[1:]))
        and target.flags.c_contiguous
        and values.flags.c_contiguous
        and values.dtype == target.dtype
    ):
        # If each row is one item, numpy copies a row at once, in about half the time. mode="clip"
        # only avoids a check, because the rows are in range.
        item = np.dtype((np.void, nbytes))
        np.put(target.reshape(-1).view(item), rows, values.reshape(-1).view(item), mode="clip")
    else:
        target[rows] = values
