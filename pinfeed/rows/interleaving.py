"""Interleaving: which source each place of a mixture takes its next rows from, by weight."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import Rows, grouped
from pinfeed.rows.permutation import permutation
from pinfeed.validation.arguments import real_number

Group = tuple[int, Rows, Rows]
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


@dataclass(frozen=True)
class _Split:
    """Division of places between two groups of sources, in even turns."""

    left: _Split | int
    right: _Split | int
    middle: int
    """The first source on the right; sources on the left have lower numbers."""
    share: int
    """Weight of the sources on the left."""
    whole: int
    """Weight of all sources."""

    def n_left(self, n: int) -> int:
        """Return how many of the first ``n`` places are on the left."""
        return (n * self.share + self.whole // 2) // self.whole

    def cut(self, n: Rows) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Return how many places are on the left before place ``n``, and whether it is, too."""
        rounds = n // self.whole
        # Remainders are below 2**31, so that no product exceeds 64 bits.
        parts = (n - rounds * self.whole) * self.share + self.whole // 2
        before = parts // self.whole
        is_left = parts - before * self.whole >= self.whole - self.share
        return rounds * self.share + before, is_left


@dataclass(frozen=True)
class EvenTurns:
    """Sources that take turns as evenly as possible, by whole-number weights.

    A balanced binary tree divides the places: each node divides its own places between its two
    sides as Bresenham's algorithm divides the pixels of a line. Any window of places therefore has
    less than ``ceil(log2(n_sources))`` places of a source more or less than its exact share.

    Args:
        weights: Whole numbers, at least one above 0; their sum is at most 2**31.
    """

    weights: tuple[int, ...]

    @functools.cached_property
    def _tree(self) -> _Split | int:
        return self._node([number for number, weight in enumerate(self.weights) if weight])

    def _node(self, numbers: Sequence[int]) -> _Split | int:
        if len(numbers) == 1:
            return numbers[0]
        middle = (len(numbers) + 1) // 2
        sides = numbers[:middle], numbers[middle:]
        share, other = (sum(self.weights[number] for number in side) for side in sides)
        left, right = map(self._node, sides)
        return _Split(left, right, sides[1][0], share, share + other)

    def count(self, number: int, n: int) -> int:
        """Return how many of the first ``n`` places a source fills."""
        node = self._tree
        while not isinstance(node, int):
            n_left = node.n_left(n)
            if number < node.middle:
                node = node.left
                n = n_left
            else:
                node = node.right
                n -= n_left
        return n if node == number else 0

    def counts(self, n: int) -> list[int]:
        """Return how many of the first ``n`` places each source fills."""
        return [self.count(number, n) for number in range(len(self.weights))]

    def groups(self, places: Rows) -> Iterator[Group]:
        """Yield the sources of places."""
        yield from self._groups(self._tree, np.arange(len(places)), places)

    def _groups(self, node: _Split | int, where: Rows, n: Rows) -> Iterator[Group]:
        if isinstance(node, int):
            if len(n):
                yield node, where, n
            return
        before, is_left = node.cut(n)
        left = is_left.nonzero()[0]
        right = (~is_left).nonzero()[0]
        yield from self._groups(node.left, where[left], before[left])
        yield from self._groups(node.right, where[right], n[right] - before[right])


@dataclass(frozen=True)
class Interleaving:
    """Sources that take turns evenly, with weights that may change at some places.

    Args:
        table: The first place and the weights of each part; the first part begins at place 0.
    """

    table: tuple[tuple[int, tuple[int, ...]], ...]

    @functools.cached_property
    def _starts(self) -> Rows:
        return np.array([start for start, _ in self.table])

    @functools.cached_property
    def _turns(self) -> list[EvenTurns]:
        return [EvenTurns(weights) for _, weights in self.table]

    @functools.cached_property
    def _before(self) -> list[list[int]]:
        """Number of places that each source fills before each part."""
        found = [[0] * len(self.table[0][1])]
        spans = itertools.pairwise(start for start, _ in self.table)
        for turns, (start, end) in zip(self._turns, spans, strict=False):
            more = turns.counts(end - start)
            found.append([a + b for a, b in zip(found[-1], more, strict=True)])
        return found

    def counts(self, n: int) -> list[int]:
        """Return how many of the first ``n`` places each source fills."""
        return [self.before(number, n) for number in range(len(self.table[0][1]))]

    def _part(self, n: int) -> int:
        """Return the part of the table in which the first ``n`` places end."""
        return max(0, bisect.bisect_left(self.table, n, key=lambda one: one[0]) - 1)

    def groups(self, places: Rows) -> Iterator[Group]:
        """Yield the sources of some places, each with the places that it fills."""
        if len(self.table) == 1:
            yield from self._turns[0].groups(places)
            return
        parts = self._starts.searchsorted(places, side="right") - 1
        for part in np.unique(parts).tolist():
            here = np.flatnonzero(parts == part)
            before = self._before[part]
            for number, where, n in self._turns[part].groups(places[here] - self.table[part][0]):
                yield number, here[where], n + before[number]

    def before(self, number: int, place: int) -> int:
        """Return how many places before ``place`` a source fills."""
        part = self._part(place)
        begin = self.table[part][0]
        return self._before[part][number] + self._turns[part].count(number, place - begin)

    def place(self, number: int, n: int) -> int | None:
        """Return the place that a source fills after ``n`` others; None if there is none."""
        found = self.n_places(number, n + 1)
        return None if found is None else found - 1

    def n_places(self, number: int, n: int) -> int | None:
        """Return the smallest number of places of which a source fills ``n``.

        Returns:
            The number of places, or None if the source never fills so many.
        """
        if self.before(number, _LAST) < n:
            return None
        return bisect.bisect_left(range(_LAST), n, key=functools.partial(self.before, number))


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

    def groups(self, places: Rows) -> Iterator[tuple[int, Rows | slice, Rows]]:
        """Yield the sources of some places, each with the places that it fills."""
        windows = places // _WINDOW
        numbers = np.empty(len(places), np.int64)
        before = np.empty(len(places), np.int64)
        for window, here in grouped(windows):
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
        begin = window * _WINDOW
        places = np.flatnonzero(self._window(window)[0] == number)
        return begin + places.item(n - self.interleaving.before(number, begin))

    @functools.cached_property
    def _window(self) -> Callable[[int], tuple[Rows, Rows]]:
        """Function that returns the source of each place of a window, and its places before."""

        @functools.lru_cache(maxsize=4)
        def window(number: int) -> tuple[Rows, Rows]:
            begin = number * _WINDOW
            stop = begin + _WINDOW if self.end is None else min(begin + _WINDOW, self.end)
            turns = np.empty(stop - begin, np.int64)
            counts = np.empty(stop - begin, np.int64)
            first = dict[int, int]()
            for source, where, n in self.interleaving.groups(np.arange(begin, stop)):
                turns[where] = source
                # A window in which the weights change has several groups of a source, ascending.
                first.setdefault(source, n.item(0))
            shuffle = permutation(len(turns), f"{self.salt}/{number}")
            turns = turns[shuffle(np.arange(len(turns)))]
            for source, count in first.items():
                where = np.flatnonzero(turns == source)
                counts[where] = np.arange(count, count + len(where))
            return turns, counts

        return window
