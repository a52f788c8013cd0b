"""ChunkedArray: rows of arrays with chunks along all axes; windows along any of their axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pinfeed.stores.chunked import ChunkedStore, ChunkedView, ChunkLayout
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.store import Array
from pinfeed.stores.window_store import WindowStore, axis_windows, leading_axes
from pinfeed.validation.arguments import explain_arguments

Box = tuple[slice, ...]
"""Indices [start, stop) along each axis of an array."""


class ChunkGrid(NamedTuple):
    """Shape of an array, and of its chunks; a chunk at the end of an axis extends beyond it."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def origins(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the position in the array of the first item of each chunk of a box."""
        sizes = zip(box, self.shape, self.chunks, strict=True)
        ranges = (range(*one.indices(size)[:2], chunk) for one, size, chunk in sizes)
        return itertools.product(*ranges)

    def place(self, origin: tuple[int, ...], box: Box, out: Array) -> Array:
        """Return the part of ``out`` for a chunk.

        Args:
            origin: Position in the array of the first item of the chunk.
            box: A box of whole chunks with this one.
            out: The items of the box.
        """
        axes = zip(origin, box, self.chunks, strict=True)
        begins = [(at - (one.start or 0), size) for at, one, size in axes]
        return out[tuple(slice(begin, begin + size) for begin, size in begins)]

    def put(self, decoded: Any, place: Array) -> None:
        """Copy a decoded chunk, which is a buffer, to its place.

        Raises:
            ValueError: If the chunk has another size.
        """
        block = np.frombuffer(decoded, self.dtype).reshape(self.chunks)
        place[...] = block[tuple(map(slice, place.shape))]


class ChunkedArray(ChunkedStore):
    """Rows of an array that a library stores in chunks along all axes.

    A subclass sets ``array_shape`` and ``array_chunks`` before it calls ``__init__`` of this class.

    Attributes:
        array_shape: Shape of the array.
        array_chunks: Shape of a chunk; None if the array is in one piece.
    """

    array_shape: tuple[int, ...]
    array_chunks: tuple[int, ...] | None

    _PROCESS_STATE: ClassVar[tuple[str, ...]] = (*ChunkedStore._PROCESS_STATE, "_flat")
    # The items of this array, numbered through so many leading axes, for all of its windows.
    _flat: dict[int, FileStore]

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._flat = {}

    @explain_arguments({})
    def windows(
        self,
        axis: int | Sequence[int] = 0,
        *,
        length: int | Sequence[int],
        step: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        start: int | Sequence[int] = 0,
        span: int | Sequence[int | None] | None = None,
    ) -> WindowStore:
        """Return windows along an axis as rows, or along several axes.

        Each index of the axes before ``axis`` has windows of its own, one after the other. The axes
        after it are whole. For an array of shape (n_runs, n_times, height, width), windows along
        axis 1 are rows of shape (length, height, width).

        Windows of one store share decoded chunks, so inputs and targets can be two windows with the
        same ``step`` and ``span``. ``pinfeed.concat`` joins the windows of several files. The store
        must stay open.

        Args:
            axis: Axis, or several, counted from 0; by default the rows.
            length: Indices of a window; for several axes, of all of them or of each.
            step: Indices from the beginning of one window to the beginning of the next.
            stride: Indices from one index of a window to the next.
            start: Indices from ``i * step`` to the beginning of window i.
            span: Indices that must exist from ``i * step`` on. By default, a window ends there.

        Raises:
            ArgumentError: If an argument is not a whole number, is out of range, or ``span`` ends
                before the window.
            StoreError: If no window fits in the array.

        Examples:
            >>> import h5py
            >>> with h5py.File("runs.h5", "w") as file:
            ...     file["speed"] = np.zeros((4, 100, 8, 8), "float32")
            >>> with pinfeed.HDF5Store("runs.h5", "speed") as store:
            ...     past = store.windows(axis=1, length=4, span=5)
            ...     future = store.windows(axis=1, length=1, start=4, span=5)
            ...     with pinfeed.Feeder((past, future), batch_size=32, shuffle=True) as feeder:
            ...         x, y = next(iter(feeder))
            >>> x.shape, y.shape
            (torch.Size([32, 4, 8, 8]), torch.Size([32, 1, 8, 8]))
        """
        axes = axis_windows(axis, length, step, stride, start, span)
        shape = leading_axes(self.array_shape, axes, self.label)
        return WindowStore(self._items(len(shape)), [shape], axes)

    def close(self) -> None:
        """Free the chunks, and close the files that the store opened. Further calls do nothing."""
        super().close()
        for store in self._flat.values():
            if store is not self:
                store.close()

    def _items(self, n_axes: int) -> FileStore:
        """Return the items of the array as rows, numbered through its leading axes."""
        if n_axes not in self._flat:
            made: FileStore = self
            if isinstance(self.native, NpyStore):
                made = self.native.flat(n_axes)
            elif n_axes > 1:
                made = FlatArray(self, n_axes)
            self._flat[n_axes] = made
        return self._flat[n_axes]

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        self.read_box((slice(start, stop), *map(slice, self.array_shape[1:])), out)

    def read_box(self, box: Box, out: Array) -> None:
        """Decode a box of whole chunks into ``out``, of its shape."""
        raise NotImplementedError


class FlatArray(ChunkedView):
    """Items of an array as rows, numbered through its leading axes in C order.

    Args:
        array: The array; it must stay open.
        n_axes: Number of leading axes.
    """

    def __init__(self, array: ChunkedArray, n_axes: int) -> None:
        shape = array.array_shape
        chunks = array.array_chunks or (1,) * len(shape)
        # Items of a chunk are consecutive only along the first axis with chunks of several indices.
        # Chunks along later axes are read together.
        numbers = (i for i in range(n_axes) if chunks[i] > 1)
        self._axis = next(numbers, n_axes - 1)
        self._inner = math.prod(shape[self._axis + 1 : n_axes])
        along = np.arange(0, shape[self._axis], chunks[self._axis]) * self._inner
        n_outer = math.prod(shape[: self._axis])
        outer = np.arange(n_outer) * shape[self._axis] * self._inner
        n_items = math.prod(shape[:n_axes])
        bounds = np.append((outer[:, None] + along).ravel(), n_items)
        self._array = array
        layout = ChunkLayout(
            array.label, array.dtype, shape[n_axes:], bounds, paths=tuple(array.paths)
        )
        super().__init__(layout, [array])

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        shape = self._array.array_shape
        size = shape[self._axis]
        whole = shape[self._axis + 1 :]
        for outer, first, n in _cut(start // self._inner, stop // self._inner, size):
            index = np.unravel_index(outer, shape[: self._axis]) if self._axis else ()
            box = (*(slice(int(i), int(i) + 1) for i in index), slice(first, first + n))
            begin = (outer * size + first) * self._inner - start
            part = out[begin : begin + n * self._inner]
            target = part.reshape(*(1,) * self._axis, n, *whole)
            self._array.read_box((*box, *map(slice, whole)), target)


def _cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut [start, stop) at multiples of ``size``; yield the multiple, the offset and the length."""
    while start < stop:
        outer, first = divmod(start, size)
        n = min(stop - start, size - first)
        yield outer, first, n
        start += n
