"""NpyStore: rows of a file on disk, or of several shards, which are never read as a whole.

``gather`` reads from the page cache straight into the output, by pread. Therefore, no part of the
file stays resident in the process, and a file that shrinks is an error. If the files fit the page
cache, a feeder gathers their rows from a memory map instead, which is several times as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.layouts import raw_layout, series_layout, tensor_layout
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.npy_header import create, holds, read_header
from pinfeed.stores.paths import Path, local_path, local_paths
from pinfeed.stores.store import Array, Store, shape_to_make
from pinfeed.stores.window_store import WindowStore, axis_windows, leading_axes
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import (
    check_file_to_make,
    check_flag,
    check_path,
    explain_arguments,
)

if TYPE_CHECKING:
    from typing_extensions import Self

HINTS = {
    "mmap_mode readonly writable": "give mode='r' to read, or mode='r+' to write rows back to the "
    "file",
    "shape offset": "a .npy file contains it; for a file without a header, use "
    "NpyStore.raw(path, shape=..., dtype=...)",
    "filename file": "the path is the first positional argument",
}
"""Advice for arguments that numpy has under these names."""

_WINDOW_HINTS = {
    "window size seq_len block_size": "the number of items per window is length=",
    "hop hop_length": "the distance between windows is step=",
    "span_files join_files": "windows extend over the ends of files with across_files=True",
}


class NpyStore(LocalFileStore):
    """Rows of a .npy file; ``raw``, ``windows`` and ``safetensors`` open other files.

    Args:
        path: A file, a pattern (``"features-*.npy"``, in sorted order) or a sequence of files.
            Several files are shards of one store, and may differ in their number of rows.
        mode: ``"r"`` to read, or ``"r+"`` to also write rows back to the file.
        dtype: Dtype of the items, of the same size as in the file. By default, it is the dtype in
            the file. Only ``"bfloat16"`` needs this argument, because a .npy file cannot name it
            (numpy saves it as ``V2``).
        keep_cache: Whether the OS page cache keeps the data that was read. False restores the page
            cache to its earlier state. None keeps the data if the files fit in the memory that is
            free when reading begins.
        memory_map: Whether a feeder may gather the rows from a memory map. A file that shrinks
            is an error. If pinfeed was installed without a C compiler, and the file shrinks or
            the disk fails during a gather from a map, the kernel ends the process (SIGBUS). False
            excludes that.

    Raises:
        FileMissing: If a file, or every file of a pattern, is missing.
        StoreError: If a file is not a .npy file, is truncated, has no rows, is in Fortran order, or
            has a dtype that torch does not have; or if shards do not match.
        ArgumentError: If ``path`` is not a path, ``mode`` is not "r" or "r+", ``keep_cache`` is not
            True, False or None, or ``memory_map`` is not True or False.
        UnknownArgument: If an argument does not exist. The message says what to give instead.

    Examples:
        >>> np.save("features-0.npy", np.zeros((1000, 8), "float32"))
        >>> np.save("features-1.npy", np.ones((500, 8), "float32"))
        >>> with (
        ...     pinfeed.NpyStore("features-*.npy") as store,
        ...     pinfeed.Feeder(store, batch_size=100, shuffle=True) as feeder,
        ... ):
        ...     n_batches = len(list(feeder))
    """

    @explain_arguments(HINTS)
    def __init__(
        self,
        path: Path | Sequence[Path],
        *,
        mode: str = "r",
        dtype: npt.DTypeLike | None = None,
        keep_cache: bool | None = None,
        memory_map: bool = True,
    ) -> None:
        items = None if dtype is None else dtype_of(dtype, "NpyStore")
        layouts = [read_header(p, items) for p in local_paths(path)]
        super().__init__(layouts, mode, keep_cache, memory_map)

    @classmethod
    def _of_layouts(
        cls, layouts: Sequence[RowLayout], mode: str, keep_cache: bool | None, memory_map: bool
    ) -> Self:
        """Open files with known layouts."""
        store = cls.__new__(cls)
        LocalFileStore.__init__(store, layouts, mode, keep_cache, memory_map)
        return store

    @classmethod
    def raw(
        cls,
        path: Path | Sequence[Path],
        *,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        offset: int = 0,
        mode: str = "r",
        keep_cache: bool | None = None,
        memory_map: bool = True,
    ) -> NpyStore:
        """Open a file without a header, or with a header of ``offset`` bytes.

        Args:
            path: As for the class.
            shape: Shape (n_rows, *row_shape) of each file, whole numbers of at least 1. An n_rows
                of -1 stands for all rows of the file.
            dtype: Dtype of the items, as numpy or torch spells it; ``">f4"`` for the other byte
                order.
            offset: Bytes before the first row.
            mode: As for the class.
            keep_cache: As for the class.
            memory_map: As for the class.

        Raises:
            FileMissing: As for the class.
            StoreError: If a file is truncated or has no rows, if n_rows is -1 and the file does not
                end with a whole row, or if the shape, the offset or the dtype is invalid.
        """
        layouts = [raw_layout(p, shape, dtype, offset) for p in local_paths(path)]
        return cls._of_layouts(layouts, mode, keep_cache, memory_map)

    @classmethod
    @explain_arguments(_WINDOW_HINTS)
    def windows(
        cls,
        path: Path | Sequence[Path],
        *,
        length: int | Sequence[int],
        step: int | Sequence[int] = 1,
        dtype: npt.DTypeLike | None = None,
        start: int | Sequence[int] = 0,
        span: int | Sequence[int | None] | None = None,
        axis: int | Sequence[int] = 0,
        stride: int | Sequence[int] = 1,
        across_files: bool = False,
        offset: int = 0,
        keep_cache: bool | None = None,
        memory_map: bool = True,
    ) -> WindowStore:
        """Open windows of consecutive items of a flat file, such as tokens or a time series.

        Row i contains the items ``[i * step + start, i * step + start + length)`` of the file.
        Windows may overlap without copies in the file. The rows are read-only.

        Windows along another axis, or along several, are those of ``HDF5Store.windows``.

        Args:
            path: As for the class. The items are the first axis of a .npy file, or the numbers in a
                file without a header. By default, a window never extends over two files, and files
                that are shorter than ``span`` have no windows.
            length: Items of a window. Items of shape (C,) make rows of shape (length, C).
            step: Items from the beginning of one window to the beginning of the next.
            dtype: Dtype of the items, required for a file without a header; as for the class for a
                .npy file.
            start: Items from ``i * step`` to the beginning of window i.
            span: Items that must exist from ``i * step`` on; by default ``start + length``. Stores
                with equal ``step`` and ``span`` have the same number of rows in each file, so they
                can be inputs and targets of one feeder.
            axis: Axis of the items, or several, as for ``HDF5Store.windows``. Files may differ in
                the first of these axes and in those before it, with ``across_files`` only in
                their first axis.
            stride: Items from one item of a window to the next.
            across_files: Whether the items of all files are one sequence, as if the files were
                joined along their first axis. Windows then extend over the ends of files.
            offset: Bytes before the first item of a file without a header.
            keep_cache: As for the class.
            memory_map: As for the class.

        Raises:
            FileMissing: As for the class.
            StoreError: If no file, or with ``across_files`` not all files together, has ``span``
                items, if a file without a header gets no ``dtype`` or does not end with a whole
                item, if axes of files differ, or if the class refuses a .npy file.
            ArgumentError: If ``length``, ``step`` or ``stride`` is below 1, ``start`` or ``offset``
                is negative, ``span`` ends before the window, ``offset`` is given for a .npy file,
                a file has no such axis, or ``across_files`` is not True or False.

        Example::

            # Inputs and targets of a forecast of 24 hours from 96 hours.
            past = NpyStore.windows("series.npy", length=96, span=120)
            future = NpyStore.windows("series.npy", length=24, start=96, span=120)
            feeder = Feeder((past, future), batch_size=64, shuffle=True)
        """
        check_flag(across_files, "across_files")
        axes = axis_windows(axis, length, step, stride, start, span)
        arrays = [series_layout(p, dtype, offset) for p in local_paths(path)]
        shapes = [
            leading_axes((one.n_rows, *one.row_shape), axes, os.path.basename(one.path))
            for one in arrays
        ]
        _check_inner_axes(shapes, arrays, 0 if across_files else min(axes))
        if across_files:
            shapes = [[sum(n_rows for n_rows, *_ in shapes), *shapes[0][1:]]]
        flat = [_flat(one, max(axes) + 1) for one in arrays]
        store = cls._of_layouts(flat, "r", keep_cache, memory_map)
        return WindowStore(store, shapes, axes, owned=True)

    def flat(self, n_axes: int) -> NpyStore:
        """Return a store of the same bytes whose rows are numbered through ``n_axes`` axes.

        The rows have no gaps between them. The caller closes the store.
        """
        layouts = [_flat(layout, n_axes) for layout in self._layouts]
        return NpyStore._of_layouts(layouts, "r", self._keep_cache, self._memory_map)

    @classmethod
    def safetensors(
        cls,
        path: Path | Sequence[Path],
        name: str,
        *,
        mode: str = "r",
        keep_cache: bool | None = None,
        memory_map: bool = True,
    ) -> NpyStore:
        """Open one tensor of a safetensors file; the safetensors library reads the header.

        Args:
            path: As for the class.
            name: Name of the tensor; its first axis is the rows.
            mode: As for the class.
            keep_cache: As for the class.
            memory_map: As for the class.

        Raises:
            MissingDependency: If the safetensors library is not installed.
            FileMissing: As for the class.
            StoreError: If a file is not a safetensors file, or has no such tensor, or if the tensor
                has no rows or a dtype that torch does not have.
        """
        layouts = [tensor_layout(p, name) for p in local_paths(path)]
        return cls._of_layouts(layouts, mode, keep_cache, memory_map)

    @classmethod
    def create(
        cls,
        path: Path,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike = "float32",
        *,
        overwrite: bool = False,
    ) -> NpyStore:
        """Create a .npy file of zeros and open it for writing.

        The file occupies disk space as it is written. If the call fails, no file is created or
        replaced.

        Args:
            path: The file to create.
            shape: Shape (n_rows, *row_shape), each at least 1.
            dtype: Dtype of the items.
            overwrite: Whether to replace an existing file; by default, an existing file is an
                error.

        Raises:
            StoreError: If the file exists and ``overwrite`` is False, if ``path`` is a directory,
                if ``shape`` or ``dtype`` is invalid, or if the file would be too large.
            FileMissing: If the directory of the file does not exist.
            ArgumentError: If ``path`` is not a path, or ``overwrite`` is not True or False.
        """
        check_flag(overwrite, "overwrite")
        items = dtype_of(dtype, "NpyStore")
        name = check_file_to_make(local_path(check_path(path)))
        sizes = shape_to_make(shape, items, name)
        if min(sizes) < 1:
            raise StoreError(
                f"{name}: shape {sizes} has rows of 0 bytes; expected at least 1 on each axis"
            )
        create(name, sizes, items, overwrite=overwrite)
        return cls(path, mode="r+", dtype=items)

    @classmethod
    def joined(cls, stores: Sequence[Store]) -> NpyStore | None:
        """Return a new store of the files of several stores, one after the other; read-only.

        Returns:
            The store, or None if not all are NpyStores with equal layouts and options.
        """
        files = [store for store in stores if type(store) is NpyStore]
        layouts = [layout for store in files for layout in store._layouts]
        kinds = {(layout.dtype.str, layout.dtype) for layout in layouts}
        memory_maps = {store._memory_map for store in files}
        if len(files) < len(stores) or len(kinds) > 1 or len(memory_maps) > 1:
            return None
        keep = {store._keep_cache for store in files}
        return cls._of_layouts(layouts, "r", keep.pop() if len(keep) == 1 else None, *memory_maps)

    def __repr__(self) -> str:
        paths = self.paths[0] if len(self.paths) == 1 else self.paths
        return f"NpyStore({paths!r}, mode={self._mode!r})"

    @property
    def can_be_one_array(self) -> bool:
        """Whether all rows can be mapped for writing as one array."""
        return len(self._layouts) == 1 and self.writable and not self._swapped

    @contextlib.contextmanager
    def mapped(self) -> Iterator[Array]:
        """Map all rows of the one file as an array, to fill it as a whole.

        The rows are on the disk when the context ends.

        Raises:
            StoreError: If the store has several files, or is not open for writing.
            OSError: If the disk is full; the error names the file.
        """
        array = self.map_to_write()
        yield np.asarray(array)
        array.flush()

    def map_to_write(self) -> np.memmap[Any, Any]:
        """Return a memory map of all rows of the one file, which outlives the store.

        The disk space is reserved first, because the kernel would end the process if the disk were
        full during a write to the map.

        Raises:
            StoreError: If the store has several files, or is not open for writing.
            OSError: If the disk is full; the error names the file.
        """
        if not self.can_be_one_array:
            raise StoreError(
                f"{self!r} cannot be filled as a whole; expected one file, open for writing, in "
                "this machine's byte order"
            )
        layout = self._layouts[0]
        shape = (layout.n_rows, *layout.row_shape)
        with open(layout.path, "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, layout.end)
            except OSError as error:
                raise OSError(error.errno, error.strerror, layout.path) from error
            return np.memmap(file, self.dtype, "r+", layout.offset, shape)


def _flat(array: RowLayout, n_axes: int) -> RowLayout:
    """Return the layout of the items of an array, numbered through ``n_axes`` axes."""
    n_rows = array.n_rows * math.prod(array.row_shape[: n_axes - 1])
    return dataclasses.replace(array, n_rows=n_rows, row_shape=array.row_shape[n_axes - 1 :])


def _check_inner_axes(
    shapes: Sequence[Sequence[int]], arrays: Sequence[RowLayout], axis: int
) -> None:
    """Check that the arrays of all files have equal axes after ``axis``.

    Raises:
        StoreError: If they do not.
    """
    for shape, array in zip(shapes, arrays, strict=True):
        if shape[axis + 1 :] != shapes[0][axis + 1 :]:
            raise StoreError(
                f"{arrays[0].path} has the axes {shapes[0]}, but {array.path} has {shape}; "
                f"expected equal axes after axis {axis}; join the windows of each "
                "file: pinfeed.concat([NpyStore.windows(path, ...) for path in paths])"
            )


def open_created(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NpyStore:
    """Open for writing a file that ``NpyStore.create`` made with this shape and dtype.

    Raises:
        StoreError: If the file has another shape or dtype, or is truncated.
    """
    items = dtype_of(dtype, "NpyStore")
    name = local_path(path)
    if not holds(name, shape, items):
        raise StoreError(
            f"{name} exists, but is not a .npy file of shape {shape}, {items}; expected another "
            "path, or overwrite=True to replace the file"
        )
    return NpyStore(name, mode="r+", dtype=items)
