"""WindowCursor: the windows of an epoch, each begun while the one before it is served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pinfeed.rows.windows import Windows

T = TypeVar("T")

Runs = Iterable[tuple[int, int]]
"""Row numbers as runs [start, stop)."""


class WindowCursor(Generic[T]):
    """Walks through the windows of an epoch.

    Args:
        windows: Of the epoch.
        start: Position at which the walk begins.
        stop: Position behind its last one.
        begin: Begins with a window, given its runs.
    """

    def __init__(self, windows: Windows, start: int, stop: int, begin: Callable[[Runs], T]) -> None:
        self._windows = windows
        self._begin = begin
        self._spans = iter(windows.spans(start, stop))
        self._end = start
        # The position behind each window; the first is that which is served.
        self._begun: deque[tuple[int, T]] = deque()

    def take(self, position: int, n: int) -> list[tuple[int, T]]:
        """The windows of positions [position, position + n), with how many of them each has. Positions come in ascending order."""
        taken: list[tuple[int, T]] = []
        while n:
            while self._begun and self._begun[0][0] <= position:
                self._begun.popleft()
            while len(self._begun) < 2 and (span := next(self._spans, None)) is not None:
                self._end += span[1]
                self._begun.append((self._end, self._begin(self._windows.runs(span[0]))))
            end, window = self._begun[0]
            here = min(n, end - position)
            taken.append((here, window))
            position, n = position + here, n - here
        return taken
