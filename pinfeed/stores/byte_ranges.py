"""ByteRange: a part of a remote file that one request fetches.

pinfeed groups rows into ranges, requests many ranges at a time, and repeats failed requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import FileMissing, PinfeedError, ReadError
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import run_of
from pinfeed.stores.formats.row_layout import RowLayout

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

# Most bytes of one request; a multiple of every itemsize.
RANGE_BYTES = 2 << 20
# Bytes of the answers that are in memory at the same time.
WINDOW_BYTES = 16 << 20
# Requests that run at the same time. The file system needs little memory for each, compared with a
# range.
_MAX_REQUESTS = 512
# Unused bytes between two rows that cost less than one more request.
_GAP_BYTES = 64 << 10
# Seconds before the second attempt; the delay doubles before each further attempt.
_FIRST_DELAY_S = 0.5

# Errors for which a further attempt is useless.
_FINAL_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    ValueError,
)
# HTTP client errors for which a further attempt may succeed: timeout, and too many requests.
_RETRIED_STATUSES = (408, 429)
# HTTP status of a range that begins after the end of the file.
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class RemoteFile:
    """File of an fsspec file system."""

    url: str
    fs: Any
    path: str
    """Path within the file system."""

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, eq=False)
class ByteRange:
    """Bytes that one request fetches: rows that are close together, or a part of a large row."""

    file: RemoteFile
    begin: int
    end: int
    columns: slice
    """Number of bytes of each row in the range."""
    rows: Rows
    """Rows in ascending order, counted from the first row of the range; they may repeat."""
    positions: Rows
    """Positions of the rows in the batch."""

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.end}"

    def copy(self, values: Bytes, target: Bytes) -> None:
        """Copy the rows of the range to their positions.

        Args:
            values: Bytes of the range.
            target: The batch as bytes, shape (n, row_nbytes).
        """
        width = self.columns.stop - self.columns.start
        values = values.reshape(-1, width)
        # Copied in steps, because repeated rows may have more bytes than the range.
        step = max(1, RANGE_BYTES // width)
        for i in range(0, len(self.rows), step):
            rows = self.rows[i : i + step]
            positions = self.positions[i : i + step]
            target[run_of(positions) or positions, self.columns] = values[run_of(rows) or rows]


def ranges_of(
    file: RemoteFile, layout: RowLayout, rows: Rows, positions: Rows
) -> Iterator[ByteRange]:
    """Cut rows of a file, in any order, into ranges."""
    nbytes = layout.row_nbytes
    if not nbytes or not len(rows):
        return
    if run_of(rows) is None:
        order = np.argsort(rows, kind="stable")
        rows, positions = rows[order], positions[order]
        cuts = _cuts(rows, nbytes)
    else:
        cuts = list(range(0, len(rows), max(1, RANGE_BYTES // nbytes)))
    for lo, hi in itertools.pairwise([*cuts, len(rows)]):
        first, last = int(rows[lo]), int(rows[hi - 1])
        for start in range(0, nbytes, RANGE_BYTES):
            # There is more than one start only if a single row is larger than a range.
            stop = min(start + RANGE_BYTES, nbytes)
            begin = layout.offset + first * nbytes + start
            end = layout.offset + last * nbytes + stop
            yield ByteRange(
                file, begin, end, slice(start, stop), rows[lo:hi] - first, positions[lo:hi]
            )


def _cuts(rows: Rows, nbytes: int) -> list[int]:
    """Return the positions in ascending rows at which ranges begin.

    A range begins after a gap, or where the previous range would become too large.
    """
    is_far = np.diff(rows, prepend=rows[0]) - 1 > _GAP_BYTES // nbytes
    is_far[0] = True
    first_of_group = rows[is_far][np.cumsum(is_far) - 1]
    block = (rows - first_of_group) // max(1, RANGE_BYTES // nbytes)
    cuts: list[int] = np.flatnonzero(is_far | (np.diff(block, prepend=0) != 0)).tolist()
    return cuts


def windows_of(ranges: Iterator[ByteRange]) -> Iterator[list[ByteRange]]:
    """Group ranges into windows whose answers fit in memory at the same time."""
    window: list[ByteRange] = []
    nbytes = 0
    for wanted in ranges:
        range_nbytes = wanted.end - wanted.begin
        nbytes += range_nbytes
        if nbytes > WINDOW_BYTES or len(window) == _MAX_REQUESTS:
            yield window
            window = []
            nbytes = range_nbytes
        window.append(wanted)
    if window:
        yield window


def fetch(ranges: list[ByteRange]) -> list[Any]:
    """Fetch ranges, and return the bytes of each, or an error."""
    answers: dict[ByteRange, Any] = {}
    for fs in {id(wanted.file.fs): wanted.file.fs for wanted in ranges}.values():
        of_fs = [wanted for wanted in ranges if wanted.file.fs is fs]
        paths = [wanted.file.path for wanted in of_fs]
        begins = [wanted.begin for wanted in of_fs]
        ends = [wanted.end for wanted in of_fs]
        found = result_or_error(fs.cat_ranges, paths, begins, ends, on_error="return")
        if isinstance(found, Exception):
            found = [found] * len(of_fs)
        answers |= zip(of_fs, found, strict=True)
    return [_checked(wanted, answers[wanted]) for wanted in ranges]


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
        attempts: Most attempts for one request.

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
            elif attempt < attempts and _is_worth_retrying(answer):
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
    advice = ""
    if _is_worth_retrying(error):
        advice = f"; use RemoteStore(..., attempts={2 * attempts}) for more attempts"
    raise ReadError(
        f"{subject}: {type(error).__name__}: {error} (attempt {attempt} of {attempts}{advice})"
    ) from error


def _checked(wanted: ByteRange, answer: Any) -> Any:
    """Return the answer, or an error if it is not as long as the range."""
    n = 0
    if not isinstance(answer, BaseException):
        n = len(answer)
    elif _status(answer) != _RANGE_NOT_SATISFIABLE:
        return answer
    n_wanted = wanted.end - wanted.begin
    if n == n_wanted:
        return answer
    if n < n_wanted:
        return ReadError(
            f"{wanted}: only {n} of these bytes exist, because the file has shrunk; do not "
            "rewrite a file while it is streamed"
        )
    return ReadError(
        f"{wanted}: got {n} bytes, because the server does not support range requests; copy the "
        "file to a server that does"
    )


def _is_worth_retrying(error: BaseException) -> bool:
    if isinstance(error, (PinfeedError, *_FINAL_ERRORS)):
        return False
    status = _status(error)
    return not 400 <= status < 500 or status in _RETRIED_STATUSES


def _status(error: Any) -> int:
    """Return the HTTP status of an error; 0 if it has none."""
    status = getattr(error, "status", 0)
    return status if isinstance(status, int) else 0
