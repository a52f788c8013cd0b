"""ActiveRun: the generator of a feeder's last run, which only the user's reference keeps."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, cast

from pinfeed.errors import ClosedError
from pinfeed.pipeline.abandoned import is_abandoned


def is_suspended(generator: GeneratorType[Any, None, None]) -> bool:
    """Tell whether a generator has begun and is suspended at a ``yield``."""
    return inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED


def has_ended(generator: GeneratorType[Any, None, None]) -> bool:
    """Tell whether a generator has ended. Any thread may ask."""
    # Reading gi_frame alone would make the frame object of a generator that another thread runs,
    # which is not safe without the interpreter's lock. This asks first whether it runs.
    return inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED


class ActiveRun:
    """The generator of a feeder's last run.

    It is referenced weakly: when the user drops it, as ``break`` does, the run ends.
    """

    def __init__(self) -> None:
        self._generator: weakref.ref[GeneratorType[Any, None, None]] | None = None

    def set(self, generator: Iterator[Any]) -> None:
        """Make a generator the active one."""
        self._generator = weakref.ref(cast("GeneratorType[Any, None, None]", generator))

    @property
    def is_running(self) -> bool:
        """Whether the generator exists and has not ended."""
        generator = self.generator()
        return generator is not None and not has_ended(generator)

    def generator(self) -> GeneratorType[Any, None, None] | None:
        """Return the generator, if it still exists."""
        return self._generator() if self._generator is not None else None

    def leave_abandoned(self) -> None:
        """End the run, if no code can continue it.

        Raises:
            ClosedError: If some code can.
        """
        assert self._generator is not None
        if not is_abandoned(self._generator):
            raise ClosedError(
                "a loop over this feeder is running, because the program still holds its "
                "iterator; close() that iterator, make a second feeder, or iterate "
                "pinfeed.restartable(feeder), where each loop ends the one before; feeder.close() "
                "ends this one, and the feeder for good"
            )
        if (generator := self.generator()) is not None:
            generator.close()
