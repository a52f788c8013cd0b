"""guarded: calls the user's code, which then cannot end the loop or program without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pinfeed.errors import WorkerError


def guarded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)``, and convert exceptions that would silently end the loop or program.

    Raises:
        WorkerError: If ``fn`` raised StopIteration, StopAsyncIteration, SystemExit or
            GeneratorExit.
    """
    try:
        return fn(*args)
    except (StopIteration, StopAsyncIteration, SystemExit, GeneratorExit) as error:
        raise WorkerError(
            f"{_where(error)} raised {error!r}, which would end the loop without an error; raise "
            "another exception that says what is wrong"
        ) from error
    except RuntimeError as error:
        # A generator turns a StopIteration into a RuntimeError.
        if isinstance(error.__cause__, StopIteration) and not isinstance(error, WorkerError):
            raise WorkerError(
                f"{_where(error.__cause__)} raised {error.__cause__!r}, which would end the loop "
                "without an error; raise another exception that says what is wrong"
            ) from error.__cause__
        raise


def _where(error: BaseException) -> str:
    """Return the function, file and line that raised an error."""
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f"{code.co_name} ({code.co_filename}, line {traceback.tb_lineno})"
