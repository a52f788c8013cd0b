"""ThreadedMap: ``map`` in several threads, with the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pinfeed.threads.call import Pending, Workers

T = TypeVar("T")
R = TypeVar("R")


class OrderedMap(Protocol):
    """A function like ``map``, with results in order, which threads may compute early."""

    def __call__(self, fn: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


@dataclass(frozen=True)
class ThreadedMap:
    """``OrderedMap`` in ``n_threads`` threads.

    At most ``n_threads`` items are begun and not yet taken. This bounds the memory, and the time
    that a loop waits for these items when it ends.
    """

    pool: Workers
    n_threads: int

    def __call__(self, fn: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
        # If the loop ends before these calls, it joins the pool before their memory is reused.
        begun: deque[Pending[R]] = deque()
        for item in items:
            begun.append(self.pool.submit(fn, item))
            if len(begun) == self.n_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
