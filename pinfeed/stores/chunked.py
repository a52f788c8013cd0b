"""ChunkedStore: rows of files that store them in chunks, which are decoded as a whole."""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pinfeed.errors import (
    ClosedError,
    CopyError,
    PinfeedError,
    ReadError,
    StoreError,
    WriteBackError,
    described,
)
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import copy_runs
from pinfeed.stores.base import Array, checked_gather
from pinfeed.stores.chunk_pieces import chunk_pieces
from pinfeed.stores.kept_chunks import KeptChunks
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.validation.safe_repr import safe_repr

if TYPE_CHECKING:
    from typing_extensions import Self

# Decoded chunks to keep, so that batches that share a chunk decode it once. Two chunks are needed
# to decode one while the rows of another are gathered.
_MAX_KEPT = 8
_KEPT_BYTES = 32 << 20
MAX_DECODES = 4
"""Most threads that decode at the same time."""
_DECODED_BYTES = 16 << 20
# Consecutive chunks are decoded in one call, up to this size.
_RUN_BYTES = 2 << 20


@dataclass(frozen=True)
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkLayout):
            return NotImplemented
        same_rows = (self.dtype, self.row_shape) == (other.dtype, other.row_shape)
        return same_rows and np.array_equal(self.bounds, other.bounds)

    __hash__ = None  # type: ignore[assignment]  # the bounds are an array


class ChunkedStore:
    """Read-only rows in chunks. Any thread may gather.

    A gather decodes each chunk that it needs once. The store keeps the most recently decoded
    chunks, so that batches with rows of the same chunk decode it only once. A chunk that a batch
    needs as a whole is decoded straight into the batch, and is not kept. A store that was opened by
    path can be pickled, and opens its file again in another process.

    It is one class because gathers, chunks and the state of a process are closed together.

    Args:
        layout: Rows and chunks.

    Raises:
        StoreError: If there are no rows, or torch does not have the dtype.
    """

    writable = False
    # Attributes that belong to one process, and are not pickled.
    _PROCESS_STATE: ClassVar[tuple[str, ...]] = ("_kept", "_decodes")
    _decoding_chunks = 2
    """Memory that decoding needs in addition to the result, in multiples of the decoded bytes."""
    _max_decodes = MAX_DECODES
    """Most runs of chunks that are decoded at the same time."""

    native: LocalFileStore | None = None
    """Store that reads the same rows without the library, if they are stored as plain bytes."""

    def __init__(self, layout: ChunkLayout) -> None:
        if len(layout.bounds) < 2 or layout.bounds[-1] < 1:
            raise StoreError(f"{layout.label} has no rows; expected at least one")
        self._layout = layout
        self._dtype = check_dtype(layout.dtype, layout.label)
        self._closed = False
        self._init_process_state()

    def _init_process_state(self) -> None:
        """Create the state that belongs to one process; a forked process creates its own."""
        self._kept = KeptChunks(self.n_kept, self._decode)
        # Each decode needs memory in addition to its result, and the plan counts this many decodes.
        self._decodes = threading.BoundedSemaphore(self._n_decodes)
        _stores.add(self)

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_reopened:
            raise CopyError(
                f"{self!r} reads an object that the caller opened, and cannot be pickled; give "
                f"{type(self).__name__} the path, which each process opens itself"
            )
        return {
            name: value for name, value in vars(self).items() if name not in self._PROCESS_STATE
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._init_process_state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @safe_repr
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label})"

    @property
    def label(self) -> str:
        """Short name of the file and of the dataset or column."""
        return self._layout.label

    @property
    def paths(self) -> list[str]:
        """Paths of the files, in the order of their rows; empty if they are unknown."""
        return list(self._layout.paths)

    @property
    def n_rows(self) -> int:
        return int(self._layout.bounds[-1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._layout.row_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self._dtype.itemsize * math.prod(self.row_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_nbytes

    @property
    def bounds(self) -> Rows:
        """First row of each chunk, followed by the number of rows."""
        return self._layout.bounds

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of the largest chunk."""
        return int(np.diff(self._layout.bounds).max())

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the largest chunk, decoded."""
        return self.chunk_rows * self.row_nbytes

    @property
    def resident_bytes(self) -> int:
        """Memory for the kept chunks and for decoding, in bytes."""
        if self.native is not None:
            return self.native.resident_bytes
        run = max(self.chunk_nbytes, min(_RUN_BYTES, self.nbytes))
        return self.n_kept * self.chunk_nbytes + self._n_decodes * self._decoding_chunks * run

    @property
    def n_kept(self) -> int:
        """Number of decoded chunks that are kept."""
        n = _KEPT_BYTES // max(1, self.chunk_nbytes)
        return min(max(2, n), _MAX_KEPT, len(self.bounds) - 1)

    @property
    def _n_decodes(self) -> int:
        """Number of runs of chunks that are decoded at the same time."""
        n = _DECODED_BYTES // max(_RUN_BYTES, self.chunk_nbytes)
        return min(max(1, n), self._max_decodes)

    @property
    def version(self) -> object:
        """Always the same value: the rows must not change while the store is open."""
        return 0 if self.native is None else self.native.version

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``.

        Raises:
            ReadError: If a chunk cannot be read or decoded.
            ClosedError: If the store, or the file that it reads, is closed.
        """
        rows = checked_gather(self, rows, out)
        self.gather_at(rows, out, np.arange(len(rows)))

    def gather_at(self, rows: Rows, out: Array, positions: Rows) -> None:
        """Copy rows into ``out[positions]``. The caller has checked all arguments.

        Args:
            rows: Row indices, shape (m,).
            out: C-contiguous, shape (n, *row_shape), of the store's dtype.
            positions: Positions in ``out``, shape (m,).

        Raises:
            ReadError: As for ``gather``.
            ClosedError: As for ``gather``.
        """
        self._require_open()
        if self.native is not None:
            self.native.gather_at(rows, out, positions)
            return
        most_rows = max(1, _RUN_BYTES // max(1, self.row_nbytes))
        for piece in chunk_pieces(rows, positions, self.bounds, most_rows):
            if piece.number is None:
                n = piece.stop - piece.start
                place = int(piece.positions[0])
                self._read(piece.start, piece.stop, out[place : place + n])
            else:
                with self._kept.use(piece.number) as chunk:
                    out[piece.positions] = chunk[piece.rows - piece.start]

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        Raises:
            ReadError: As for ``gather``.
            ClosedError: As for ``gather``.
        """
        self._require_open()
        if self.native is not None:
            self.native.gather_runs(runs, out)
            return
        for number, part in runs.by_part(self.bounds[1:]):
            with self._kept.use(number) as chunk:
                copy_runs(chunk, part, out)

    def decode_ahead(self, number: int) -> None:
        """Decode and keep a chunk whose rows will be gathered soon."""
        if self.native is None and not self._closed:
            with self._kept.use(number):
                pass

    def scatter(self, rows: Rows, values: Array) -> None:
        """Refuse to write: the store is read-only.

        Raises:
            WriteBackError: Always.
        """
        raise WriteBackError(f"{self!r} is read-only")

    def flush(self) -> None:
        """Do nothing, because nothing was written."""

    def close(self) -> None:
        """Free the chunks, and close the files that the store opened. Further calls do nothing."""
        self._closed = True
        self._kept.close()
        if self.native is not None:
            self.native.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed; open it again")

    @property
    def _is_reopened(self) -> bool:
        """Whether the store was opened by path, so that another process can open it."""
        raise NotImplementedError

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        """Decode the rows [start, stop), which are whole chunks, into ``out``."""
        raise NotImplementedError

    def _read(self, start: int, stop: int, out: Array) -> None:
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

    def _decode(self, number: int, spare: Array | None) -> Array:
        """Return an array that begins with the rows of a chunk, and has room for any chunk."""
        start = int(self.bounds[number])
        stop = int(self.bounds[number + 1])
        chunk = spare
        if chunk is None:
            chunk = np.empty((self.chunk_rows, *self.row_shape), self._dtype)
        self._read(start, stop, chunk[: stop - start])
        return chunk


_stores: weakref.WeakSet[ChunkedStore] = weakref.WeakSet()


def _renew() -> None:
    """Renew the process state of all stores in a forked process.

    A thread that decodes a chunk, or holds a lock, does not exist in the forked process.
    """
    for store in list(_stores):
        store._init_process_state()


os.register_at_fork(after_in_child=_renew)


def even_bounds(n_rows: int, chunk_rows: int) -> Rows:
    """Return the first row of each chunk of ``chunk_rows`` rows, followed by ``n_rows``."""
    return np.append(np.arange(0, n_rows, max(1, chunk_rows)), n_rows)
