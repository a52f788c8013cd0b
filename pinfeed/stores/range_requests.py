"""fetch(): requests ranges of remote files, and checks that each answer is of the opened file.

A web server sends the validators of the file with each answer. For other file systems, pinfeed asks
for the validators after the answers have arrived: if they are as before, the answers are older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pinfeed.errors import ReadError
from pinfeed.stores.byte_ranges import ByteRange
from pinfeed.stores.remote_file import RemoteFile
from pinfeed.stores.retries import result_or_error, status_of

_PARTIAL_CONTENT = 206
_NOT_FOUND = 404
# HTTP status of a range that begins after the end of the file.
_RANGE_NOT_SATISFIABLE = 416


def fetch(ranges: list[ByteRange]) -> list[Any]:
    """Fetch ranges, and return the bytes of each, or an error."""
    answers: dict[ByteRange, Any] = {}
    for fs in {id(wanted.file.fs): wanted.file.fs for wanted in ranges}.values():
        of_fs = [wanted for wanted in ranges if wanted.file.fs is fs]
        ask = _ask_web_server if of_fs[0].file.is_http else _ask_file_system
        answers |= zip(of_fs, ask(fs, of_fs), strict=True)
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


def _ask_web_server(fs: Any, ranges: list[ByteRange]) -> list[Any]:
    return _at_the_same_time(fs, [_get(fs, wanted) for wanted in ranges])


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
