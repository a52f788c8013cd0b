"""library_errors(): errors of other libraries, raised as StoreError with the path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pinfeed.errors import PinfeedError, StoreError, described


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
