"""Chunks of arrays as they are in files, which the threads that need them decode.

The HDF5 library makes one call at a time, and a call that reads rows also decompresses them. zarr
reads a chunk with several tasks of one event loop, which takes up to ten times as long as to read
and decompress it.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.errors import PinfeedError
from pinfeed.stores.paths import require_regular
from pinfeed.stores.store import Array

Box = tuple[slice, ...]
"""Indices [start, stop) along each axis of an array."""

# Memory for the bytes of a chunk grows in steps, because chunks have slightly different sizes.
_SCRATCH_STEP = 64 << 10
# Compressors that are undone here, by their names in numcodecs.
_COMPRESSORS = ("blosc", "gzip", "lz4", "zlib", "zstd")
_NOT_WRITTEN = np.iinfo(np.uint64).max
# Most bytes of all indices of shards that are kept, unless one is larger. An index has 16 bytes for
# each chunk.
_INDEX_BYTES = 1 << 20
# Filters of HDF5 that are undone here, in the order in which they were applied.
_DEFLATE = 1
_SHUFFLE = 2
_FILTERS = ((), (_DEFLATE,), (_SHUFFLE, _DEFLATE))


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


class HDF5Chunks:
    """Chunks as they are in the file, of a dataset with no filters but gzip and shuffle.

    The library reads only the compressed bytes.

    Args:
        dataset: A dataset that ``can_read`` accepts, with the same type in the file and in memory.
    """

    def __init__(self, dataset: Any) -> None:
        self.grid = ChunkGrid(dataset.shape, dataset.chunks, dataset.dtype)
        self._filters = _filters_of(dataset)

    @staticmethod
    def can_read(dataset: Any) -> bool:
        """Return whether the dataset has chunks, and only known filters."""
        return dataset.chunks is not None and _filters_of(dataset) in _FILTERS

    def decode(self, raw: bytes, place: Array) -> bool:
        """Decode a chunk as it is in the file to its place; return False if it is damaged."""
        decoded: Any = raw
        try:
            if _DEFLATE in self._filters:
                decoded = zlib.decompress(raw, bufsize=self.grid.chunk_nbytes)
            if _SHUFFLE in self._filters:
                # The chunk begins with the first bytes of all items, followed by the second bytes,
                # and so on.
                values = np.frombuffer(decoded, np.uint8).reshape(self.grid.dtype.itemsize, -1)
                decoded = np.ascontiguousarray(values.T)
            self.grid.put(decoded, place)
        except (zlib.error, ValueError):
            return False
        return True


def _filters_of(dataset: Any) -> tuple[int, ...]:
    properties = dataset.id.get_create_plist()
    return tuple(properties.get_filter(i)[0] for i in range(properties.get_nfilters()))


class ChunkCodecs(NamedTuple):
    """Codecs of the chunks of an array."""

    compressor: str | None
    """Name of the compressor in numcodecs; None if chunks are not compressed."""
    is_checked: bool = False
    """Whether the indices of shards have checksums."""


class ZarrChunks:
    """Chunks of a Zarr array as they are in their files.

    Args:
        array: The array, in a local directory, in the byte order of this machine.
        codecs: Codecs of its chunks.
    """

    def __init__(self, array: Any, codecs: ChunkCodecs) -> None:
        self.grid = ChunkGrid(array.shape, array.chunks, np.dtype(array.dtype))
        self._shards: tuple[int, ...] | None = array.shards
        self._codecs = codecs
        self._fill_value = array.metadata.fill_value
        self._folder = os.path.join(os.path.abspath(array.store.root), array.path)
        self._key = array.metadata.encode_chunk_key
        self._indices: dict[tuple[int, ...], npt.NDArray[np.uint64] | None] = {}
        # Memory that no thread uses now.
        self._spare: list[_Scratch] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indices": {}, "_spare": []}

    @classmethod
    def of(cls, array: Any) -> ZarrChunks | None:
        """Return the chunks of an array; None if only zarr can read them."""
        from zarr.storage import LocalStore

        metadata = array.metadata.to_dict()
        codecs = _codecs_of_2(metadata) if metadata["zarr_format"] == 2 else _codecs_of_3(metadata)
        # A subclass of the store may change bytes.
        is_plain = type(array.store) is LocalStore and np.dtype(array.dtype).isnative
        if codecs is None or not is_plain or metadata["fill_value"] is None:
            return None
        return cls(array, codecs)

    def read(self, box: Box, out: Array) -> bool:
        """Decode a box of whole chunks into ``out``.

        Returns:
            True, or False if a chunk is damaged, which zarr can explain.

        Raises:
            StoreError: If a chunk is a pipe, a socket or a device.
        """
        try:
            scratch = self._spare.pop()
        except IndexError:
            scratch = _Scratch()
        try:
            for origin in self.grid.origins(box):
                self._read_chunk(origin, self.grid.place(origin, box, out), scratch)
        except PinfeedError:
            raise
        except Exception:
            # Each compressor has errors of its own.
            return False
        finally:
            self._spare.append(scratch)
        return True

    def close(self) -> None:
        """Free the memory for the bytes of chunks."""
        self._spare.clear()

    def _read_chunk(self, origin: tuple[int, ...], place: Array, scratch: _Scratch) -> None:
        chunk = _divide(origin, self.grid.chunks)
        if self._shards:
            raw = self._read_in_shard(chunk, origin, scratch)
        else:
            raw = scratch.read(self._path(chunk))
        if raw is None:
            place[...] = self._fill_value
            return
        name = self._codecs.compressor
        if name is None:
            self.grid.put(raw, place)
            return
        import numcodecs

        # The parameters of a compressor are in its result.
        codec = numcodecs.get_codec({"id": name})
        self.grid.put(codec.decode(raw), place)

    def _read_in_shard(
        self, chunk: tuple[int, ...], origin: tuple[int, ...], scratch: _Scratch
    ) -> memoryview | None:
        """Return a chunk as it is in its shard; None if it was never written."""
        assert self._shards is not None
        shard = _divide(origin, self._shards)
        try:
            index = self._indices[shard]
        except KeyError:
            index = self._read_index(shard, scratch)
            # Another thread may also clear them.
            if (len(self._indices) + 1) * self._index_nbytes > _INDEX_BYTES:
                self._indices.clear()
            self._indices[shard] = index
        if index is None:
            return None
        within = tuple(n % size for n, size in zip(chunk, index.shape, strict=False))
        offset, nbytes = index[within].tolist()
        return None if offset == _NOT_WRITTEN else scratch.read(self._path(shard), offset, nbytes)

    @property
    def _index_shape(self) -> tuple[int, ...]:
        assert self._shards is not None
        return (*_divide(self._shards, self.grid.chunks), 2)

    @property
    def _index_nbytes(self) -> int:
        return 8 * math.prod(self._index_shape)

    def _read_index(
        self, shard: tuple[int, ...], scratch: _Scratch
    ) -> npt.NDArray[np.uint64] | None:
        """Return the offset and the size of each chunk of a shard, shape (..., 2).

        Returns None if the shard was never written.
        """
        nbytes = self._index_nbytes
        raw = scratch.read(self._path(shard), -nbytes - 4 * self._codecs.is_checked)
        if raw is None:
            return None
        index = bytes(raw[:nbytes])
        if self._codecs.is_checked:
            import google_crc32c

            if google_crc32c.value(index) != int.from_bytes(raw[nbytes:], "little"):
                raise ValueError("the index of the shard is damaged")
        return np.frombuffer(index, "<u8").reshape(self._index_shape)

    def _path(self, numbers: tuple[int, ...]) -> str:
        """Return the path of a chunk or of a shard."""
        key: str = self._key(numbers)
        return os.path.join(self._folder, key)


def _codecs_of_2(metadata: Mapping[str, Any]) -> ChunkCodecs | None:
    """Return the codecs of an array of format 2; None if some are unknown."""
    if metadata["order"] != "C" or metadata["filters"]:
        return None
    compressor = metadata["compressor"]
    name = compressor and compressor["id"]
    return ChunkCodecs(name) if name is None or name in _COMPRESSORS else None


def _codecs_of_3(metadata: Mapping[str, Any]) -> ChunkCodecs | None:
    """Return the codecs of an array of format 3; None if some are unknown."""
    codecs: Sequence[Mapping[str, Any]] = metadata["codecs"]
    is_checked = False
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        of_index = sharding["index_codecs"]
        is_checked = [codec["name"] for codec in of_index[1:]] == ["crc32c"]
        is_usual = _is_plain(of_index[0]) and len(of_index) == 1 + is_checked
        if len(codecs) > 1 or not is_usual or sharding["index_location"] != "end":
            return None
        codecs = sharding["codecs"]
    names = [codec["name"] for codec in codecs[1:]]
    if not _is_plain(codecs[0]) or len(names) > 1 or not {*names} <= {*_COMPRESSORS}:
        return None
    return ChunkCodecs(names[0] if names else None, is_checked)


def _is_plain(codec: Mapping[str, Any]) -> bool:
    """Return whether a codec stores items in C order and in the order of their bytes."""
    endian = codec.get("configuration", {}).get("endian", "little")
    return codec["name"] == "bytes" and bool(endian == "little")


def _divide(numbers: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(number // size for number, size in zip(numbers, sizes, strict=True))


class _Scratch:
    """Memory for the bytes of a chunk. New memory for each chunk would cost as much as the read."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """Return bytes of a file, until the next call; None if there is no file.

        Args:
            path: Path of the file.
            offset: Offset from the begin of the file, or a negative one from its end.
            nbytes: Number of bytes; by default, all that follow.

        Raises:
            ValueError: If the file is too short.
            StoreError: If it is a pipe, a socket or a device.
        """
        try:
            # Without the flag, the call would wait for the writer of a pipe.
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            size = require_regular(path, file).st_size
            begin = offset + size * (offset < 0)
            if nbytes is None:
                nbytes = size - begin
            # A damaged index may state any size.
            if not 0 <= begin <= begin + nbytes <= size:
                raise ValueError(f"{path} is too short")
            if len(self._memory) < nbytes:
                self._memory = bytearray(-(-nbytes // _SCRATCH_STEP) * _SCRATCH_STEP)
            raw = memoryview(self._memory)[:nbytes]
            if os.preadv(file, [raw], begin) != nbytes:
                raise ValueError(f"{path} cannot be read in one piece")
            return raw
        finally:
            os.close(file)
