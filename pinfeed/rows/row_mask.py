"""RowMask: a part of the rows as one bit for each row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.indices import sort_rows
from pinfeed.rows.orders import Arrays, Rows

# Bytes of a chunk of the mask. The rows before each chunk are counted, 8 bytes for each.
_CHUNK = 16
# Rows of a mask that are packed at a time.
_PACKED_ROWS = 1 << 24
# Positions that are found at a time; they need this number of bytes for each byte of a chunk.
_STEP = 1 << 12
# Bits that can be scanned in the time in which the chunk of one row is found.
_SCANNED_BITS = 128

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_N_BITS = _BITS.sum(axis=1, dtype=np.uint8)
# The position of set bit i of each byte.
_BIT_AT = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8)


@dataclass(frozen=True)
class RowMask:
    """A part of the rows, whose rows are numbered in ascending order."""

    n_rows: int
    """Number of all rows."""
    n_selected: int
    """Number of rows of the part."""
    digest: str
    """Checksum of the mask."""
    chunks: npt.NDArray[np.uint8]
    """A bit for each row, shape (n_chunks, 16)."""
    before: Rows
    """Number of selected rows before each chunk, shape (n_chunks,)."""

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> RowMask:
        """Copy a mask of shape (n_rows,), which may be larger than memory.

        Raises:
            ArgumentError: If it selects no rows.
        """
        n_rows = len(mask)
        n_chunks = -(-n_rows // (8 * _CHUNK))
        bits = np.zeros(n_chunks * _CHUNK, np.uint8)
        for begin in range(0, n_rows, _PACKED_ROWS):
            packed = np.packbits(mask[begin : begin + _PACKED_ROWS], bitorder="little")
            bits[begin // 8 : begin // 8 + len(packed)] = packed
        chunks = bits.reshape(n_chunks, _CHUNK)
        step = _PACKED_ROWS // (8 * _CHUNK)
        counts = np.zeros(n_chunks + 1, np.int64)
        for begin in range(0, n_chunks, step):
            found = _N_BITS[chunks[begin : begin + step]].sum(axis=1)
            counts[begin + 1 : begin + 1 + len(found)] = found
        np.cumsum(counts, out=counts)
        if not counts[-1]:
            raise ArgumentError(
                f"where(mask): the mask of {n_rows:,} rows selects no row; expected at least one "
                "element that is True"
            )
        digest = hashlib.blake2b(bits.data, digest_size=16).hexdigest()
        return cls(n_rows, counts.item(-1), digest, chunks, counts[:-1])

    @property
    def arrays(self) -> Arrays:
        """Arrays that represent the part."""
        return self.chunks, self.before

    def at(self, numbers: Rows) -> Rows:
        """Return the row indices of rows of the part."""
        order = None
        if (numbers[1:] < numbers[:-1]).any():
            # Memory is read in ascending order, which takes half the time of random order.
            numbers, order = sort_rows(numbers)
        rows = np.empty(len(numbers), np.int64)
        for begin in range(0, len(numbers), _STEP):
            here = slice(begin, begin + _STEP)
            rows[here if order is None else order[here]] = self._find(numbers[here])
        return rows

    def _find(self, numbers: Rows) -> Rows:
        """Return the row indices of ascending rows of the part."""
        first, last = (self.before.searchsorted(numbers[[0, -1]], side="right") - 1).tolist()
        if 8 * _CHUNK * (last + 1 - first) <= _SCANNED_BITS * len(numbers):
            # The rows of a sequential order, or of blocks, are close together.
            bits = np.unpackbits(self.chunks[first : last + 1], bitorder="little").view(np.bool_)
            close: Rows = bits.nonzero()[0][numbers - self.before[first]]
            close += first * 8 * _CHUNK
            return close
        chunk = self.before.searchsorted(numbers, side="right") - 1
        left = numbers - self.before[chunk]
        found = self.chunks[chunk]
        # Selected rows up to the end of each byte; at most 128.
        ends = np.cumsum(_N_BITS[found], axis=1, dtype=np.uint16)
        byte = (ends <= left[:, None]).sum(axis=1)
        value = np.take_along_axis(found, byte[:, None], axis=1)[:, 0]
        last = np.take_along_axis(ends, byte[:, None], axis=1)[:, 0].astype(np.int64)
        bit = _BIT_AT[value, left - (last - _N_BITS[value])]
        rows: Rows = (chunk * _CHUNK + byte) * 8 + bit
        return rows
