"""Callbacks: objects of the user that are called during a training run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pinfeed.errors import ArgumentError

METHODS = ("on_train_begin", "on_epoch_begin", "on_batch_end", "on_epoch_end", "on_train_end")


class Callbacks:
    """Callback objects, called in the order in which the user gave them.

    Args:
        callbacks: Objects that have some of the methods.

    Raises:
        ArgumentError: If an object has none of the methods.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        expected = f"expected a list of objects with some of {', '.join(METHODS)}"
        if not isinstance(callbacks, Iterable):
            raise ArgumentError(f"callbacks={callbacks!r}: {expected}")
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            methods = [getattr(callback, name, None) for name in METHODS]
            if isinstance(callback, type) or not any(map(callable, methods)):
                raise ArgumentError(f"callbacks= has {callback!r}; {expected}")

    def __call__(self, method: str, *args: Any) -> None:
        """Call a method of each object that has it; errors of the objects propagate."""
        for callback in self._callbacks:
            if (found := getattr(callback, method, None)) is not None:
                found(*args)
