"""WindowStore: windows along axes of arrays, as runs of the items of a store."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.host_rows import RunGather, run_gather
from pinfeed.stores.store import Array
from pinfeed.validation.arguments import whole_number

# Arrays whose windows are rows in memory: each call of a compiled function describes all of them.
_MOST_IN_MEMORY = 64


class AxisWindow(NamedTuple):
    """Windows along one axis."""

    length: int
    """Indices of a window."""
    step: int
    """Indices from the beginning of one window to the beginning of the next."""
    stride: int
    """Indices from one index of a window to the next."""
    start: int
    """Indices from ``i * step`` to the beginning of window i."""
    span: int
    """Indices that must exist from ``i * step`` on."""

    def count(self, size: int) -> int:
        """Return the number of windows along an axis."""
        return max(0, (size - self.span) // self.step + 1)


def axis_windows(
    axis: Any, length: Any, step: Any, stride: Any, start: Any, span: Any
) -> dict[int, AxisWindow]:
    """Return the windows along each axis that a user gives.

    Raises:
        ArgumentError: If a value is no whole number, or out of range, or if axes and values differ
            in number.
    """
    several = isinstance(axis, (tuple, list))
    axes = tuple(axis) if several else (axis,)

    def of_axes(value: Any, name: str) -> Sequence[Any]:
        if not several or not isinstance(value, (tuple, list)):
            return (value,) * len(axes)
        if len(value) != len(axes):
            raise ArgumentError(
                f"{name}={value!r} with axis={axis!r}; expected one value for each axis"
            )
        return value

    if len(set(axes)) < len(axes) or not axes:
        raise ArgumentError(f"axis={axis!r}: expected distinct axes, such as 1 or (1, 2)")
    given = {"length": length, "step": step, "stride": stride, "start": start, "span": span}
    columns = [of_axes(value, name) for name, value in given.items()]
    return {
        whole_number(number, "axis", least=0): _axis_window(*values)
        for number, *values in zip(axes, *columns, strict=True)
    }


def _axis_window(length: Any, step: Any, stride: Any, start: Any, span: Any) -> AxisWindow:
    one = AxisWindow(
        whole_number(length, "length"),
        whole_number(step, "step"),
        whole_number(stride, "stride"),
        whole_number(start, "start", least=0),
        0,
    )
    least = one.start + (one.length - 1) * one.stride + 1
    note = f", because start, length and stride need {least} indices"
    return one._replace(
        span=least if span is None else whole_number(span, "span", least=least, note=note)
    )


def leading_axes(shape: Sequence[int], axes: Mapping[int, AxisWindow], label: str) -> list[int]:
    """Return the shape of an array up to its last windowed axis.

    Raises:
        ArgumentError: If the array has no such axis.
    """
    n_axes = max(axes) + 1
    if n_axes > len(shape):
        raise ArgumentError(
            f"axis={n_axes - 1}: {label} has {len(shape)} axes; expected 0 to {len(shape) - 1}"
        )
    return list(shape[:n_axes])


class WindowStore(FileStore):
    """Read-only windows along axes of the arrays of another store, one array after the other.

    The items of an array are numbered through its leading axes, up to the last windowed one. The
    axes before the first windowed one are loops: each of their indices has windows of its own.
    Other axes are whole. A window consists of runs of consecutive items, all of one length.

    Args:
        items: Items of all arrays, one after the other.
        shapes: Leading axes of each array; those after the first windowed axis are equal.
        axes: Windows along each axis; an axis that is not here is a loop, or whole.
        owned: Whether ``close`` closes ``items``.
        row_shape: Shape of the rows; by default, that of a window, and of an item.

    Raises:
        StoreError: If no array is long enough for a window.
    """

    def __init__(
        self,
        items: FileStore,
        shapes: Sequence[Sequence[int]],
        axes: Mapping[int, AxisWindow],
        *,
        owned: bool = False,
        row_shape: Sequence[int] | None = None,
    ) -> None:
        first = min(axes)
        counts = [_counts(shape, axes) for shape in shapes]
        n_windows = [math.prod(one) for one in counts]
        if not any(n_windows):
            raise StoreError(_no_window(items.label, shapes, axes))
        self.items = items
        self.shapes = [tuple(shape) for shape in shapes]
        """Leading axes of each array."""
        self.axes = dict(axes)
        self.counts = np.array(counts)
        """Windows along each axis of each array, shape (n_arrays, n_axes).

        It is the length of a loop, and 1 for a whole axis.
        """
        self._ends = np.cumsum(n_windows)
        self._begins = self._ends - n_windows
        # Index i along an axis of array k adds i * distances[k, axis] items to a first one.
        self._firsts, self._distances = _steps(self.shapes, axes)
        self.run_starts, self.run_length = _runs(self.shapes[0], axes)
        """First item of each run of a window, counted from that of the window, and their items."""
        self.extent = int(self.run_starts.item(-1)) + self.run_length
        """Items from the first one of a window to the last one, both included."""
        self.n_items = len(self.run_starts) * self.run_length
        """Number of items of a window."""
        window = [axes[i].length if i in axes else n for i, n in enumerate(self.shapes[0])]
        shape = [*window[first:], *items.row_shape] if row_shape is None else row_shape
        super().__init__(items.label, items.paths, (self._ends.item(-1), *shape), items.dtype)
        # The items between the first and the last one of each array; a file may be given twice.
        covered = ((self.counts - 1) * self._distances).sum(1) + self.extent
        n_covered = covered[np.array(n_windows) > 0].sum().item()
        self.nbytes = min(n_covered * items.row_nbytes, items.nbytes)
        self._owned = [items] if owned else ()

    def __repr__(self) -> str:
        return f"<{self.n_rows:,} windows of shape {self.row_shape} of {self.label}>"

    @property
    def resident_bytes(self) -> int:
        return self.items.resident_bytes

    @property
    def version(self) -> object:
        return self.items.version

    @property
    def can_be_memory_rows(self) -> bool:
        # A window that extends over several files is not in one piece.
        is_in_one_file = len(self.shapes) == len(self.paths)
        return is_in_one_file and self._is_one_run and self.items.can_be_memory_rows

    @functools.cached_property
    def bounds(self) -> Rows | None:
        """First window that begins in each chunk or later, followed by the number of windows.

        It is None if the items have no chunks.
        """
        chunks: Rows | None = getattr(self.items, "bounds", None)
        if chunks is None:
            return None
        # First items ascend, so a bisection finds all bounds at the same time.
        low = np.zeros(len(chunks), np.int64)
        high = np.full(len(chunks), self.n_rows)
        while (low < high).any():
            middle = (low + high) // 2
            is_before = self.first_items(np.minimum(middle, self.n_rows - 1)) < chunks
            is_before &= low < high
            low = np.where(is_before, middle + 1, low)
            high = np.where(is_before, high, np.minimum(middle, high))
        return low

    def first_items(self, rows: Rows) -> Rows:
        """Return the first item of windows."""
        if len(self.shapes) == 1:
            array: Any = 0
            left = rows
        else:
            array = self._ends.searchsorted(rows, side="right")
            left = rows - self._begins[array]
        found = self._firsts[array]
        for i in reversed(range(1, self.counts.shape[1])):
            left, index = np.divmod(left, self.counts[array, i])
            found = found + index * self._distances[array, i]
        items: Rows = found + left * self._distances[array, 0]
        return items

    def item_runs(self, rows: Rows, positions: Rows | None = None) -> Runs:
        """Return the runs of items of windows, and their places in an array of items.

        Args:
            rows: Windows, shape (n,).
            positions: Position of each window in an array of windows; None for 0 to n - 1.
        """
        places = (np.arange(len(rows)) if positions is None else positions) * self.n_items
        starts = self.first_items(rows)
        if len(self.run_starts) > 1:
            starts = (starts[:, None] + self.run_starts).ravel()
            places = (places[:, None] + np.arange(0, self.n_items, self.run_length)).ravel()
        return Runs(starts, np.full(len(starts), self.run_length), places)

    def as_items(self, out: Array) -> Array:
        """Return an array of windows as an array of items, on the same memory."""
        return out.reshape(len(out) * self.n_items, *self.items.row_shape)

    def has_steps_of(self, other: WindowStore) -> bool:
        """Return whether the first items of any two rows are as far apart as in the other store."""
        return (
            np.array_equal(self.counts, other.counts)
            and np.array_equal(self._distances, other._distances)
            and np.array_equal(np.diff(self._firsts), np.diff(other._firsts))
        )

    def memory_rows_in(self, items: MemoryRows | None) -> MemoryRows | None:
        """Return where the windows are, given where the items are.

        It is None if compiled functions cannot copy a window as one row.
        """
        if items is None or not self._is_one_run:
            return None
        arrays = np.flatnonzero(self.counts[:, 0])
        columns = self._firsts, self.counts[:, 0], self._distances[:, 0]
        return items.windows(self.run_length, np.stack(columns, 1)[arrays].tolist())

    def gather_unchecked(self, rows: Rows, out: Array) -> None:
        self._require_open()
        self.gather_items(run_gather(self.items), rows, out)

    def gather_items(self, gather: RunGather, rows: Rows, out: Array) -> None:
        """Copy windows into ``out`` by a function that copies runs of items."""
        gather(self.item_runs(rows), self.as_items(out))

    def gather_runs(self, runs: Runs, out: Array) -> None:
        self._require_open()
        wanted = self.item_runs(runs.rows(), runs.positions())
        run_gather(self.items)(wanted, self.as_items(out))

    @property
    def _is_one_run(self) -> bool:
        """Whether windows are runs of items at equal distances, of few arrays."""
        is_one_run = len(self.run_starts) == 1 and bool((self.counts[:, 1:] == 1).all())
        return is_one_run and min(self.axes) == 0 and len(self.shapes) <= _MOST_IN_MEMORY


def _counts(shape: Sequence[int], axes: Mapping[int, AxisWindow]) -> list[int]:
    """Return the windows along each axis of an array."""
    first = min(axes)
    return [
        axes[i].count(size) if i in axes else (size if i < first else 1)
        for i, size in enumerate(shape)
    ]


def _steps(shapes: Sequence[Sequence[int]], axes: Mapping[int, AxisWindow]) -> tuple[Rows, Rows]:
    """Return the first item of the first window of each array, and the items of each step.

    Returns:
        The items, shape (n_arrays,), and the distances along each axis, shape (n_arrays, n_axes).
    """
    firsts = []
    distances = []
    before = 0
    for shape in shapes:
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        # A start or a step that is longer than an axis has no window, or one.
        begins = [min(axes[i].start, n) if i in axes else 0 for i, n in enumerate(shape)]
        steps = [min(axes[i].step, n) if i in axes else 1 for i, n in enumerate(shape)]
        firsts.append(before + sum(map(operator.mul, begins, inner)))
        distances.append([step * n for step, n in zip(steps, inner, strict=True)])
        before += math.prod(shape)
    return np.array(firsts), np.array(distances)


def _runs(shape: Sequence[int], axes: Mapping[int, AxisWindow]) -> tuple[Rows, int]:
    """Return the first item of each run of a window, and the length of all runs."""
    starts = np.zeros(1, np.int64)
    length = 1
    inner = 1
    for i in reversed(range(min(axes), len(shape))):
        n, stride = (axes[i].length, axes[i].stride) if i in axes else (shape[i], 1)
        if length == inner and (stride == 1 or n == 1):
            length *= n
        else:
            starts = (np.arange(n)[:, None] * (stride * inner) + starts).ravel()
        inner *= shape[i]
    return starts, length


def _no_window(label: str, shapes: Sequence[Sequence[int]], axes: Mapping[int, AxisWindow]) -> str:
    """Return an error message about arrays that are too short for any window."""
    needs = " and ".join(f"{one.span:,} along axis {i}" for i, one in axes.items())
    files = ", or across_files=True if all files are one sequence" if len(shapes) > 1 else ""
    return (
        f"{label}: no window fits in shape {max(map(tuple, shapes))}; expected at least {needs}; "
        f"give a smaller length, span or stride, or a longer file{files}"
    )
