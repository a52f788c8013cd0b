"""Calls of the user's functions: guarded() for any, BatchTransform for transforms of batches."""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pinfeed.errors import ArgumentError, PinfeedError, WorkerError, add_note
from pinfeed.validation.arguments import takes_generator


def guarded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)``, and convert exceptions that would silently end the loop or program.

    Raises:
        WorkerError: If ``fn`` raised StopIteration, StopAsyncIteration, SystemExit or
            GeneratorExit.
    """
    try:
        return fn(*args)
    except ENDS_SILENTLY as error:
        raise_if_silent(error)
        raise


ENDS_SILENTLY = (StopIteration, StopAsyncIteration, SystemExit, GeneratorExit, RuntimeError)
"""Exceptions for ``raise_if_silent``."""


def raise_if_silent(error: BaseException) -> None:
    """Convert an exception of the user's code, if it would silently end the loop or program.

    Raises:
        WorkerError: If ``error`` is such an exception.
    """
    cause: BaseException | None = error
    if isinstance(error, RuntimeError):
        # A generator turns a StopIteration into a RuntimeError.
        cause = error.__cause__
        if not isinstance(cause, StopIteration) or isinstance(error, WorkerError):
            return
    assert cause is not None
    raise WorkerError(
        f"{_where(cause)} raised {cause!r}, which would end the loop without an error; raise "
        "another exception that says what is wrong"
    ) from cause


def drop_frames(error: BaseException) -> None:
    """Drop the frames of an error that is kept for a long time, and note where it was raised."""
    if error.__traceback__ is not None and not isinstance(error, PinfeedError):
        add_note(error, f"raised in {_where(error)}")
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            chain += [one.__cause__, one.__context__]


def _where(error: BaseException) -> str:
    """Return the function, file and line that raised an error."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {line})"


class TransformCall(NamedTuple):
    """Time of a call, on the clock of the loop's counters."""

    number: int
    """Number of the batch."""
    start_s: float
    end_s: float


class Seed(NamedTuple):
    """Numbers that seed the generators of a transform, given the epoch and number of a batch."""

    number: int
    """The user's seed."""
    which: int
    """0 for ``host_transform``, and 1 for ``device_transform``."""
    rank: int | None
    """Rank of this process, if several processes share an epoch."""

    def entropy(self, epoch: int, batch: int) -> tuple[int, ...]:
        """Return the numbers that seed a batch's generator, as the guide documents them."""
        numbers = (self.number % 2**64, epoch, batch, self.which)
        return numbers if self.rank is None else (*numbers, self.rank)


class _Calls(threading.local):
    """The calls of each thread that are not counted yet."""

    def __init__(self) -> None:
        self.made: list[TransformCall] = []


@dataclass(eq=False)
class BatchTransform:
    """Transform of a user, which takes a batch and returns one.

    Several threads may call it at the same time. If it has a parameter ``generator``, each call
    receives a new generator, whose seed is a function of the batch number. So the result does not
    depend on other calls or on the thread.

    Args:
        name: Name of the user's argument.
        function: The user's function.
        seed: Numbers that seed the generators.
        device: Name of the device that the generators draw on.
        after_call: Called after each call that returns; None for nothing.
        now: Clock of the times of the calls.
    """

    name: str
    function: Callable[..., Any]
    seed: Seed
    device: str
    after_call: Callable[[], object] | None = None
    now: Callable[[], float] = time.perf_counter
    returned_nbytes: int = field(default=0, init=False)
    """Largest number of bytes of tensors that a call has returned so far."""
    new_nbytes: int = field(default=0, init=False)
    """Largest number of bytes of their memory, without the memory of the call's batch."""
    _calls: _Calls = field(default_factory=_Calls, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.takes_generator = takes_generator(self.function)

    def __call__(
        self, batch: Any, epoch: int, number: int, given: Container[int] = frozenset()
    ) -> Any:
        """Return the function's result for a batch.

        Args:
            batch: The batch.
            epoch: Number of the epoch.
            number: Number of the batch in its epoch.
            given: Memory of the batch that the loop knows, as ``memory_blocks_of`` numbers it.

        Raises:
            Exception: If the function raised it; a note names the batch.
            ArgumentError: If the function returned None.
        """
        from pinfeed.tensors.transform_calls import nbytes_of, no_grad, seeded_generator

        which = f"{self.name} of batch {number}, epoch {epoch}"
        function = self.function
        if self.takes_generator:
            generator = seeded_generator(self.device, self.seed.entropy(epoch, number))
            function = functools.partial(function, generator=generator)
        start_s = self.now()
        try:
            with no_grad():
                made = guarded(function, batch)
            if self.after_call is not None:
                self.after_call()
        except Exception as error:
            add_note(error, f"in {which}")
            raise
        finally:
            # An error's traceback keeps this frame, which must not keep the batch.
            del batch
            self._calls.made.append(TransformCall(number, start_s, self.now()))
        if made is None:
            raise ArgumentError(
                f"{which} returned None; expected a batch; return the batch at the end of the "
                "function"
            )
        returned_nbytes, new_nbytes = nbytes_of(made, given)
        with self._counting:
            self.returned_nbytes = max(self.returned_nbytes, returned_nbytes)
            self.new_nbytes = max(self.new_nbytes, new_nbytes)
        return made

    def take_calls(self) -> list[TransformCall]:
        """Return the calls of this thread since the thread last called this method."""
        calls = self._calls.made
        self._calls.made = []
        return calls
