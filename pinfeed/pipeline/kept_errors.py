"""ContinuingIterator: raises the error of a batch, and returns the next batch afterwards.

A generator ends with its first error. So the generator of a run yields an error in place of its
batch, and this iterator raises it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any


class KeptError:
    """Error of a batch, in place of the batch. It can be taken only once."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def take(self) -> Exception:
        """Return the error, which only the caller keeps from then on."""
        error = self._error
        self._error = None
        assert error is not None
        return error


class ContinuingIterator:
    """Iterator over the batches of a run, which continues after the error of a batch.

    As with the generator itself, the run ends when the caller drops the iterator.

    Args:
        batches: Generator of batches, with a ``KeptError`` in place of each batch that failed.
    """

    __slots__ = ("__weakref__", "_batches")

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches

    def __iter__(self) -> ContinuingIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not isinstance(batch, KeptError):
            return batch
        try:
            raise batch.take()
        finally:
            # The error's traceback keeps this frame, which must not keep the run.
            del self

    def close(self) -> None:
        """End the run, as ``break`` does."""
        self._batches.close()
