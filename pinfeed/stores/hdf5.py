"""HDF5Store: rows of an HDF5 dataset, read with h5py."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pinfeed.errors import ClosedError, StoreError, described
from pinfeed.stores.chunked import MAX_DECODES, ChunkLayout
from pinfeed.stores.chunked_array import ChunkedArray
from pinfeed.stores.formats import ArrayFormat, register
from pinfeed.stores.libraries import (
    imported,
    library_errors,
    listed,
    missing_part,
    nullable_values,
    require_plain_numbers,
)
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.paths import Path, file_size, local_path
from pinfeed.stores.raw_chunks import Box, HDF5Chunks
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    import h5py

# Rows that are read at a time from a dataset without chunks.
_PIECE_BYTES = 256 << 10
# Items of a row in one file of a virtual dataset, from which on HDF5 reads rows faster one by one.
_STACKED_ITEMS = 256
# Decoded chunks that HDF5 keeps of all files of a virtual dataset.
_VIRTUAL_CACHE_BYTES = 16 << 20


class HDF5Store(ChunkedArray):
    """Read-only rows of an HDF5 dataset, read with h5py.

    The first axis of the dataset is the rows; ``windows`` returns windows along any axis. A dataset
    without chunks and filters is read straight from the file, like a ``NpyStore``, if it was opened
    by path or its file is open read-only.

    The dataset must not change while the store is open, even if its file is open for writing.

    Args:
        source: Path of a file, which the store opens and closes, or an open ``h5py.Dataset``, which
            the caller closes.
        name: Name of the dataset in the file, such as ``"train/images"``. The default requires that
            the file contains only one dataset. A nullable column of AnnData is also a name.
        as_stored: Whether to read the stored numbers of a dataset that has attributes which change
            their meaning (``scale_factor``, ``_FillValue``), missing values of AnnData, or missing
            parts. By default, these are errors.

    Raises:
        MissingDependency: If h5py is not installed.
        FileMissing: If the file does not exist.
        StoreError: If the file is not an HDF5 file or does not contain the dataset, or if the
            dataset has no rows, a type other than numbers and booleans, or numbers that need
            ``as_stored=True``.
        ArgumentError: If ``source`` is neither a path nor a dataset, or if a dataset is given
            together with a name.
        ClosedError: If the file of the dataset is closed.

    Examples:
        >>> import h5py
        >>> with h5py.File("train.h5", "w") as file:
        ...     file["images"] = np.zeros((1000, 8), "float32")
        >>> with (
        ...     pinfeed.HDF5Store("train.h5", "images") as store,
        ...     pinfeed.Feeder(store, batch_size=100) as feeder,
        ... ):
        ...     n_batches = len(list(feeder))
    """

    # The chunk as it is in the file, without gzip, and without shuffle.
    _decoding_chunks = 3

    @explain_arguments({})
    def __init__(
        self, source: Path | h5py.Dataset, name: str | None = None, *, as_stored: bool = False
    ) -> None:
        imported("h5py", "HDF5Store")
        super().__init__(source, name, as_stored=as_stored, kind=("h5py", "Dataset"))

    def _open(self) -> Any:
        return _open(local_path(self._path), self._name)

    def _errors(self, place: str) -> AbstractContextManager[None]:
        return _h5py_errors(place, self._name)

    def _describe(self, dataset: Any) -> ChunkLayout:
        _require_valid(dataset, "HDF5Store")
        self._name = dataset.name
        can_decode = HDF5Chunks.can_read(dataset) and _is_stored_as_in_memory(dataset)
        self._raw = HDF5Chunks(dataset) if can_decode else None
        self.array_shape = dataset.shape or ()
        self.array_chunks = dataset.chunks
        self._is_virtual = bool(dataset.is_virtual)
        # HDF5 itself decodes one chunk at a time.
        self._max_decodes = MAX_DECODES if self._raw is not None else 1
        path = os.fsdecode(dataset.file.filename)
        label = f"{os.path.basename(path)}:{dataset.name}"
        _check_type(dataset.dtype, label)
        if dataset.chunks is not None:
            chunk_rows = dataset.chunks[0]
        elif _is_stacked(dataset):
            chunk_rows = 1
            self._run_bytes = 0
        else:
            row_nbytes = dataset.dtype.itemsize * math.prod((dataset.shape or ())[1:])
            chunk_rows = _PIECE_BYTES // max(1, row_nbytes)
        return ChunkLayout.even(label, dataset.dtype, dataset.shape, chunk_rows, (path,))

    def _require_plain_numbers(self, dataset: Any) -> None:
        is_column = (dataset.name or "").endswith("/values")
        require_plain_numbers(
            dataset.attrs,
            dataset.dtype,
            self.label,
            column=dataset.parent if is_column else None,
            missing=missing_part(dataset),
        )

    def _plain_bytes(self, dataset: Any) -> NpyStore | None:
        # The dataset must be contiguous and complete, and have the same type in memory, and this
        # process must not write the file.
        import h5py

        file = dataset.file
        properties = dataset.id.get_create_plist()
        if (
            file.driver != "sec2"
            or (self._given is not None and file.mode != "r")
            or dataset.is_virtual
            or properties.get_layout() != h5py.h5d.CONTIGUOUS
            or properties.get_external_count()
            or dataset.id.get_storage_size() != dataset.nbytes
            or not dataset.nbytes
            or not _is_stored_as_in_memory(dataset)
        ):
            return None
        offset = dataset.id.get_offset()
        path = os.path.abspath(os.fsdecode(file.filename))
        try:
            opened = os.fstat(file.id.get_vfd_handle())
            found = os.stat(path)
        except OSError:
            return None
        if offset is None or (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino):
            # The file was moved or replaced.
            return None
        return NpyStore.raw(path, shape=dataset.shape, dtype=dataset.dtype, offset=offset)

    @property
    def piece_rows(self) -> int:
        return 1 if self.array_chunks is None else super().piece_rows

    @property
    def resident_bytes(self) -> int:
        return super().resident_bytes + self._is_virtual * _VIRTUAL_CACHE_BYTES

    @property
    def _lock(self) -> threading.Lock:
        return _reading

    def _read_raw(self, raw: HDF5Chunks, box: Box, out: Array) -> bool:
        return all(
            self._decode_chunk(raw, origin, raw.grid.place(origin, box, out))
            for origin in raw.grid.origins(box)
        )

    def _decode_chunk(self, chunks: HDF5Chunks, origin: tuple[int, ...], place: Array) -> bool:
        """Read one chunk as it is in the file, and decode it; return whether that was possible."""
        with _reading:
            dataset = self._dataset()
            try:
                filters_left_out, raw = dataset.id.read_direct_chunk(origin)
            except (OSError, RuntimeError, ValueError, MemoryError, SystemError):
                # Some releases of h5py raise the last two if the dataset has no written chunk.
                return False
        return not filters_left_out and chunks.decode(raw, place)

    def _read_box(self, dataset: Any, box: Box, out: Array) -> None:
        with _reading:
            self._dataset().read_direct(out, box)

    def _close_source(self, source: Any) -> None:
        if source:
            source.file.close()

    def _dataset(self) -> Any:
        """Return the open dataset. The caller holds the lock."""
        dataset = self._source()
        _require_valid(dataset, repr(self))
        return dataset


_SIGNATURE = b"\x89HDF\r\n\x1a\n"


@register
class HDF5Format(ArrayFormat):
    """HDF5 files, also those of netCDF, MATLAB and AnnData."""

    kind = "hdf5"
    usage = "HDF5Store(path, name) reads a dataset"
    advice = (
        "an HDF5 file: give pinfeed.HDF5Store(path, name), with the name of a dataset, or "
        "pinfeed.SparseStore(path) for the sparse matrix of an .h5ad file"
    )
    magic = _SIGNATURE[:4]
    suffixes = (".h5", ".hdf5", ".h5ad", ".h5mu", ".loom")
    requirement = "h5py>=3.10"
    library = "h5py"
    array_class = "Dataset"
    store = HDF5Store
    is_one_file = True

    @contextlib.contextmanager
    def open_group(self, source: Any, key: str | None = None) -> Iterator[tuple[Any, str]]:
        imported("h5py", "HDF5 files")
        with contextlib.ExitStack() as stack:
            parent = source
            if isinstance(source, (str, os.PathLike)):
                parent = stack.enter_context(_open_file(os.path.abspath(local_path(source))))
            else:
                _require_valid(source, "h5py.Group")
            path = os.fspath(os.path.basename(parent.file.filename))
            with _h5py_errors(path, key):
                yield parent, path

    def is_file(self, file: IO[bytes], start: bytes, size: int) -> bool:
        # Other data may precede the content, as in .mat files.
        offset = 0
        while offset < size:
            file.seek(offset)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            offset = max(512, 2 * offset)
        return False


# HDF5 makes one call at a time. Some releases of h5py crash if several threads read.
_reading = threading.Lock()


def _renew_lock() -> None:
    global _reading
    _reading = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _open(path: Path, name: str | None, cache_nbytes: int = 0) -> Any:
    """Open a dataset of a file; the caller closes ``dataset.file``."""
    file = _open_file(path, cache_nbytes)
    try:
        with _h5py_errors(path, name):
            dataset = _dataset_of(file, name)
    except BaseException:
        file.close()
        raise
    if cache_nbytes or not dataset.is_virtual:
        return dataset
    n_parts = dataset.id.get_create_plist().get_virtual_count()
    file.close()
    return _open(path, name, max(1, _VIRTUAL_CACHE_BYTES // max(1, n_parts)))


def _open_file(path: Path, cache_nbytes: int = 0) -> Any:
    """Open a file, which the caller closes.

    Args:
        path: Path of the file.
        cache_nbytes: Chunks that HDF5 keeps of each dataset, in bytes. A store keeps chunks itself,
            but not those of the files of a virtual dataset.
    """
    import h5py

    file_size(os.fspath(path))
    try:
        return h5py.File(path, "r", rdcc_nbytes=cache_nbytes)
    except OSError as error:
        raise StoreError(
            f"{path}: h5py cannot open it ({described(error)}); expected an HDF5 file that is not "
            "open for writing; if the file is open in this process, give its dataset; if another "
            "process writes it in SWMR mode, give h5py.File(path, 'r', swmr=True)[name]"
        ) from error


def _h5py_errors(path: Path, name: str | None) -> AbstractContextManager[None]:
    """Raise errors of h5py for a damaged file as ``StoreError``."""
    place = os.fspath(path) if name is None else f"{os.fspath(path)}, dataset {name!r}"
    return library_errors(
        place, "h5py", "an undamaged HDF5 file; check it with h5dump, or write it again"
    )


def _dataset_of(file: Any, name: str | None) -> Any:
    """Return the dataset of a name, or the only one.

    Raises:
        StoreError: If the dataset does not exist, or no name is given and there is more than one.
    """
    import h5py

    item = None if name is None else file.get(name)
    if isinstance(item, h5py.Group) and nullable_values(item) is not None:
        item = item["values"]
    if isinstance(item, h5py.Dataset):
        return item
    found: list[str] = []
    file.visititems(lambda key, one: found.append(key) if isinstance(one, h5py.Dataset) else None)
    if name is None and len(found) == 1:
        return file[found[0]]
    asked = f"has no dataset {name!r}" if name is not None else f"has {len(found)} datasets"
    raise StoreError(
        f"{file.filename} {asked}; expected the name of one of its datasets: {listed(found)}; "
        "give HDF5Store(path, name)"
    )


def _require_valid(dataset: Any, name: str) -> None:
    if not dataset:
        raise ClosedError(f"{name}: the HDF5 file of the dataset is closed; open it again")


def _is_stacked(dataset: Any) -> bool:
    """Return whether each row of a virtual dataset has long parts of several datasets.

    HDF5 finds these parts item by item, unless it reads a single row: for parts of 4,096 items, it
    takes 20 times as long.
    """
    properties = dataset.id.get_create_plist()
    if not dataset.is_virtual or not properties.get_virtual_count():
        return False
    space = properties.get_virtual_vspace(0)
    if not space.is_regular_hyperslab():
        return False
    _, _, counts, blocks = space.get_regular_hyperslab()
    part: int = math.prod(counts[1:]) * math.prod(blocks[1:])
    n_items: int = math.prod(dataset.shape[1:])
    return _STACKED_ITEMS <= part < n_items


def _check_type(dtype: np.dtype[Any], label: str) -> None:
    """Refuse types that h5py reads as numbers with another meaning, or as Python objects."""
    import h5py

    problem = ""
    if h5py.check_enum_dtype(dtype) is not None:
        problem = "an enumerated type; save its numbers as integers"
    elif h5py.check_string_dtype(dtype) is not None:
        problem = "text; convert it, np.unique(dataset.asstr()[:], return_inverse=True)[1]"
    elif h5py.check_vlen_dtype(dtype) is not None:
        problem = (
            "rows of different lengths; give pinfeed.RaggedStore(values, offsets), or pad them to "
            "one length"
        )
    if problem:
        raise StoreError(f"{label} has {problem}")
    check_dtype(dtype, label)


def _is_stored_as_in_memory(dataset: Any) -> bool:
    """Return whether the bytes in the file are those of the dtype that h5py reports."""
    import h5py

    in_memory = h5py.h5t.py_create(dataset.dtype, logical=True)
    return bool(dataset.id.get_type().equal(in_memory))
