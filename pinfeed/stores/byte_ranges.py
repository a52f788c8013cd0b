"""ByteRange: a part of a remote file that one request fetches.

Each answer is checked to be of the opened file. A web server sends the validators of the file with
each answer. For other file systems, pinfeed asks for the validators after the answers have arrived:
if they are as before, the answers are older.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import ReadError
from pinfeed.memory.pages import Bytes
from pinfeed.rows.orders import Rows
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.retries import result_or_error, status_of
from pinfeed.stores.store import run_of

# Most bytes of one request; a multiple of every itemsize.
RANGE_BYTES = 2 << 20
# Bytes of the answers that are in memory at the same time.
GROUP_BYTES = 16 << 20
# Requests that run at the same time. The file system needs little memory for each, compared with a
# range.
_MAX_REQUESTS = 512
# Unused bytes between two rows that cost less than one more request.
_GAP_BYTES = 64 << 10

# Fields of ``info`` that change when a file is replaced, the most reliable one first. Fields that
# also change with the metadata of a file, such as the time of its last update, are not among them.
_VALIDATORS = (
    *("generation", "ETag", "etag", "sha", "blob_id", "CRC", "LastModified", "last_modified"),
    *("Last-Modified", "mtime", "modified", "modify", "modificationTime", "created"),
)

_PARTIAL_CONTENT = 206
_NOT_FOUND = 404
# HTTP status of a range that begins after the end of the file.
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class RemoteFile:
    """File of an fsspec file system."""

    url: str
    fs: Any
    path: str
    """Path within the file system."""
    version: tuple[tuple[str, str], ...] = ()
    """Size and validator of the file when it was opened; empty before."""

    def __str__(self) -> str:
        return self.url

    @property
    def is_http(self) -> bool:
        """Whether a web server has the file."""
        return "http" in self.fs.protocol

    def check_version(self, found: Mapping[str, Any]) -> None:
        """Check that a file is still the one that was opened.

        Args:
            found: Size and validators, as ``info`` of the file system returns them. Those that are
                missing are not compared.

        Raises:
            ReadError: If the file has been replaced.
        """
        for name, opened in self.version:
            now = _plain(found.get(name))
            if now and now != opened:
                raise ReadError(
                    f"{self}: the file was replaced while it was open ({name} was {opened}, and is "
                    f"{now} now); open it again, and write new data to new files"
                )


def version_of(info: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the size and the most reliable validator of a file, by their names in ``info``."""
    validator = next((name for name in _VALIDATORS if _plain(info.get(name))), None)
    names = ("size",) if validator is None else (validator, "size")
    return tuple((name, _plain(info[name])) for name in names)


def _plain(value: Any) -> str:
    """Return a validator as a string; empty if it is unknown."""
    # A proxy that compresses or forwards answers makes an ETag weak.
    return "" if value is None else str(value).removeprefix("W/")


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


def groups_of(ranges: Iterator[ByteRange]) -> Iterator[list[ByteRange]]:
    """Yield groups of ranges whose answers fit in memory at the same time."""
    group: list[ByteRange] = []
    nbytes = 0
    for wanted in ranges:
        range_nbytes = wanted.end - wanted.begin
        nbytes += range_nbytes
        if nbytes > GROUP_BYTES or len(group) == _MAX_REQUESTS:
            yield group
            group = []
            nbytes = range_nbytes
        group.append(wanted)
    if group:
        yield group


def fetch(ranges: list[ByteRange]) -> list[Any]:
    """Fetch ranges, and return the bytes of each, or an error."""
    answers: dict[ByteRange, Any] = {}
    for fs in {id(wanted.file.fs): wanted.file.fs for wanted in ranges}.values():
        of_fs = [wanted for wanted in ranges if wanted.file.fs is fs]
        if of_fs[0].file.is_http:
            found = _at_the_same_time(fs, [_get(fs, wanted) for wanted in of_fs])
        else:
            found = _ask_file_system(fs, of_fs)
        answers |= zip(of_fs, found, strict=True)
    return [_checked(wanted, answers[wanted]) for wanted in ranges]


def _ask_file_system(fs: Any, ranges: list[ByteRange]) -> list[Any]:
    """Fetch ranges of files of one file system, and then compare the versions of the files."""
    paths = [wanted.file.path for wanted in ranges]
    begins = [wanted.begin for wanted in ranges]
    ends = [wanted.end for wanted in ranges]
    found = result_or_error(fs.cat_ranges, paths, begins, ends, on_error="return")
    if isinstance(found, Exception):
        return [found] * len(ranges)
    files = list(dict.fromkeys(wanted.file for wanted in ranges if wanted.file.version))
    problems = {
        file: info if isinstance(info, Exception) else result_or_error(file.check_version, info)
        for file, info in zip(files, _infos(fs, files), strict=True)
    }
    return [
        problems.get(wanted.file) or answer for wanted, answer in zip(ranges, found, strict=True)
    ]


def _infos(fs: Any, files: Sequence[RemoteFile]) -> list[Any]:
    """Return ``info`` of each file, or an error, without the listings that fsspec keeps."""
    for file in files:
        fs.invalidate_cache(file.path)
    if not getattr(fs, "async_impl", False):
        return [result_or_error(fs.info, file.path) for file in files]
    return _at_the_same_time(fs, [fs._info(file.path) for file in files])


def _at_the_same_time(fs: Any, coroutines: Sequence[Any]) -> list[Any]:
    """Run coroutines of a file system, and return the result or the error of each."""
    from fsspec.asyn import sync

    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    found: list[Any] = sync(fs.loop, gather)
    return found


async def _get(fs: Any, wanted: ByteRange) -> bytes:
    """Fetch one range. fsspec does not return the headers of an answer, so it is not asked."""
    options = dict(fs.kwargs)
    headers = {
        **options.pop("headers", {}),
        "Accept-Encoding": "identity",
        "Range": f"bytes={wanted.begin}-{wanted.end - 1}",
    }
    session = await fs.set_session()
    url = fs.encode_url(wanted.file.path)
    async with session.get(url, headers=headers, **options) as answer:
        if answer.status == _NOT_FOUND:
            raise FileNotFoundError(wanted.file.path)
        answer.raise_for_status()
        content_range = answer.headers.get("Content-Range", "")
        found = {name: answer.headers.get(name) for name, _ in wanted.file.version}
        size = content_range.rpartition("/")[2]
        wanted.file.check_version(found | {"size": size if size.isdigit() else None})
        if answer.status != _PARTIAL_CONTENT and not content_range:
            raise _without_ranges(wanted, "the whole file")
        content: bytes = await answer.read()
        return content


def _checked(wanted: ByteRange, answer: Any) -> Any:
    """Return the answer, or an error if it is not as long as the range."""
    if isinstance(answer, BaseException):
        if status_of(answer) != _RANGE_NOT_SATISFIABLE:
            return answer
        return ReadError(
            f"{wanted}: these bytes do not exist, because the file has shrunk; do not rewrite a "
            "file while it is streamed"
        )
    n_wanted = wanted.end - wanted.begin
    if len(answer) > n_wanted and not wanted.file.is_http:
        return _without_ranges(wanted, f"{len(answer)} bytes")
    if len(answer) != n_wanted:
        # The file is as long as before, so a proxy or a connection has cut the answer.
        return ConnectionError(f"got {len(answer)} of {n_wanted} bytes")
    return answer


def _without_ranges(wanted: ByteRange, got: str) -> ReadError:
    return ReadError(
        f"{wanted}: got {got}, because the server does not support range requests; copy the file "
        "to a server that does"
    )
