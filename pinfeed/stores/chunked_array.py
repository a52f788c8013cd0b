"""ChunkedArray: rows of arrays with chunks along all axes; windows along any of their axes."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores.chunked import ChunkedStore, ChunkedView, ChunkLayout
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.libraries import is_of
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.raw_chunks import Box
from pinfeed.stores.store import Array
from pinfeed.stores.window_store import WindowStore, axis_windows, leading_axes
from pinfeed.validation.arguments import check_flag, explain_arguments


class ChunkedArray(ChunkedStore):
    """Rows of an array that a library stores in chunks along all axes.

    Args:
        source: Path, which the store opens and closes, or an open array of the library, which the
            caller closes.
        name: Name of the array in the file or group of the path.
        as_stored: Whether to read stored numbers that do not mean what they say.
        kind: Name of the library, and of its class of arrays.

    Attributes:
        array_shape: Shape of the array.
        array_chunks: Shape of a chunk; None if the array is in one piece.
    """

    array_shape: tuple[int, ...]
    array_chunks: tuple[int, ...] | None

    _PROCESS_STATE: ClassVar[tuple[str, ...]] = (
        *ChunkedStore._PROCESS_STATE,
        *("_flat", "_opened", "_opening"),
    )
    # Chunks that can be decoded without the library; None if there are none.
    _raw: Any
    # The items of this array, numbered through so many leading axes, for all of its windows.
    _flat: dict[int, FileStore]

    def __init__(
        self, source: Any, name: str | None, *, as_stored: bool, kind: tuple[str, str]
    ) -> None:
        check_flag(as_stored, "as_stored")
        own_name = type(self).__name__
        self._name = name
        self._path = ""
        if isinstance(source, (str, os.PathLike)):
            path = os.fspath(source)
            self._path = path if has_protocol(path) else os.path.abspath(path)
            array = self._open()
        elif not is_of(source, *kind):
            raise ArgumentError(
                f"{own_name}: got {type(source).__name__}; expected a path or an open "
                f"{'.'.join(kind)}; for an open file or group, give file[name]"
            )
        elif name is not None:
            raise ArgumentError(f"name={name!r} with an open array; leave name out")
        else:
            array = source
        try:
            with self._errors(self._path or own_name):
                self._given = None if self._path else array
                self._layout = self._describe(array)
                super().__init__(self._layout)
                if not as_stored:
                    self._require_plain_numbers(array)
                self.native = self._plain_bytes(array)
        except BaseException:
            if self._path:
                self._close_source(array)
            raise
        self._opened = array
        if self.native is not None:
            self.native.label = self.label
            self._release_source()

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._flat = {}
        # Without a lock, two threads could open the path, and one could close the other's array.
        self._opening = threading.Lock()
        # A path is opened again when rows are read, because a forked process would share the state
        # of the open file with its parent.
        self._opened = self._given

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None:
            raise TypeError(
                f"{self!r} reads an object that the caller opened, and cannot be pickled; give "
                f"{type(self).__name__} the path, which each process opens itself"
            )
        return super().__getstate__()

    @property
    def _lock(self) -> threading.Lock:
        """Lock of the open array."""
        return self._opening

    @property
    def _step_nbytes(self) -> int:
        if self._raw is None:
            return max(self.chunk_nbytes, min(self._run_bytes, self.nbytes))
        return int(self._raw.grid.chunk_nbytes)

    def _open(self) -> Any:
        """Open the array of the path; the caller closes it by ``_close_source``."""
        raise NotImplementedError

    def _errors(self, place: str) -> AbstractContextManager[None]:
        """Raise errors of the library, which are of many kinds, as ``StoreError``."""
        raise NotImplementedError

    def _describe(self, array: Any) -> ChunkLayout:
        """Find out how the rows of an array are read, and return its layout."""
        raise NotImplementedError

    def _require_plain_numbers(self, array: Any) -> None:
        """Check that the stored numbers mean what they say, and that all of them exist.

        Raises:
            StoreError: If an attribute or a mask changes what they mean, or parts are missing.
        """
        raise NotImplementedError

    def _plain_bytes(self, array: Any) -> NpyStore | None:
        """Return a store that reads the bytes of an array from its file; None if it cannot."""
        return None

    def _close_source(self, array: Any) -> None:
        """Close an array that ``_open`` has returned."""
        raise NotImplementedError

    def _source(self) -> Any:
        """Return the open array; a path is opened again in another process.

        The caller holds the lock.
        """
        if self._opened is None:
            # Without this check, a gather that still runs would open the closed file again.
            self._require_open()
            array = self._open()
            if not self._describe(array).has_rows_of(self._layout):
                self._close_source(array)
                raise StoreError(
                    f"{self!r}: the file was replaced, and has other rows; open the store again"
                )
            self._opened = array
        return self._opened

    def _release_source(self) -> None:
        """Close the array, unless the caller opened it."""
        with self._lock:
            array = self._opened
            if self._given is None and array is not None:
                self._opened = None
                self._close_source(array)

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
        self._release_source()

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
        with self._lock:
            array = self._source()
            # If the array was replaced, it may have other chunks when it is opened again.
            raw = self._raw
        # The library reads chunks that were never written, and explains damaged chunks.
        if raw is None or not self._read_raw(raw, box, out):
            self._read_box(array, box, out)

    def _read_raw(self, raw: Any, box: Box, out: Array) -> bool:
        """Decode a box without the library; return whether that was possible."""
        raise NotImplementedError

    def _read_box(self, array: Any, box: Box, out: Array) -> None:
        """Decode a box by the library."""
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
