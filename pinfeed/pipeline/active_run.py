"""ActiveRun: the generator of a feeder's last run, which only the user's reference keeps.

ContinuingIterator: iterates over such a generator, and continues after the error of a batch.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Generator, Iterator
from types import GeneratorType
from typing import Any, cast

from pinfeed.errors import ClosedError


def is_suspended(generator: GeneratorType[Any, None, None]) -> bool:
    """Return whether a generator has begun and is suspended at a ``yield``."""
    return inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED


def has_ended(generator: GeneratorType[Any, None, None]) -> bool:
    """Return whether a generator has ended. Any thread may call this."""
    # Reading gi_frame alone would make the frame object of a generator that another thread runs,
    # which is not safe without the interpreter's lock. getgeneratorstate checks gi_running first.
    return inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED


class _RunEnded(GeneratorExit):
    """Raised inside the generator of a run, to end it as ``break`` does."""


class ActiveRun:
    """The generator of a feeder's last run.

    The reference is weak: when the user drops the generator, as ``break`` does, the run ends.
    """

    def __init__(self) -> None:
        self._generator: weakref.ref[GeneratorType[Any, None, None]] | None = None
        # Thread that iterates over the run, or has made it.
        self._thread: int | None = None
        self.has_begun = False
        """Whether the first batch was requested."""
        # Message of the iterator's error after ``end`` has ended the run.
        self._reason: str | None = None

    @classmethod
    def begin(cls, batches: Iterator[Any]) -> tuple[ActiveRun, Generator[Any, None, None]]:
        """Return a run over batches, and the generator of the run."""
        run = cls()
        generator = run._iterate(cast("Generator[Any, None, None]", batches))
        run._thread = threading.get_ident()
        run._generator = weakref.ref(cast("GeneratorType[Any, None, None]", generator))
        return run, generator

    @property
    def is_running(self) -> bool:
        """Whether the generator exists and has not ended."""
        generator = self.generator()
        return generator is not None and self._reason is None and not has_ended(generator)

    def generator(self) -> GeneratorType[Any, None, None] | None:
        """Return the generator, if it still exists."""
        return self._generator() if self._generator is not None else None

    def end(self, reason: str) -> bool:
        """End the run, as ``break`` does, if this thread iterates over it.

        Args:
            reason: Message of the ClosedError that the generator raises when the program requests
                another batch. Without the error, the epoch would seem to be complete.

        Returns:
            False if another thread iterates over the run or has made it, or if it is running now.
        """
        generator = self.generator()
        if generator is None:
            return True
        if self._thread == threading.get_ident() and not self.has_begun:
            # A thread that begins the run now notes itself first, and then looks for a reason.
            self._reason = reason
            if not self.has_begun:
                return True
            self._reason = None
        if self._thread != threading.get_ident() or not is_suspended(generator):
            return False
        generator.throw(_RunEnded)
        self._reason = reason
        return True

    def _iterate(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        self._thread = threading.get_ident()
        self.has_begun = True
        reason = self._reason
        if reason is None:
            # If ``end`` ends the run, the next use of the iterator raises the error.
            with contextlib.suppress(_RunEnded):
                yield from batches
                return
            yield
            reason = self._reason
        raise ClosedError(reason)


class ContinuingIterator:
    """Iterator over the batches of a run, which continues after the error of a batch.

    A generator ends with its first error. So the generator of the run keeps an error in a list, and
    yields another value in place of the batch. This iterator raises the error. As with the
    generator itself, the run ends when the caller drops the iterator.

    Args:
        batches: Generator of batches.
        errors: Error of the last batch, if that batch failed.
    """

    __slots__ = ("__weakref__", "_batches", "_errors")

    def __init__(self, batches: Generator[Any, None, None], errors: list[Exception]) -> None:
        self._batches = batches
        self._errors = errors

    def __iter__(self) -> ContinuingIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not self._errors:
            return batch
        try:
            raise self._errors.pop()
        finally:
            # The error's traceback keeps this frame, which must not keep the run.
            del self

    def close(self) -> None:
        """End the run, as ``break`` does."""
        self._batches.close()
