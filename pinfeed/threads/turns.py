"""Turns: the order in which threads do some work, one at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Order in which threads do some work, one at a time.

    Args:
        is_shared: Whether several threads take turns at the same time.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._next = 0
        self._is_shared = is_shared
        self._has_changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, turn: int) -> Iterator[None]:
        """Run code in a turn."""
        self.wait_for(turn)
        try:
            yield
        finally:
            self.end()

    def wait_for(self, turn: int) -> None:
        """Wait until all earlier turns have ended."""
        # Only the thread that has the turn ends it, so a thread whose turn it is needs no lock.
        if self._next != turn:
            with self._has_changed:
                self._has_changed.wait_for(lambda: self._next == turn)

    def end(self) -> None:
        """End the current turn."""
        if not self._is_shared:
            self._next += 1
            return
        with self._has_changed:
            self._next += 1
            self._has_changed.notify_all()
