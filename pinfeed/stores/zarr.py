"""ZarrStore: rows of a Zarr array, read with zarr."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from pinfeed.errors import FileMissing, StoreError
from pinfeed.stores.chunked import ChunkLayout
from pinfeed.stores.chunked_array import ChunkedArray
from pinfeed.stores.formats import ArrayFormat, register
from pinfeed.stores.libraries import (
    imported,
    library_errors,
    listed,
    nullable_values,
    require_plain_numbers,
)
from pinfeed.stores.paths import Path, file_version, has_protocol
from pinfeed.stores.raw_chunks import Box, ZarrChunks
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    import zarr

# Larger shards are decoded in pieces of about this size: by zarr, and without it.
_SHARD_BYTES = 1 << 20
_RAW_SHARD_BYTES = 128 << 10
# Consecutive chunks are read in one call of zarr, up to this size, because a call is slow.
_CALL_BYTES = 8 << 20


class ZarrStore(ChunkedArray):
    """Read-only rows of a Zarr array of format 2 or 3, read with zarr.

    The first axis of the array is the rows; ``windows`` returns windows along any axis. If the
    array has shards, a chunk of the store is a shard, or several chunks of one that exceeds 1 MiB;
    a batch with few rows of it decodes only the chunks of these rows.
    Chunks that were never written contain the fill value. The array must not change while the store
    is open.

    Args:
        source: Path or URL of an array or group, which the store opens and closes, or an open
            ``zarr.Array``, which the caller closes.
        name: Name of the array in a group, such as ``"train/images"``. By default, ``source`` is
            the array itself. A nullable column of AnnData is also a name.
        as_stored: As for ``HDF5Store``; also whether to read chunks that were never written of an
            array without a fill value.

    Raises:
        MissingDependency: If zarr is not installed.
        FileMissing: If the directory does not exist.
        StoreError: If the array does not exist, has no rows, has a type other than numbers and
            booleans, or numbers that need ``as_stored=True``.
        ArgumentError: If ``source`` is neither a path nor an array, or if an array is given
            together with a name.

    Examples:
        >>> import zarr
        >>> array = zarr.create_array("images.zarr", shape=(1000, 8), chunks=(100, 8), dtype="f4")
        >>> with (
        ...     pinfeed.ZarrStore("images.zarr") as store,
        ...     pinfeed.Feeder(store, batch_size=100) as feeder,
        ... ):
        ...     n_batches = len(list(feeder))
    """

    @explain_arguments({})
    def __init__(
        self, source: Path | zarr.Array, name: str | None = None, *, as_stored: bool = False
    ) -> None:
        _zarr()
        super().__init__(source, name, as_stored=as_stored, kind=("zarr", "Array"))

    def _open(self) -> Any:
        import zarr

        if not has_protocol(self._path) and not os.path.exists(self._path):
            raise FileMissing(f"{self._path}: no such Zarr array (looked in {os.getcwd()})")
        place = self._path if self._name is None else f"{self._path}, {self._name!r}"
        with _zarr_errors(place):
            found = zarr.open(self._path, mode="r", path=self._name)
            names = sorted(found.array_keys()) if isinstance(found, zarr.Group) else []
            if names and (values := nullable_values(found)) is not None:
                return values
        if isinstance(found, zarr.Group):
            raise StoreError(
                f"{self._path} is a Zarr group; expected one of its arrays: {listed(names)}; give "
                "ZarrStore(path, name)"
            )
        return found

    def _errors(self, place: str) -> AbstractContextManager[None]:
        return _zarr_errors(place)

    def _describe(self, array: Any) -> ChunkLayout:
        self._raw = ZarrChunks.of(array)
        if self._raw is None:
            self._run_bytes = _CALL_BYTES
            # All calls of zarr share one event loop.
            self._max_decodes = 2
        self._metadata_path = _metadata_path(array)
        self.array_shape = array.shape
        self.array_chunks = array.chunks
        label = array.path or os.path.basename(self._path) or "a Zarr array"
        if self._path and array.path:
            label = f"{os.path.basename(self._path)}/{array.path}"
        dtype = np.dtype(array.dtype)
        check_dtype(dtype, label)
        chunk_rows = (array.shards or array.chunks or (1,))[0]
        row_nbytes = max(1, dtype.itemsize * math.prod(array.shape[1:]))
        most = _SHARD_BYTES if self._raw is None else _RAW_SHARD_BYTES
        if array.shards and chunk_rows * row_nbytes > most:
            inner: int = array.chunks[0]
            chunk_rows = inner * max(1, most // (inner * row_nbytes))
        paths = (self._path,) if self._path else ()
        return ChunkLayout.even(label, dtype, array.shape, chunk_rows, paths)

    def _require_plain_numbers(self, array: Any) -> None:
        attributes = dict(array.attrs)
        fill_value = array.metadata.fill_value
        is_format_2 = array.metadata.zarr_format == 2
        # In format 2, xarray writes the attribute _FillValue as the fill value.
        if is_format_2 and fill_value is not None and "_ARRAY_DIMENSIONS" in attributes:
            attributes["_FillValue"] = fill_value
        n_missing = 0 if fill_value is not None else array.nchunks - array.nchunks_initialized
        require_plain_numbers(
            attributes,
            np.dtype(array.dtype),
            self.label,
            column=_group_of_column(array),
            missing=f"{n_missing:,} chunks that were never written" if n_missing else "",
        )

    @property
    def piece_rows(self) -> int:
        # The chunks of a shard.
        return min(self.chunk_rows, (self.array_chunks or (1,))[0])

    def close(self) -> None:
        """Free the chunks, and close the array if the store opened it."""
        super().close()
        if self._raw is not None:
            self._raw.close()

    def read_box(self, box: Box, out: Array) -> None:
        super().read_box(box, out)
        # Without its files, an array has the fill value everywhere.
        if self._metadata_path is not None:
            file_version(self._metadata_path)

    def _read_raw(self, raw: ZarrChunks, box: Box, out: Array) -> bool:
        return raw.read(box, out)

    def _read_box(self, array: Any, box: Box, out: Array) -> None:
        from zarr.buffer.cpu import NDBuffer

        if array.dtype == self.dtype:
            array.get_basic_selection(box, out=NDBuffer.from_numpy_array(out))
        else:
            # The array has the other byte order.
            out[...] = array[box]

    def _close_source(self, source: Any) -> None:
        source.store.close()


@register
class ZarrFormat(ArrayFormat):
    """Folders of Zarr arrays, of format 2 or 3."""

    kind = "zarr"
    usage = "ZarrStore(path, name) reads an array"
    advice = "a Zarr array: give pinfeed.ZarrStore(path), or ZarrStore(path, name) of a group"
    suffixes = (".zarr",)
    contents = ("zarr.json", ".zarray", ".zgroup")
    requirement = "zarr>=3.1"
    library = "zarr"
    array_class = "Array"
    store = ZarrStore
    is_one_file = False

    @contextlib.contextmanager
    def open_group(self, source: Any, key: str | None = None) -> Iterator[tuple[Any, str]]:
        zarr = _zarr()
        path = ""
        if isinstance(source, (str, os.PathLike)):
            path = os.fspath(source)
            if not has_protocol(path) and not os.path.exists(path):
                raise FileMissing(f"{path}: no such file or Zarr group (looked in {os.getcwd()})")
        with contextlib.ExitStack() as stack, _zarr_errors(path or "zarr.Group"):
            parent = source
            if path:
                parent = zarr.open(path, mode="r")
                stack.callback(parent.store.close)
            yield parent, path

    def is_folder(self, path: str, names: list[str]) -> bool:
        return super().is_folder(path, names) or path.endswith(self.suffixes)


def _zarr() -> Any:
    """Return the library, whose older releases lack a module."""
    imported("zarr.buffer", "ZarrStore", " 3.1 or later")
    return imported("zarr", "ZarrStore")


def _zarr_errors(place: str) -> AbstractContextManager[None]:
    """Raise errors of zarr and its storages, which are of many kinds, as ``StoreError``."""
    expected = "a Zarr array, or a group and the name of an array in it: ZarrStore(path, name)"
    return library_errors(place, "zarr", expected)


def _metadata_path(array: Any) -> str | None:
    """Return the path of the metadata of an array in a local folder; None elsewhere."""
    from zarr.storage import LocalStore

    if not isinstance(array.store, LocalStore):
        return None
    name = ".zarray" if array.metadata.zarr_format == 2 else "zarr.json"
    return os.path.join(os.path.abspath(array.store.root), array.path, name)


def _group_of_column(array: Any) -> Any:
    """Return the group of an array with the name of the numbers of a nullable column; else None."""
    import zarr

    path = _metadata_path(array)
    folder, name = os.path.split(array.path if path is None else os.path.dirname(path))
    if name != "values":
        return None
    with contextlib.suppress(FileNotFoundError):
        if path is None:
            return zarr.open_group(array.store, mode="r", path=folder)
        return zarr.open_group(folder, mode="r")
    return None
