"""ChunkedStore: rows of files that store them in chunks, which are decoded as a whole."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pinfeed.errors import PinfeedError, ReadError, StoreError, described
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import copy_runs
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.store import Array, Store
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.threads.call import Call

# Decoded chunks to keep, so that batches that share a chunk decode it once. Two chunks are needed
# to decode one while the rows of another are gathered.
_MAX_KEPT = 8
_KEPT_BYTES = 32 << 20
MAX_DECODES = 4
"""Most threads that decode at the same time."""
DECODED_BYTES = 16 << 20
"""Size of all chunks that are decoded at the same time, unless a chunk is larger."""
# Consecutive chunks are decoded in one call, up to this size.
_RUN_BYTES = 2 << 20


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Shape and dtype of rows, and the rows at which their chunks begin."""

    label: str
    """Short name of the file and of the dataset or column."""
    dtype: np.dtype[Any]
    """Dtype as in the file, which may have the other byte order."""
    row_shape: tuple[int, ...]
    bounds: Rows
    """First row of each chunk, followed by the number of rows; ascending."""
    paths: tuple[str, ...] = ()
    """Paths of the files; empty if the caller opened the file and its path is unknown."""

    @classmethod
    def even(
        cls,
        label: str,
        dtype: np.dtype[Any],
        shape: Sequence[int] | None,
        chunk_rows: int,
        paths: tuple[str, ...],
    ) -> ChunkLayout:
        """Return the layout of an array in chunks of equally many rows.

        Raises:
            StoreError: If the array has no axis of rows.
        """
        if not shape:
            raise StoreError(
                f"{label} has shape {shape}, which has no rows; expected (n_rows, ...)"
            )
        n_rows, *row_shape = shape
        return cls(label, dtype, tuple(row_shape), even_bounds(n_rows, chunk_rows), paths)

    def has_rows_of(self, other: ChunkLayout) -> bool:
        """Return whether rows and chunks have the same shape and dtype."""
        same_rows = (self.dtype, self.row_shape) == (other.dtype, other.row_shape)
        return same_rows and np.array_equal(self.bounds, other.bounds)


class ChunkedStore(FileStore):
    """Read-only rows in chunks.

    A gather decodes each chunk that it needs once. The store keeps the most recently decoded
    chunks, so that batches with rows of the same chunk decode it only once. A chunk that a batch
    needs as a whole is decoded straight into the batch, and is not kept.

    Args:
        layout: Rows and chunks.

    Raises:
        StoreError: If there are no rows, or torch does not have the dtype.
    """

    loaded = "decoded"
    reads_in_bulk = True

    _PROCESS_STATE: ClassVar[tuple[str, ...]] = ("_kept", "_decodes")
    _decoding_chunks = 2
    """Memory that decoding needs in addition to the result, in multiples of the decoded bytes."""
    _max_decodes = MAX_DECODES
    """Most runs of chunks that are decoded at the same time."""
    _run_bytes = _RUN_BYTES
    """Consecutive chunks are decoded in one call, up to this size."""

    native: LocalFileStore | None = None
    """Store that reads the same rows without the library, if they are stored as plain bytes."""

    def __init__(self, layout: ChunkLayout) -> None:
        if len(layout.bounds) < 2 or layout.bounds[-1] < 1:
            raise StoreError(f"{layout.label} has no rows; expected at least one")
        self.bounds = layout.bounds
        """First row of each chunk, followed by the number of rows."""
        shape = (int(layout.bounds[-1]), *layout.row_shape)
        super().__init__(layout.label, layout.paths, shape, check_dtype(layout.dtype, layout.label))
        self.nbytes = self.n_rows * self.row_nbytes

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._kept = KeptChunks(self.n_kept, self._decode)
        # Each decode needs memory in addition to its result, and the plan counts this many decodes.
        self._decodes = threading.BoundedSemaphore(self._n_decodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label})"

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of the largest chunk."""
        return int(np.diff(self.bounds).max())

    @property
    def piece_rows(self) -> int:
        """Rows of the parts of a chunk that can be decoded alone; by default, of a whole chunk."""
        return self.chunk_rows

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the largest chunk, decoded."""
        return self.chunk_rows * self.row_nbytes

    @property
    def resident_bytes(self) -> int:
        """Memory for the kept chunks and for decoding, in bytes."""
        if self.native is not None:
            return self.native.resident_bytes
        return self.n_kept * self.chunk_nbytes + self._n_decodes * self._decoding_nbytes

    @property
    def load_bounds(self) -> Rows:
        """First row of each part that is best decoded by one thread, followed by the last bound."""
        return self.bounds

    @property
    def _decoding_nbytes(self) -> int:
        """Memory that one thread needs to decode, in addition to the result, in bytes."""
        return self._decoding_chunks * self._step_nbytes

    @property
    def _step_nbytes(self) -> int:
        """Decoded bytes of what one thread decodes at a time."""
        return max(self.chunk_nbytes, min(_RUN_BYTES, self.nbytes))

    @property
    def n_kept(self) -> int:
        """Number of decoded chunks that are kept."""
        n = _KEPT_BYTES // max(1, self.chunk_nbytes)
        return min(max(2, n), _MAX_KEPT, len(self.bounds) - 1)

    @property
    def _n_decodes(self) -> int:
        """Number of runs of chunks that are decoded at the same time."""
        n = DECODED_BYTES // max(_RUN_BYTES, self.chunk_nbytes)
        return min(max(1, n), self._max_decodes)

    @property
    def version(self) -> object:
        """Always the same value: the rows must not change while the store is open."""
        return 0 if self.native is None else self.native.version

    def gather_runs(self, runs: Runs, out: Array) -> None:
        self._require_open()
        if self.native is not None:
            self.native.gather_runs(runs, out)
            return
        # Whole chunks, as the first row, the row after the last one, and the position in ``out``.
        # Those that follow each other are decoded in one call.
        whole: list[tuple[int, int, int]] = []
        for number, part in runs.by_part(self.bounds[1:]):
            start = self.bounds.item(number)
            stop = self.bounds.item(number + 1)
            # Only a part that begins with the first row of the chunk can be the whole chunk.
            if not part.starts.item(0):
                part = part.merged()
            if len(part.lengths) > 1 or part.lengths.item(0) < stop - start:
                self._gather_part(start, stop, part, out)
                continue
            place = part.places.item(0)
            if whole:
                first, end, target = whole[-1]
                follows = (start, place) == (end, target + end - first)
                if follows and (stop - first) * self.row_nbytes <= self._run_bytes:
                    whole[-1] = (first, stop, target)
                    continue
            whole.append((start, stop, place))
        for start, stop, place in whole:
            self.read_chunks(start, stop, out[place : place + stop - start])

    def _gather_part(self, start: int, stop: int, part: Runs, out: Array) -> None:
        """Copy some rows of the chunk [start, stop); decode only their pieces if these are few."""
        size = self.piece_rows
        if (
            2 * size >= stop - start
            or (start, stop) in self._kept
            or 2 * size * (-(-part.lengths // size)).sum() >= stop - start
        ):
            with self._kept.use(start, stop) as chunk:
                copy_runs(chunk, part, out)
            return
        bounds = np.append(np.arange(start, stop, size), stop)
        if len(part.lengths) == 1:
            # Pieces that follow each other are decoded in one call.
            first = part.starts.item(0)
            bounds = bounds[[0, first // size, -(-(first + part.lengths.item(0)) // size)]]
        for number, wanted in part.by_part(bounds[1:] - start):
            with self._kept.use(bounds.item(number), bounds.item(number + 1)) as piece:
                copy_runs(piece, wanted, out)

    def decode_ahead(self, number: int) -> None:
        """Decode and keep a chunk whose rows will be gathered soon."""
        if self.native is None and not self._closed:
            with self._kept.use(self.bounds.item(number), self.bounds.item(number + 1)):
                pass

    def close(self) -> None:
        """Free the chunks, and close the files that the store opened. Further calls do nothing."""
        super().close()
        self._kept.close()
        if self.native is not None:
            self.native.close()

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        """Decode the rows [start, stop), which are whole chunks, into ``out``."""
        raise NotImplementedError

    def read_chunks(self, start: int, stop: int, out: Array) -> None:
        """Decode whole chunks into ``out``; say which rows could not be read."""
        try:
            with self._decodes:
                self._read_chunks(start, stop, out)
        except PinfeedError:
            raise
        except Exception as error:
            place = self.paths[0] if len(self.paths) == 1 else "the file"
            raise ReadError(
                f"{self!r}: rows [{start}, {stop}) cannot be read ({described(error)}); check "
                f"{place} with the library that wrote it"
            ) from error

    def _decode(self, rows: tuple[int, int], spare: Array | None) -> Array:
        """Return an array that begins with the rows of a chunk, and has room for any chunk."""
        start, stop = rows
        chunk = spare
        if chunk is None:
            chunk = np.empty((self.chunk_rows, *self.row_shape), self.dtype)
        self.read_chunks(start, stop, chunk[: stop - start])
        return chunk


class ChunkedView(ChunkedStore):
    """Rows of other stores, whose chunks these stores decode.

    Args:
        layout: Rows and chunks.
        parts: The stores, at least one; they must stay open.
        owned: The parts that this store closes.
    """

    def __init__(
        self, layout: ChunkLayout, parts: Sequence[ChunkedStore], owned: Sequence[Store] = ()
    ) -> None:
        self.parts = tuple(parts)
        self._owned = tuple(owned)
        self._decoding_chunks = max(part._decoding_chunks for part in parts)
        self._max_decodes = min(part._max_decodes for part in parts)
        self._run_bytes = min(self._run_bytes, *(part._run_bytes for part in parts))
        super().__init__(layout)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # No caller has the parts that were unpickled.
        self._owned = self.parts

    @property
    def version(self) -> object:
        versions = [part.version for part in self.parts]
        return versions if any(versions) else 0


class KeptChunks:
    """The most recently used chunks, or pieces, decoded once even if several threads need them.

    Args:
        capacity: Most chunks in memory, including those that are being decoded.
        decode: Returns the rows of a chunk. Its arguments are these rows [start, stop), and an
            array to reuse that it returned for a chunk that is no longer kept, or None.
    """

    def __init__(
        self, capacity: int, decode: Callable[[tuple[int, int], Array | None], Array]
    ) -> None:
        self._capacity = capacity
        self._decode = decode
        # Notified when a chunk is no longer in use.
        self._unused = threading.Condition()
        self._chunks: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()
        # Without these, the heap would keep some of the freed memory.
        self._spare: list[Array] = []
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, start: int, stop: int) -> Iterator[Array]:
        """Lend the rows of a chunk, which is decoded if it is not kept, until the context ends.

        A thread uses one chunk at a time, because it may wait until other threads release one.
        """
        rows = start, stop
        with self._unused:
            if rows not in self._chunks:
                self._unused.wait_for(lambda: rows in self._chunks or self._make_room())
            is_new = rows not in self._chunks
            if is_new:
                spare = self._spare.pop() if self._spare else None
                self._chunks[rows] = _Chunk(Call(self._decode, rows, spare))
            chunk = self._chunks[rows]
            self._chunks.move_to_end(rows)
            chunk.n_users += 1
        try:
            if is_new:
                chunk.decoding.run()
            yield chunk.decoding.result()
        finally:
            if is_new and not chunk.decoding.done():
                # An interrupt arrived before the decoding that other threads wait for.
                chunk.decoding.fail(ReadError("the decoding of a chunk was interrupted; try again"))
            with self._unused:
                chunk.n_users -= 1
                is_dropped = self._is_closed or chunk.decoding.exception() is not None
                if is_dropped and self._chunks.get(rows) is chunk:
                    # If the decoding failed, the next gather of this chunk tries again.
                    del self._chunks[rows]
                self._unused.notify_all()

    def __contains__(self, rows: tuple[int, int]) -> bool:
        """Return whether the chunk of some rows is kept, or is being decoded."""
        return rows in self._chunks

    def close(self) -> None:
        """Free all chunks, and keep none that a running gather still decodes."""
        with self._unused:
            self._is_closed = True
            self._chunks.clear()
            self._spare.clear()
            self._unused.notify_all()

    def _make_room(self) -> bool:
        """Drop the least recently used chunks; return whether there is room for one."""
        for number in [n for n, chunk in self._chunks.items() if not chunk.n_users]:
            if len(self._chunks) < self._capacity:
                break
            self._spare.append(self._chunks.pop(number).decoding.result())
        return len(self._chunks) < self._capacity


@dataclass
class _Chunk:
    """A chunk that is decoded, or is being decoded."""

    decoding: Call[Array]
    n_users: int = 0


def even_bounds(n_rows: int, chunk_rows: int) -> Rows:
    """Return the first row of each chunk of ``chunk_rows`` rows, followed by ``n_rows``."""
    return np.append(np.arange(0, n_rows, max(1, chunk_rows)), n_rows)
