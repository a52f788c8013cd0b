"""AxisWindows: windows along axes of an array, as runs of its items; WindowStore: their rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.host_rows import run_gather
from pinfeed.stores.store import Array
from pinfeed.validation.arguments import whole_number


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

    @property
    def extent(self) -> int:
        """Indices from the first one of a window to the last one, both included."""
        return (self.length - 1) * self.stride + 1

    @property
    def in_words(self) -> str:
        """The items that one window needs, for errors."""
        return (
            f"{self.span:,} for one window of length={self.length} with start={self.start} and "
            f"span={self.span}"
        )

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
    least = one.start + one.extent
    note = f", because start, length and stride need {least} indices"
    return one._replace(
        span=least if span is None else whole_number(span, "span", least=least, note=note)
    )


@dataclass(frozen=True)
class AxisWindows:
    """Windows along axes of an array, whose items are numbered through its leading axes.

    The axes before the first windowed one are loops: each of their indices has windows of its own.
    Other axes are whole.

    Args:
        shape: Shape of the leading axes, up to the last windowed one.
        axes: Windows along each axis; an axis that is not here is a loop, or whole.
    """

    shape: tuple[int, ...]
    axes: dict[int, AxisWindow]

    @classmethod
    def of(cls, shape: Sequence[int], axes: dict[int, AxisWindow], label: str) -> AxisWindows:
        """Return the windows of an array.

        Args:
            shape: Shape of the array.
            axes: Windows along each axis.
            label: Name of the array in errors.

        Raises:
            ArgumentError: If the array has no such axis.
        """
        n_axes = max(axes) + 1
        if n_axes > len(shape):
            raise ArgumentError(
                f"axis={n_axes - 1}: {label} has {len(shape)} axes; expected 0 to {len(shape) - 1}"
            )
        return cls(tuple(shape[:n_axes]), axes)

    @property
    def first_axis(self) -> int:
        """The first windowed axis."""
        return min(self.axes)

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Shape of a window on the axes from the first windowed one to the last."""
        numbers = range(self.first_axis, len(self.shape))
        return tuple(self.axes[i].length if i in self.axes else self.shape[i] for i in numbers)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of windows along each axis; for a loop, its indices, and 1 for a whole axis."""
        found = []
        for i, size in enumerate(self.shape):
            whole = 1 if i > self.first_axis else size
            found.append(self.axes[i].count(size) if i in self.axes else whole)
        return tuple(found)

    @property
    def steps(self) -> tuple[Any, ...]:
        """Values on which the distance between the first items of two windows depends."""
        return self.shape, self.counts, {i: axis.step for i, axis in self.axes.items()}

    @property
    def n_windows(self) -> int:
        return math.prod(self.counts)

    @property
    def n_items(self) -> int:
        return math.prod(self.shape)

    @property
    def offsets(self) -> Rows:
        """Items of a window, counted from its first one; ascending, shape (n,)."""
        found = np.zeros(1, np.int64)
        for i, n in enumerate(self.window_shape, self.first_axis):
            apart = self.axes[i].stride if i in self.axes else 1
            items = np.arange(n) * apart * math.prod(self.shape[i + 1 :])
            found = (found[:, None] + items).ravel()
        return found

    def first_items(self, numbers: Rows) -> Rows:
        """Return the first item of windows."""
        found = np.zeros(len(numbers), np.int64)
        left = numbers
        counts = self.counts
        for i in reversed(range(len(self.shape))):
            left, index = np.divmod(left, counts[i])
            if i in self.axes:
                index = index * self.axes[i].step + self.axes[i].start
            found += index * math.prod(self.shape[i + 1 :])
        return found


class WindowStore(FileStore):
    """Read-only windows along axes of the arrays of other stores, one array after the other.

    Args:
        items: Items of all arrays, one after the other.
        parts: Windows of each array, with equal lengths, steps, strides, starts and spans.
        owned: Whether ``close`` closes ``items``.

    Raises:
        StoreError: If no array is long enough for a window.
    """

    def __init__(
        self, items: FileStore, parts: Sequence[AxisWindows], *, owned: bool = False
    ) -> None:
        kept = [part for part in parts if part.n_windows]
        if not kept:
            raise StoreError(
                f"{items.label}: no window fits in {_in_words(parts)}; give a smaller length, span "
                "or stride"
            )
        self.items = items
        self.parts = tuple(parts)
        self.offsets = kept[0].offsets
        """Items of a window, counted from its first one, shape (n,)."""
        self._ends = np.cumsum([part.n_windows for part in parts])
        n_items = np.cumsum([part.n_items for part in parts])
        self._begins = n_items - [part.n_items for part in parts]
        shape = (self._ends.item(-1), *kept[0].window_shape, *items.row_shape)
        super().__init__(items.label, items.paths, shape, items.dtype)
        self.nbytes = items.nbytes
        self._owned = owned

    def __repr__(self) -> str:
        return f"<{self.n_rows:,} windows of shape {self.row_shape} of {self.label}>"

    @property
    def extent(self) -> int:
        """Items from the first one of a window to the last one, both included."""
        return self.offsets.item(-1) + 1

    @property
    def resident_bytes(self) -> int:
        return self.items.resident_bytes

    @property
    def version(self) -> object:
        return self.items.version

    def close(self) -> None:
        """Close the items if the store opened them. Further calls do nothing."""
        super().close()
        if self._owned:
            self.items.close()

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
        if len(self.parts) == 1:
            return self.parts[0].first_items(rows)
        numbers = self._ends.searchsorted(rows, side="right")
        found = np.empty(len(rows), np.int64)
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            part = self.parts[number]
            before = self._ends.item(number) - part.n_windows
            found[here] = part.first_items(rows[here] - before) + self._begins[number]
        return found

    def items_of(self, rows: Rows) -> Rows:
        """Return the items of windows, one window after the other."""
        return (self.first_items(rows)[:, None] + self.offsets).ravel()

    def as_items(self, out: Array) -> Array:
        """Return an array of windows as an array of items, on the same memory."""
        return out.reshape(len(out) * len(self.offsets), *self.items.row_shape)

    def has_steps_of(self, other: WindowStore) -> bool:
        """Return whether the first items of any two rows are as far apart as in the other store."""
        return [part.steps for part in self.parts] == [part.steps for part in other.parts]

    def gather_runs(self, runs: Runs, out: Array) -> None:
        self._require_open()
        n = len(self.offsets)
        places = (runs.positions()[:, None] * n + np.arange(n)).ravel()
        wanted = Runs.of_rows(self.items_of(runs.rows()), places).merged()
        run_gather(self.items)(wanted, self.as_items(out))


def _in_words(parts: Sequence[AxisWindows]) -> str:
    shapes = sorted({part.shape for part in parts}, reverse=True)
    spans = {i: one.span for i, one in parts[0].axes.items()}
    needs = " and ".join(f"{n} along axis {i}" for i, n in spans.items())
    return f"shape {shapes[0]}; expected at least {needs}"
