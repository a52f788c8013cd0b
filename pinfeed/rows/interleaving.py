"""Interleaving: which source each place of a mixture takes its next rows from, by weight."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import Rows, grouped
from pinfeed.rows.permutation import permutation
from pinfeed.validation.arguments import real_number

Group = tuple[int, Rows | slice, Rows]
"""A source, the numbers of the places that it fills, and how many it has filled before each."""

# Products of two numbers up to this size fit 64 bits.
_MOST = 1 << 31
# No interleaving is asked for later places.
_LAST = 1 << 62
# Places that are shuffled at a time.
_WINDOW = 1 << 12


def whole_weights(weights: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Return weights as whole numbers in the same proportions, in the order of ``names``.

    The decimal digits of a float count: 0.7 is 7/10. Proportions are exact if their whole numbers
    add up to at most 2**31; otherwise they are rounded to about 2**-30.

    Raises:
        ArgumentError: If a weight is missing, negative or infinite, has no source, or if all are 0.
    """
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise ArgumentError(
            f"weights={weights!r}: expected one weight for each source, {{name: weight}} with the "
            f"names {', '.join(map(repr, names))}"
        )
    exact = [_exact(weights[name], f"weights[{name!r}]") for name in names]
    if not any(exact):
        raise ArgumentError(f"weights={weights!r}: all are 0; expected a weight above 0")
    scale = lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    divisor = gcd(*whole)
    if sum(whole) // divisor <= _MOST:
        return tuple(one // divisor for one in whole)
    total = sum(whole)
    return tuple(max(1, one * (_MOST // 2) // total) if one else 0 for one in whole)


def _exact(weight: Any, name: str) -> Fraction:
    if isinstance(weight, Fraction) and weight >= 0:
        return weight
    number = real_number(weight, name, least=0)
    if number == float("inf"):
        raise ArgumentError(f"{name}={weight!r}: expected a finite number")
    # A large whole number has digits that a float has not.
    return Fraction(int(weight)) if number.is_integer() else Fraction(repr(number))


class _Split(NamedTuple):
    """Division of places between two groups of sources, in even turns.

    Each group is one source, or is divided again.
    """

    left: _Split | int
    right: _Split | int
    middle: int
    """The first source on the right; sources on the left have lower numbers."""
    share: int
    """Weight of the sources on the left."""
    whole: int
    """Weight of all sources."""

    def cut(self, n: Any) -> tuple[Any, Any]:
        """Return how many places are on the left before place ``n``, and whether it is, too.

        Args:
            n: A place, or an array of places.
        """
        rounds = n // self.whole
        # Remainders are below 2**31, so that no product exceeds 64 bits.
        parts = (n - rounds * self.whole) * self.share + self.whole // 2
        before = parts // self.whole
        is_left = parts - before * self.whole >= self.whole - self.share
        return rounds * self.share + before, is_left


def _split(weights: Sequence[int], numbers: Sequence[int]) -> _Split | int:
    """Return the tree that divides places among the sources with some numbers."""
    if len(numbers) == 1:
        return numbers[0]
    middle = (len(numbers) + 1) // 2
    sides = numbers[:middle], numbers[middle:]
    share, other = (sum(weights[number] for number in side) for side in sides)
    left, right = (_split(weights, side) for side in sides)
    return _Split(left, right, sides[1][0], share, share + other)


def _count(node: _Split | int, number: int, n: int) -> int:
    """Return how many of the first ``n`` places a source fills."""
    while not isinstance(node, int):
        before, _ = node.cut(n)
        node, n = (node.left, before) if number < node.middle else (node.right, n - before)
    return n if node == number else 0


def _groups(node: _Split | int, where: Rows, n: Rows) -> Iterator[tuple[int, Rows, Rows]]:
    """Yield the sources of the places ``n``, which have the numbers ``where``."""
    if isinstance(node, int):
        if len(n):
            yield node, where, n
        return
    before, is_left = node.cut(n)
    left = is_left.nonzero()[0]
    right = (~is_left).nonzero()[0]
    yield from _groups(node.left, where[left], before[left])
    yield from _groups(node.right, where[right], n[right] - before[right])


@dataclass(frozen=True)
class Interleaving:
    """Sources that take turns as evenly as possible, with weights that may change at some places.

    A balanced binary tree divides the places: each node divides its own places between its two
    sides as Bresenham's algorithm divides the pixels of a line. Any window of places therefore has
    less than ``ceil(log2(n_sources))`` places of a source more or less than its exact share.

    Args:
        table: The first place and the weights of each part; the first part begins at place 0. The
            weights are whole numbers, at least one of them above 0; their sum is at most 2**31.
    """

    table: tuple[tuple[int, tuple[int, ...]], ...]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.table]

    @functools.cached_property
    def _trees(self) -> list[_Split | int]:
        return [
            _split(weights, [number for number, weight in enumerate(weights) if weight])
            for _, weights in self.table
        ]

    @functools.cached_property
    def _before(self) -> list[list[int]]:
        """Number of places that each source fills before each part."""
        found = [[0] * len(self.table[0][1])]
        for part, end in enumerate(self._starts[1:]):
            tree = self._trees[part]
            n = end - self._starts[part]
            found.append([a + _count(tree, number, n) for number, a in enumerate(found[-1])])
        return found

    def groups(self, places: Rows) -> Iterator[tuple[int, Rows, Rows]]:
        """Yield the sources of some places, each with the places that it fills."""
        numbers = np.arange(len(places))
        if len(self.table) == 1:
            yield from _groups(self._trees[0], numbers, places)
            return
        parts = np.searchsorted(self._starts, places, side="right") - 1
        for part, here in grouped(parts):
            offsets = places[here] - self._starts[part]
            for number, where, n in _groups(self._trees[part], numbers[here], offsets):
                yield number, where, n + self._before[part][number]

    def before(self, number: int, place: int) -> int:
        """Return how many places before ``place`` a source fills."""
        part = bisect.bisect_right(self._starts, place) - 1
        offset = place - self._starts[part]
        return self._before[part][number] + _count(self._trees[part], number, offset)

    def place(self, number: int, n: int) -> int | None:
        """Return the place that a source fills after ``n`` others; None if there is none."""
        if self.before(number, _LAST) <= n:
            return None
        before = functools.partial(self.before, number)
        return bisect.bisect_right(range(_LAST), n, key=before) - 1


@dataclass(frozen=True)
class ShuffledTurns:
    """An interleaving in which the turns within each window of 4,096 places are shuffled.

    Each window has the same number of places of each source as in the interleaving.

    Args:
        interleaving: The even turns.
        salt: Text that the shuffle is a function of.
        end: Number of places; None without an end.
    """

    interleaving: Interleaving
    salt: str
    end: int | None

    def groups(self, places: Rows) -> Iterator[Group]:
        """Yield the sources of some places, each with the places that it fills."""
        numbers = np.empty(len(places), np.int64)
        before = np.empty(len(places), np.int64)
        for window, here in grouped(places // _WINDOW):
            turns, counts = self._window(window)
            offsets = places[here] - window * _WINDOW
            numbers[here] = turns[offsets]
            before[here] = counts[offsets]
        for number, where in grouped(numbers):
            yield number, where, before[where]

    def before(self, number: int, place: int) -> int:
        """Return how many places before ``place`` a source fills."""
        window, offset = divmod(place, _WINDOW)
        before = self.interleaving.before(number, window * _WINDOW)
        if offset:
            before += int(np.count_nonzero(self._window(window)[0][:offset] == number))
        return before

    def place(self, number: int, n: int) -> int | None:
        """Return the place that a source fills after ``n`` others; None if there is none."""
        even = self.interleaving.place(number, n)
        if even is None or (self.end is not None and even >= self.end):
            return None
        # Each window has as many places of a source as without the shuffle.
        window = even // _WINDOW
        turns, counts = self._window(window)
        return window * _WINDOW + int(np.flatnonzero((turns == number) & (counts == n))[0])

    @functools.cached_property
    def _window(self) -> Any:
        """Function that returns the source of each place of a window, and its places before."""
        return functools.lru_cache(maxsize=4)(self._shuffled)

    def _shuffled(self, window: int) -> tuple[Rows, Rows]:
        begin = window * _WINDOW
        stop = begin + _WINDOW if self.end is None else min(begin + _WINDOW, self.end)
        turns = np.empty(stop - begin, np.int64)
        sources = set[int]()
        for source, where, _ in self.interleaving.groups(np.arange(begin, stop)):
            turns[where] = source
            sources.add(source)
        turns = turns[permutation(len(turns), f"{self.salt}/{window}")(np.arange(len(turns)))]
        counts = np.empty_like(turns)
        for source in sources:
            where = np.flatnonzero(turns == source)
            counts[where] = self.interleaving.before(source, begin) + np.arange(len(where))
        return turns, counts
