"""where() and split(): orders of a part of the rows."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.mixtures import check_inner
from pinfeed.rows.orders import (
    Arrays,
    At,
    Order,
    Rows,
    is_distinct,
    kept_arrays,
    most_copies,
    sequential,
    windows,
)
from pinfeed.rows.permutation import permutation
from pinfeed.rows.row_mask import RowMask
from pinfeed.rows.windows import SelectedWindows, Windows
from pinfeed.validation.arguments import check_seed, real_number, whole_number

Name = TypeVar("Name")


def where(subset: Any, order: Order | None = None) -> Order:
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
    inner = sequential() if order is None else check_inner(order)
    if isinstance(subset, SplitPart):
        return dataclasses.replace(subset, order=inner)
    array = np.asarray(subset)
    if array.dtype == bool and array.ndim == 1:
        mask = RowMask.of(array)
        return Where(mask.n_selected, mask.n_rows, mask.digest, inner, mask)
    return _where_indices(array, inner)


def _where_indices(array: npt.NDArray[Any], order: Order) -> Order:
    """Return an order of the rows with given indices."""
    name = "where(subset)"
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise ArgumentError(
            f"where(subset): got shape {array.shape} of {array.dtype}; expected a mask of shape "
            "(n_rows,), or distinct row indices of shape (n,), with at least one row"
        )
    rows = check_rows(array, 1 << 62, name, copy=array.flags.writeable)
    ascending = rows if bool((rows[1:] > rows[:-1]).all()) else np.sort(rows)
    same = np.flatnonzero(ascending[1:] == ascending[:-1])
    if len(same):
        raise ArgumentError(
            f"where(subset): row {ascending[same[0]]} occurs twice; expected distinct rows; give "
            "np.unique(subset), or give the indices themselves as rows="
        )
    digest = hashlib.blake2b(rows.data, digest_size=16).hexdigest()
    return Where(len(rows), None, digest, order, _Indices(rows, ascending.item(-1)))


@dataclass(frozen=True)
class _Indices:
    """Row indices of a part of the rows."""

    rows: Rows
    largest: int

    @property
    def arrays(self) -> Arrays:
        """Arrays that represent the part."""
        return (self.rows,)

    def at(self, numbers: Rows) -> Rows:
        """Return the row indices of rows of the part."""
        return self.rows[numbers]


@dataclass(frozen=True)
class Where:
    """Rows that a mask or row indices select."""

    # The ``repr`` of this class is in saved states, so the names of its fields must not change.
    n: int
    """Number of rows of the part."""
    n_rows: int | None
    """Number of rows of the mask; None for row indices."""
    digest: str
    """Checksum of the mask or of the row indices."""
    order: Order
    selection: RowMask | _Indices = field(repr=False, compare=False)

    def length(self, n_rows: int) -> int:
        self._require(n_rows)
        return self.order.length(self.n)

    def bind(self, n_rows: int, epoch: int) -> At:
        self._require(n_rows)
        return _composed(self.order, self.n, epoch, self.selection.at)

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        found = windows(self.order, self.n, epoch)
        return None if found is None else SelectedWindows(found, self.selection.at)

    @property
    def most_copies(self) -> int | None:
        """Most occurrences of a row in an epoch; None if unknown."""
        return most_copies(self.order)

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the order keeps."""
        return (*self.selection.arrays, *kept_arrays(self.order))

    def _require(self, n_rows: int) -> None:
        selection = self.selection
        if isinstance(selection, RowMask):
            if selection.n_rows != n_rows:
                raise ArgumentError(
                    f"where(mask) has a mask of {selection.n_rows:,} rows, but is used for "
                    f"{n_rows:,} rows; expected one element for each row"
                )
        elif selection.largest >= n_rows:
            raise ArgumentError(
                f"where(indices) has row {selection.largest:,}, but is used for {n_rows:,} rows; "
                "expected row indices below this number"
            )


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
    sizes: Any, seed: int = 0, *, order: Order | None = None, block_rows: int = 1
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
    inner = sequential() if order is None else check_inner(order)
    values = list(sizes.values()) if isinstance(sizes, Mapping) else sizes
    checked = _check_sizes(values, sizes)
    seed = check_seed(seed)
    block = whole_number(block_rows, "block_rows")
    parts = tuple(SplitPart(checked, i, seed, block, inner) for i in range(len(checked)))
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
class SplitPart:
    """One part of a random split."""

    # The ``repr`` of this class is in saved states, so the names of its fields must not change.
    sizes: tuple[int | float, ...]
    """Sizes of all parts: fractions, or numbers of rows."""
    number: int
    """Number of this part."""
    seed: int
    block_rows: int
    """Number of consecutive rows that stay together."""
    order: Order

    def length(self, n_rows: int) -> int:
        return self.order.length(self._n_rows(n_rows))

    def bind(self, n_rows: int, epoch: int) -> At:
        return _composed(self.order, self._n_rows(n_rows), epoch, self._select(n_rows))

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        found = windows(self.order, self._n_rows(n_rows), epoch)
        return None if found is None else SelectedWindows(found, self._select(n_rows))

    def _select(self, n_rows: int) -> At:
        """Return the function from numbers of rows of the part to row indices."""
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

    @property
    def most_copies(self) -> int | None:
        """Most occurrences of a row in an epoch; None if unknown."""
        return most_copies(self.order)

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the order keeps."""
        return kept_arrays(self.order)

    def _n_rows(self, n_rows: int) -> int:
        """Return the number of rows of the part."""
        first, last = self._bounds(n_rows)
        rest = n_rows % self.block_rows if self.number == len(self.sizes) - 1 else 0
        return (last - first) * self.block_rows + rest

    def _bounds(self, n_rows: int) -> tuple[int, int]:
        """Return the first block of the part in the permutation, and the block after the last."""
        sums = [0, *itertools.accumulate(map(_exact, self.sizes))]
        if isinstance(sums[-1], int) and sums[-1] != n_rows:
            raise ArgumentError(
                f"split({list(self.sizes)}) has parts of {sums[-1]:,} rows together, but is used "
                f"for {n_rows:,} rows; expected sizes that add up to this number, or fractions"
            )
        n_blocks = n_rows // self.block_rows
        whole = max(1, sums[-1])
        first, last = (
            int(n_blocks * sums[i] / Fraction(whole) + Fraction(1, 2))
            for i in (self.number, self.number + 1)
        )
        return first, last


def _exact(size: int | float) -> int | Fraction:
    return size if isinstance(size, int) else Fraction(repr(size))


def _composed(order: Order, n: int, epoch: int, select: At) -> At:
    """Return the rows that ``select`` returns for the numbers of an order of ``n`` rows."""
    inner = order.bind(n, epoch)
    if is_distinct(order):
        return lambda positions: select(inner(positions))
    name = f"order={order!r}"
    return lambda positions: select(check_rows(inner(positions), n, name))
