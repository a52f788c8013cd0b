"""Requests that are repeated after temporary errors; advice for permanent ones."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from pinfeed.errors import FileMissing, PinfeedError, ReadError, described

T = TypeVar("T")

# Seconds before the second attempt; the delay doubles before each further attempt.
_FIRST_DELAY_S = 0.5

# Errors for which a further attempt is useless. File systems pass unknown options on to functions,
# which raise TypeError.
_FINAL_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    ValueError,
    TypeError,
    AttributeError,
    ImportError,
)
# HTTP client errors for which a further attempt may succeed: timeout, and too many requests.
_RETRIED_STATUSES = (408, 429)
_REFUSED_STATUSES = (401, 403)
# Parts of the names of error classes of client libraries, which pinfeed does not import.
_CREDENTIAL_ERRORS = ("Credential", "Authentication", "Unauthorized", "GoogleAuthError")
_CONNECT_ERRORS = ("EndpointConnectionError",)


def result_or_error(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of a call, or the error that it raises."""
    try:
        return call(*args, **options)
    except Exception as error:
        # File systems raise errors of many kinds.
        return error


def answers_of(
    asked: list[T], ask: Callable[[list[T]], list[Any]], attempts: int
) -> Iterator[tuple[T, Any]]:
    """Make requests, and repeat failed requests after a delay.

    Answers are yielded in any order; this function keeps none.

    Args:
        asked: Subjects of the requests, as error messages name them.
        ask: Makes requests, and returns an answer or an error for each.
        attempts: Maximum attempts per request.

    Raises:
        ReadError: If a request fails with an error for which a further attempt is useless, or
            fails in every attempt.
        FileMissing: If a file does not exist.
        PinfeedError: If ``ask`` returns such an error.
    """
    for attempt in itertools.count(1):
        answers = list(zip(asked, ask(asked), strict=True))
        asked = []
        while answers:
            subject, answer = answers.pop()
            if not isinstance(answer, BaseException):
                yield subject, answer
            elif attempt < attempts and _is_temporary(answer):
                asked.append(subject)
            else:
                _raise(subject, answer, attempt, attempts)
            # This frees the memory of this answer for the next one.
            del answer
        if not asked:
            return
        time.sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))


def _raise(subject: Any, error: BaseException, attempt: int, attempts: int) -> NoReturn:
    """Raise the error of a request that is not repeated."""
    if isinstance(error, PinfeedError):
        raise error
    if isinstance(error, FileNotFoundError):
        raise FileMissing(f"{subject}: the file no longer exists") from error
    note = ""
    if _is_temporary(error):
        more = f"use RemoteStore(..., attempts={2 * attempts}) for more attempts"
        note = f" (attempt {attempt} of {attempts}; {more})"
    elif advice := _advice(error):
        note = f"; {advice}"
    raise ReadError(f"{subject}: {described(error)}{note}") from error


def require_connected(subject: Any, error: BaseException) -> None:
    """Refuse a server that cannot be reached when a file is opened.

    A wrong address is likelier than a server that has just stopped, so there is no second attempt.

    Raises:
        ReadError: If the error says that there is no connection.
    """
    # An error that is raised again may be in the chain of its own causes.
    seen: list[BaseException] = []
    chain: BaseException | None = error
    while chain is not None and chain not in seen:
        seen.append(chain)
        is_unknown_host = isinstance(chain, socket.gaierror) and chain.errno != socket.EAI_AGAIN
        is_refused = getattr(chain, "errno", None) == errno.ECONNREFUSED
        if is_unknown_host or is_refused or _has_name(chain, _CONNECT_ERRORS):
            raise ReadError(
                f"{subject}: no connection to the server ({described(error)}); check the address, "
                "also in storage_options (such as endpoint_url), and that the server runs"
            ) from error
        chain = chain.__cause__ or chain.__context__


def _is_temporary(error: BaseException) -> bool:
    if isinstance(error, (PinfeedError, *_FINAL_ERRORS)) or _has_name(error, _CREDENTIAL_ERRORS):
        return False
    status = status_of(error)
    return not 400 <= status < 500 or status in _RETRIED_STATUSES


def _advice(error: BaseException) -> str:
    """Return what to do about a permanent error; empty if nothing is known."""
    is_refused = isinstance(error, PermissionError) or status_of(error) in _REFUSED_STATUSES
    if is_refused or _has_name(error, _CREDENTIAL_ERRORS):
        return (
            'give credentials by RemoteStore(..., storage_options={...}), or {"anon": True} for '
            "public files on S3"
        )
    if isinstance(error, TypeError):
        return "check the names in storage_options, which are arguments of fsspec's file system"
    return ""


def _has_name(error: BaseException, parts: tuple[str, ...]) -> bool:
    """Return whether the name of a class of an error contains one of these parts."""
    return any(part in kind.__name__ for kind in type(error).__mro__ for part in parts)


def status_of(error: Any) -> int:
    """Return the HTTP status of an error; 0 if it has none."""
    response = getattr(error, "response", None)
    names = ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code"))
    found = (getattr(owner, name, None) for owner, name in names)
    return next((status for status in found if isinstance(status, int)), 0)
