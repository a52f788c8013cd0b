"""guarded: calls the user's code, which then cannot end the loop or program without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pinfeed.errors import PinfeedError, WorkerError, add_note


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
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f"{code.co_name} ({code.co_filename}, line {traceback.tb_lineno})"
