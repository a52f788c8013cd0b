"""ByteRange: a part of a remote file that one request fetches; rows are grouped into ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows
from pinfeed.stores.base import run_of
from pinfeed.stores.formats.row_layout import RowLayout
from pinfeed.stores.remote_file import RemoteFile

Bytes = npt.NDArray[np.uint8]

# Most bytes of one request; a multiple of every itemsize.
RANGE_BYTES = 2 << 20
# Bytes of the answers that are in memory at the same time.
WINDOW_BYTES = 16 << 20
# Requests that run at the same time. The file system needs little memory for each, compared with a
# range.
_MAX_REQUESTS = 512
# Unused bytes between two rows that cost less than one more request.
_GAP_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class ByteRange:
    """Bytes that one request fetches: rows that are close together, or a part of a large row."""

    file: RemoteFile
    begin: int
    end: int
    columns: slice
    """Number of bytes of each row in the range."""
    rows: Rows
    """Rows in ascending order, counted from the first row of the range; they may repeat."""
    positions: Rows
    """Positions of the rows in the batch."""

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.end}"

    def copy(self, values: Bytes, target: Bytes) -> None:
        """Copy the rows of the range to their positions.

        Args:
            values: Bytes of the range.
            target: The batch as bytes, shape (n, row_nbytes).
        """
        width = self.columns.stop - self.columns.start
        values = values.reshape(-1, width)
        # Copied in steps, because repeated rows may have more bytes than the range.
        step = max(1, RANGE_BYTES // width)
        for i in range(0, len(self.rows), step):
            rows = self.rows[i : i + step]
            positions = self.positions[i : i + step]
            target[run_of(positions) or positions, self.columns] = values[run_of(rows) or rows]


def ranges_of(
    file: RemoteFile, layout: RowLayout, rows: Rows, positions: Rows
) -> Iterator[ByteRange]:
    """Cut rows of a file, in any order, into ranges."""
    nbytes = layout.row_nbytes
    if not nbytes or not len(rows):
        return
    if run_of(rows) is None:
        order = np.argsort(rows, kind="stable")
        rows, positions = rows[order], positions[order]
        cuts = _cuts(rows, nbytes)
    else:
        cuts = list(range(0, len(rows), max(1, RANGE_BYTES // nbytes)))
    for lo, hi in itertools.pairwise([*cuts, len(rows)]):
        first, last = int(rows[lo]), int(rows[hi - 1])
        for start in range(0, nbytes, RANGE_BYTES):
            # There is more than one start only if a single row is larger than a range.
            stop = min(start + RANGE_BYTES, nbytes)
            begin = layout.offset + first * nbytes + start
            end = layout.offset + last * nbytes + stop
            yield ByteRange(
                file, begin, end, slice(start, stop), rows[lo:hi] - first, positions[lo:hi]
            )


def _cuts(rows: Rows, nbytes: int) -> list[int]:
    """Return the positions in ascending rows at which ranges begin.

    A range begins after a gap, or where the previous range would become too large.
    """
    is_far = np.diff(rows, prepend=rows[0]) - 1 > _GAP_BYTES // nbytes
    is_far[0] = True
    first_of_group = rows[is_far][np.cumsum(is_far) - 1]
    block = (rows - first_of_group) // max(1, RANGE_BYTES // nbytes)
    cuts: list[int] = np.flatnonzero(is_far | (np.diff(block, prepend=0) != 0)).tolist()
    return cuts


def first_bytes(file: RemoteFile, n: int) -> ByteRange:
    """Return the range of the first bytes of a file, which has no rows."""
    no_rows = np.empty(0, np.int64)
    return ByteRange(file, 0, n, slice(0, 0), no_rows, no_rows)


def windows_of(ranges: Iterator[ByteRange]) -> Iterator[list[ByteRange]]:
    """Group ranges into windows whose answers fit in memory at the same time."""
    window: list[ByteRange] = []
    nbytes = 0
    for wanted in ranges:
        range_nbytes = wanted.end - wanted.begin
        nbytes += range_nbytes
        if nbytes > WINDOW_BYTES or len(window) == _MAX_REQUESTS:
            yield window
            window = []
            nbytes = range_nbytes
        window.append(wanted)
    if window:
        yield window
