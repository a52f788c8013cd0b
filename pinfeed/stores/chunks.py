"""Chunks of a file: row indices divided by chunk, and the decoded chunks that are kept."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pinfeed.errors import ReadError
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, run_of
from pinfeed.threads.call import Call


class ChunkPiece(NamedTuple):
    """Rows of one chunk, or several whole chunks in a row."""

    number: int | None
    """Number of the chunk; None for whole chunks at consecutive positions."""
    start: int
    """First row of the chunk, or of the first chunk."""
    stop: int
    rows: Rows
    positions: Rows

    def is_followed_by(self, other: ChunkPiece, most_rows: int) -> bool:
        """Return whether both are whole chunks that can be decoded in one call."""
        place = int(self.positions[0]) + self.stop - self.start
        return (
            self.number is None
            and other.number is None
            and other.start == self.stop
            and int(other.positions[0]) == place
            and other.stop - self.start <= most_rows
        )


def chunk_pieces(rows: Rows, positions: Rows, bounds: Rows, most_rows: int) -> Iterator[ChunkPiece]:
    """Divide rows by chunk; join consecutive chunks if all of their rows are wanted in order.

    Args:
        rows: Row indices, shape (m,).
        positions: Position of each in the batch, shape (m,).
        bounds: First row of each chunk, followed by the number of rows.
        most_rows: Most rows of chunks that are joined.
    """
    if len(rows) > 1 and (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        positions = positions[order]
    run: ChunkPiece | None = None
    for piece in _by_chunk(rows, positions, bounds):
        if run is not None and run.is_followed_by(piece, most_rows):
            run = run._replace(stop=piece.stop)
            continue
        if run is not None:
            yield run
        run = piece
    if run is not None:
        yield run


def _by_chunk(rows: Rows, positions: Rows, bounds: Rows) -> Iterator[ChunkPiece]:
    """Divide ascending rows by chunk."""
    chunk_of = np.searchsorted(bounds, rows, side="right") - 1
    begins = np.flatnonzero(np.diff(chunk_of, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*begins, len(rows)]):
        number = int(chunk_of[begin])
        start = int(bounds[number])
        stop = int(bounds[number + 1])
        wanted = rows[begin:end]
        places = positions[begin:end]
        is_whole = (
            end - begin == stop - start
            and run_of(wanted) is not None
            and run_of(places) is not None
        )
        yield ChunkPiece(None if is_whole else number, start, stop, wanted, places)


class KeptChunks:
    """The most recently used chunks, decoded once even if several threads need them.

    Args:
        capacity: Most chunks in memory, including those that are being decoded.
        decode: Returns the rows of a chunk. Its arguments are the number of the chunk, and an array
            to reuse that it returned for a chunk that is no longer kept, or None.
    """

    def __init__(self, capacity: int, decode: Callable[[int, Array | None], Array]) -> None:
        self._capacity = capacity
        self._decode = decode
        # Notified when a chunk is no longer in use.
        self._unused = threading.Condition()
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        # Without these, the heap would keep some of the freed memory.
        self._spare: list[Array] = []
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[Array]:
        """Lend a chunk, which is decoded if it is not kept; it is kept until the context ends.

        A thread uses one chunk at a time, because it may wait until other threads release one.
        """
        with self._unused:
            self._unused.wait_for(lambda: number in self._chunks or self._make_room())
            is_new = number not in self._chunks
            if is_new:
                spare = self._spare.pop() if self._spare else None
                self._chunks[number] = _Chunk(Call(self._decode, number, spare))
            chunk = self._chunks[number]
            self._chunks.move_to_end(number)
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
                if is_dropped and self._chunks.get(number) is chunk:
                    # If the decoding failed, the next gather of this chunk tries again.
                    del self._chunks[number]
                self._unused.notify_all()

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


class _Chunk:
    """A chunk that is decoded, or is being decoded."""

    def __init__(self, decoding: Call[Array]) -> None:
        self.decoding = decoding
        self.n_users = 0
