"""chunk_pieces(): row indices divided by the chunks in which a file stores the rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pinfeed.rows.orders import Rows
from pinfeed.stores.base import run_of


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
