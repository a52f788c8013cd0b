"""Ranges: parts of remote files, cut from rows, fetched many at a time, and asked for again where that failed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import FileMissing, PinfeedError, ReadError
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import run_of
from pinfeed.stores.formats.row_layout import RowLayout

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

# Of one request, at most; a multiple of every itemsize.
RANGE_BYTES = 2 << 20
# Of the answers that are there at a time.
WINDOW_BYTES = 16 << 20
# At a time; what a file system needs for each of them is small beside a range.
_REQUESTS = 512
# Between two rows, so many cost less than one more request.
_GAP_BYTES = 64 << 10
# Before the second attempt; twice as long before each that follows.
_FIRST_DELAY_S = 0.5

# Errors that time does not mend.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ValueError)
# Those of HTTP's errors of the client that it does.
_BUSY = (408, 429)


@dataclass(frozen=True)
class RemoteFile:
    """A file, and the file system of fsspec that has it."""

    url: str
    fs: Any
    path: str
    """As the file system calls it."""

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, eq=False)
class ByteRange:
    """What one request fetches: rows that are close together, or a part of one large row."""

    file: RemoteFile
    begin: int
    end: int
    columns: slice
    """Which bytes of each row."""
    rows: Rows
    """Ascending, counted from the first row of the piece; they may repeat."""
    positions: Rows

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.end}"

    def copy(self, values: Bytes, target: Bytes) -> None:
        """Bring the rows, of which ``values`` are the bytes, to their positions in ``target``, shape (n, row_nbytes)."""
        width = self.columns.stop - self.columns.start
        values, step = values.reshape(-1, width), max(1, RANGE_BYTES // width)
        for i in range(0, len(self.rows), step):
            # Rows that repeat may be more than was read.
            rows, positions = self.rows[i : i + step], self.positions[i : i + step]
            target[run_of(positions) or positions, self.columns] = values[run_of(rows) or rows]


def pieces_of(
    file: RemoteFile, layout: RowLayout, rows: Rows, positions: Rows
) -> Iterator[ByteRange]:
    """Cut rows of a file, in any order, into what is fetched at a time."""
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
            # More than once only where a single row is more than a range.
            stop = min(start + RANGE_BYTES, nbytes)
            begin, end = (
                layout.offset + first * nbytes + start,
                layout.offset + last * nbytes + stop,
            )
            yield ByteRange(
                file, begin, end, slice(start, stop), rows[lo:hi] - first, positions[lo:hi]
            )


def _cuts(rows: Rows, nbytes: int) -> list[int]:
    """Where pieces of ascending rows begin: behind a gap, and where a piece would be more than a range."""
    is_far = np.diff(rows, prepend=rows[0]) - 1 > _GAP_BYTES // nbytes
    is_far[0] = True
    first_of_group = rows[is_far][np.cumsum(is_far) - 1]
    block = (rows - first_of_group) // max(1, RANGE_BYTES // nbytes)
    cuts: list[int] = np.flatnonzero(is_far | (np.diff(block, prepend=0) != 0)).tolist()
    return cuts


def windows_of(pieces: Iterator[ByteRange]) -> Iterator[list[ByteRange]]:
    """As many pieces at a time as there may be answers."""
    window: list[ByteRange] = []
    nbytes = 0
    for piece in pieces:
        nbytes += piece.end - piece.begin
        if nbytes > WINDOW_BYTES or len(window) == _REQUESTS:
            yield window
            window, nbytes = [], piece.end - piece.begin
        window.append(piece)
    if window:
        yield window


def read(pieces: list[ByteRange]) -> list[Any]:
    """What the file systems give for each piece: bytes, or an error."""
    answers: dict[ByteRange, Any] = {}
    for fs in {id(piece.file.fs): piece.file.fs for piece in pieces}.values():
        mine = [piece for piece in pieces if piece.file.fs is fs]
        paths = [piece.file.path for piece in mine]
        begins = [piece.begin for piece in mine]
        ends = [piece.end for piece in mine]
        found = tried(fs.cat_ranges, paths, begins, ends, on_error="return")
        answers |= zip(
            mine, [found] * len(mine) if isinstance(found, Exception) else found, strict=True
        )
    return [_whole(piece, answers[piece]) for piece in pieces]


def tried(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call gives, or the error that it raises."""
    try:
        return call(*args, **options)
    except Exception as error:
        # Whatever a file system raises.
        return error


def answers_of(
    asked: list[T], ask: Callable[[list[T]], list[Any]], attempts: int
) -> Iterator[tuple[T, Any]]:
    """Ask, and ask again, later, for what failed. Answers come in any order; none is kept here.

    Args:
        asked: What errors are about.
        ask: Gives an answer or an error for each.
        attempts: How often it is called, at most.

    Raises:
        ReadError: An error that does not pass, or did not in so many attempts.
        FileMissing: A file is not there.
        PinfeedError: As ``ask`` gives it.
    """
    for attempt in itertools.count(1):
        answers = list(zip(asked, ask(asked), strict=True))
        asked = []
        while answers:
            one, answer = answers.pop()
            if not isinstance(answer, BaseException):
                yield one, answer
            elif isinstance(answer, PinfeedError):
                raise answer
            elif isinstance(answer, FileNotFoundError):
                raise FileMissing(f"{one}: the file is not there any more") from answer
            elif attempt == attempts or _is_final(answer):
                todo = (
                    f"; RemoteStore(..., attempts={2 * attempts}) tries longer"
                    if not _is_final(answer)
                    else ""
                )
                raise ReadError(
                    f"{one}: {type(answer).__name__}: {answer} (attempt {attempt} of {attempts}{todo})"
                ) from answer
            else:
                asked.append(one)
            # Its memory is that of the next one.
            del answer
        if not asked:
            return
        time.sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))


def _whole(piece: ByteRange, answer: Any) -> Any:
    """The answer, or an error where it is not as long as the piece."""
    if isinstance(answer, BaseException) and _status(answer) != 416:
        # Which says that there is nothing.
        return answer
    n, wanted = 0 if isinstance(answer, BaseException) else len(answer), piece.end - piece.begin
    if n == wanted:
        return answer
    if n < wanted:
        return ReadError(
            f"{piece}: only {n} of them are there: the file has shrunk; was it written anew while it was streamed?"
        )
    return ReadError(
        f"{piece}: got {n} bytes; its server does not give parts of files: copy it to one that does"
    )


def _is_final(error: BaseException) -> bool:
    status = _status(error)
    return isinstance(error, _FINAL) or (400 <= status < 500 and status not in _BUSY)


def _status(error: Any) -> int:
    """Of an answer by HTTP; 0 for anything else."""
    status = getattr(error, "status", 0)
    return status if isinstance(status, int) else 0
