"""Libraries of file formats: their imports, and their errors."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from pinfeed.errors import MissingDependency, PinfeedError, StoreError, described


def imported(name: str, problem: str) -> Any:
    """Return a module of an optional library.

    Args:
        name: Name of the module.
        problem: Message of the error if the library is not installed.

    Raises:
        MissingDependency: If it is not.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(problem) from error


def check_names(names: Sequence[Any], place: str, advice: str) -> None:
    """Check that a table has columns with different names.

    Raises:
        StoreError: If several columns have the same name.
    """
    if len(set(names)) < len(names):
        raise StoreError(
            f"{place}: several columns have the same name: {', '.join(map(str, names))}; {advice}"
        )


@contextlib.contextmanager
def library_errors(place: str, library: str, expected: str) -> Iterator[None]:
    """Raise any error of a library that opens a file as ``StoreError``, with its cause.

    Libraries raise errors of many kinds for damaged files, most of them without the path.

    Args:
        place: The file, and the dataset or column, as the user named them.
        library: Name of the library.
        expected: End of the message: what is expected, and what to do.
    """
    try:
        yield
    except PinfeedError:
        raise
    except Exception as error:
        raise StoreError(
            f"{place}: {library} cannot open it ({described(error)}); expected {expected}"
        ) from error
