"""where() and split(): orders of a part of the rows.

A ``Subset`` numbers the selected rows from 0 on, and takes these numbers in any other order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.indices import check_rows, sort_rows
from pinfeed.rows.orders import At, DerivedOrder, KeptArray, KnownOrder, Order, Rows, check_n_rows
from pinfeed.rows.permutation import permutation
from pinfeed.rows.ranks import check_inner
from pinfeed.rows.windows import Interval, Windows, rows_of, usual_run
from pinfeed.validation.arguments import check_seed, real_number, whole_number

Name = TypeVar("Name")

# Bytes of a chunk of the mask. The rows before each chunk are counted, 8 bytes for each.
_CHUNK = 16
# Rows of a mask that are packed at a time.
_PACKED_ROWS = 1 << 24
# Positions that are found at a time; they need this number of bytes for each byte of a chunk.
_STEP = 1 << 12
# Bits that can be scanned in the time in which the chunk of one row is found.
_SCANNED_BITS = 128

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
# The position of set bit i of each byte.
_BIT_AT = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8)


def where(subset: npt.ArrayLike | Order, order: Order | None = None) -> Order:
    """Return an order of a part of the rows.

    The rows of the part are numbered in their sequence, and ``order`` is an order of these numbers.
    Blocks of a ``block_shuffled`` order are consecutive rows of the part.

    A mask is copied as one bit for each row, and 8 bytes for every 128 rows. It may be a memory map
    that is larger than memory. Row indices are copied, 8 bytes each, unless they are a read-only
    array of int64, such as ``np.load(path, mmap_mode="r")``. Binding the order needs no memory.

    Args:
        subset: The rows: a mask, shape (n_rows,), bool; distinct row indices, shape (n,), integers;
            or a part that ``split`` returned.
        order: Order of the rows of the part. None keeps their sequence.

    Raises:
        ArgumentError: If ``subset`` selects no rows, is not one of these, or has a row twice, or if
            ``order`` is not an order.
        RowIndexError: If a row index is negative.

    Examples:
        >>> labels = np.array([0, 1, 1, 0, 1])
        >>> order = pinfeed.rows.where(labels == 1)
        >>> order.bind(n_rows=5, epoch=0)(np.arange(order.length(5)))
        array([1, 2, 4])
        >>> feeder = pinfeed.Feeder(
        ...     labels, batch_size=2, rows=pinfeed.rows.where(labels == 1, pinfeed.rows.shuffled(1))
        ... )
    """
    rows = subset.rows if isinstance(subset, Subset) else subset
    if not isinstance(rows, SplitPart):
        array = np.asarray(subset)
        is_mask = array.dtype == bool and array.ndim == 1
        rows = RowMask.of(array) if is_mask else RowList.of(array)
    return rows if order is None else Subset(rows, check_inner(order))


@overload
def split(
    sizes: Sequence[float], seed: int = ..., *, order: Order | None = ..., block_rows: int = ...
) -> tuple[Order, ...]: ...


@overload
def split(
    sizes: Mapping[Name, float],
    seed: int = ...,
    *,
    order: Order | None = ...,
    block_rows: int = ...,
) -> dict[Name, Order]: ...


def split(
    sizes: Sequence[float] | Mapping[Any, float],
    seed: int = 0,
    *,
    order: Order | None = None,
    block_rows: int = 1,
) -> tuple[Order, ...] | dict[Any, Order]:
    """Split the rows at random into disjoint parts, such as training and validation rows.

    Every row is in exactly one part. The parts are the same in every epoch, on every machine and in
    every version. They are intervals of a random permutation, so they take no memory.

    Args:
        sizes: Sizes of the parts, a sequence or a dict with names: fractions that add up to 1, or
            numbers of rows that add up to the number of rows of the source.
        seed: Seed of the permutation.
        order: Order of the rows within each part. None keeps the sequence of the permutation, the
            same in every epoch. To give parts different orders, use ``where(part, order)``.
        block_rows: Number of consecutive rows that stay together in a part, such as the frames of a
            video or blocks of a file that are read together. With more than 1, sizes are rounded to
            whole blocks, and a last incomplete block is in the last part.

    Returns:
        An order of each part, as a tuple or, for a dict, as a dict with the same names.

    Raises:
        ArgumentError: If an argument is invalid, or sizes do not add up.

    Examples:
        >>> train, valid = pinfeed.rows.split([0.9, 0.1], seed=0)
        >>> train.length(1000), valid.length(1000)
        (900, 100)
        >>> shuffled = pinfeed.rows.where(train, pinfeed.rows.shuffled(seed=1))
        >>> feeder = pinfeed.Feeder(np.arange(1000), batch_size=100, rows=shuffled)
    """
    values = list(sizes.values()) if isinstance(sizes, Mapping) else sizes
    checked = _check_sizes(values, sizes)
    seed = check_seed(seed)
    block = whole_number(block_rows, "block_rows")
    parts = tuple(where(SplitPart(checked, i, seed, block), order) for i in range(len(checked)))
    return dict(zip(sizes, parts, strict=True)) if isinstance(sizes, Mapping) else parts


def _check_sizes(values: Any, given: Any) -> tuple[int | float, ...]:
    """Return numbers of rows, or fractions that add up to 1."""
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise ArgumentError(f"sizes={given!r}: expected fractions or numbers of rows, one per part")
    numbers = [real_number(value, "sizes", least=0) for value in values]
    if not numbers or min(numbers) <= 0:
        raise ArgumentError(f"sizes={given!r}: expected at least one part, and sizes above 0")
    if all(hasattr(value, "__index__") for value in values):
        return tuple(map(int, values))
    if abs(sum(numbers) - 1) > 1e-9:
        raise ArgumentError(
            f"sizes={given!r} add up to {sum(numbers):g}; expected fractions that add up to 1, or "
            "whole numbers of rows"
        )
    return tuple(numbers)


@dataclass(frozen=True)
class Subset(DerivedOrder):
    """Rows that an order selects and numbers, in the sequence of an order of their numbers."""

    rows: KnownOrder
    order: KnownOrder

    def length(self, n_rows: int) -> int:
        return self.order.length(self.rows.length(n_rows))

    def bind(self, n_rows: int, epoch: int) -> At:
        numbers_at = self.order.bind(self.rows.length(n_rows), epoch)
        select = self.rows.bind(n_rows, epoch)
        return lambda positions: select(numbers_at(positions))

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        found = self.order.windows(self.rows.length(n_rows), epoch)
        if found is None:
            return None
        select = self.rows.bind(n_rows, epoch)
        made = found.with_runs(lambda runs: _runs_of(np.sort(select(rows_of(runs)))))
        return replace(made, block_rows=usual_run(made))


@dataclass(frozen=True)
class RowList(KnownOrder):
    """Distinct rows in any sequence."""

    indices: KeptArray
    largest: int

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> RowList:
        """Return the rows with given indices.

        Raises:
            ArgumentError: If they are not integers, or a row occurs twice.
            RowIndexError: If a row index is negative.
        """
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise ArgumentError(
                f"where(subset): got shape {array.shape} of {array.dtype}; expected a mask of "
                "shape (n_rows,), or distinct row indices of shape (n,), with at least one row"
            )
        rows = check_rows(array, 1 << 62, "where(subset)", copy=array.flags.writeable)
        ascending = rows if bool((rows[1:] > rows[:-1]).all()) else np.sort(rows)
        same = np.flatnonzero(ascending[1:] == ascending[:-1])
        if len(same):
            raise ArgumentError(
                f"where(subset): row {ascending[same[0]]} occurs twice; expected distinct rows; "
                "give np.unique(subset), or give the indices themselves as rows="
            )
        return cls(KeptArray.of(rows), ascending.item(-1))

    def length(self, n_rows: int) -> int:
        if self.largest >= n_rows:
            raise ArgumentError(
                f"where(indices) has row {self.largest:,}, but is used for {n_rows:,} rows; "
                "expected row indices below this number"
            )
        return self.indices.n

    def bind(self, n_rows: int, epoch: int) -> At:
        self.length(n_rows)
        return self.indices.values.__getitem__


@dataclass(frozen=True)
class RowMask(KnownOrder):
    """Rows that a mask selects, as one bit for each row; they are numbered in ascending order."""

    n_rows: int
    """Number of all rows."""
    n_selected: int
    """Number of rows of the part."""
    chunks: KeptArray
    """A bit for each row, shape (n_chunks, 16)."""
    before: KeptArray
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
        counts = np.zeros(n_chunks + 1, np.int64)
        counts[1:] = np.bitwise_count(chunks.view(np.uint64)).sum(axis=1)
        np.cumsum(counts, out=counts)
        if not counts[-1]:
            raise ArgumentError(
                f"where(mask): the mask of {n_rows:,} rows selects no row; expected at least one "
                "element that is True"
            )
        return cls(n_rows, counts.item(-1), KeptArray.of(chunks), KeptArray.of(counts[:-1]))

    def length(self, n_rows: int) -> int:
        text = "where(mask) has a mask of"
        check_n_rows(n_rows, self.n_rows, text, "one element for each row")
        return self.n_selected

    def bind(self, n_rows: int, epoch: int) -> At:
        self.length(n_rows)
        return self._rows_at

    def _rows_at(self, numbers: Rows) -> Rows:
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
        chunks = self.chunks.values
        before = self.before.values
        first, last = (before.searchsorted(numbers[[0, -1]], side="right") - 1).tolist()
        if 8 * _CHUNK * (last + 1 - first) <= _SCANNED_BITS * len(numbers):
            # The rows of a sequential order, or of blocks, are close together.
            bits = np.unpackbits(chunks[first : last + 1], bitorder="little").view(np.bool_)
            close: Rows = bits.nonzero()[0][numbers - before[first]]
            close += first * 8 * _CHUNK
            return close
        chunk = before.searchsorted(numbers, side="right") - 1
        left = numbers - before[chunk]
        found = chunks[chunk]
        # Selected rows up to the end of each byte; at most 128.
        ends = np.cumsum(np.bitwise_count(found), axis=1, dtype=np.uint16)
        byte = (ends <= left[:, None]).sum(axis=1)
        value = np.take_along_axis(found, byte[:, None], axis=1)[:, 0]
        last = np.take_along_axis(ends, byte[:, None], axis=1)[:, 0].astype(np.int64)
        bit = _BIT_AT[value, left - (last - np.bitwise_count(value))]
        rows: Rows = (chunk * _CHUNK + byte) * 8 + bit
        return rows


@dataclass(frozen=True)
class SplitPart(KnownOrder):
    """One part of a random split: an interval of a random permutation of the blocks of rows."""

    sizes: tuple[int | float, ...]
    """Sizes of all parts: fractions, or numbers of rows."""
    number: int
    """Number of this part."""
    seed: int
    block_rows: int
    """Number of consecutive rows that stay together."""

    def length(self, n_rows: int) -> int:
        first, last = self._bounds(n_rows)
        rest = n_rows % self.block_rows if self.number == len(self.sizes) - 1 else 0
        return (last - first) * self.block_rows + rest

    def bind(self, n_rows: int, epoch: int) -> At:
        block = self.block_rows
        n_blocks = n_rows // block
        first, _ = self._bounds(n_rows)
        block_at = permutation(n_blocks, f"{self.seed}/split")

        def select(numbers: Rows) -> Rows:
            if block == 1:
                return block_at(numbers + first)
            index = numbers // block
            offset = numbers - index * block
            index += first
            # The rows after the last whole block are at the end of the last part.
            whole = np.flatnonzero(index < n_blocks)
            index[whole] = block_at(index[whole])
            return index * block + offset

        return select

    def _bounds(self, n_rows: int) -> tuple[int, int]:
        """Return the first block of the part in the permutation, and the block after the last."""
        sums = [0, *itertools.accumulate(map(_exact, self.sizes))]
        if isinstance(sums[-1], int):
            text = f"split({list(self.sizes)}) has parts of"
            check_n_rows(n_rows, sums[-1], text, "sizes that add up to this number, or fractions")
        n_blocks = n_rows // self.block_rows
        whole = max(1, sums[-1])
        first, last = (
            int(n_blocks * sums[i] / Fraction(whole) + Fraction(1, 2))
            for i in (self.number, self.number + 1)
        )
        return first, last


def _exact(size: int | float) -> int | Fraction:
    return size if isinstance(size, int) else Fraction(repr(size))


def _runs_of(rows: Rows) -> list[Interval]:
    """Return ascending rows as runs [start, stop)."""
    ends = np.flatnonzero(rows[1:] != rows[:-1] + 1)
    starts = rows[np.concatenate(([0], ends + 1))]
    stops = rows[np.concatenate((ends, [len(rows) - 1]))] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
