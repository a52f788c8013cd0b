"""RemoteStore: rows of .npy files that fsspec reads from object stores, web servers or archives."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, FileMissing, MissingDependency, StoreError, described
from pinfeed.rows.runs import Runs
from pinfeed.stores.byte_ranges import (
    GROUP_BYTES,
    RANGE_BYTES,
    ByteRange,
    RemoteFile,
    fetch,
    groups_of,
    ranges_of,
    version_of,
)
from pinfeed.stores.file_store import RowLayout, ShardedStore, as_bytes
from pinfeed.stores.formats import FileFormat, register
from pinfeed.stores.libraries import imported
from pinfeed.stores.npy_header import header_of
from pinfeed.stores.paths import has_protocol, pattern_hint
from pinfeed.stores.retries import answers_of, require_connected, result_or_error
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.threads.pool import ThreadPool
from pinfeed.validation.arguments import whole_number

# Rows that are sorted into the order of the file at a time.
_MAX_SORTED_ROWS = 1 << 16
# Gathers that run at the same time, each with many requests: one waits while the other copies.
_MAX_GATHERS = 2
_HEADERS_AT_ONCE = 16
# The longest header, and what precedes it.
_HEADER_BYTES = (64 << 10) + 12


# No shard is ever open, because each request is independent.
class RemoteStore(ShardedStore):
    """Read-only rows of remote .npy files. Any thread may gather.

    One request reads rows that are close together in a file. If the file system supports it, as
    object stores and web servers do, many requests run at the same time. If a file is replaced
    while the store is open, a gather raises ``ReadError``, provided that the file system reports an
    ETag, a generation or a time of modification. Raw and safetensors files must be local; see
    ``NpyStore``.

    Args:
        path: A URL (``"s3://bucket/x.npy"``), a pattern (``"gs://bucket/x-*.npy"``, in sorted
            order) or a sequence of URLs. Several files are shards of one store and may differ in
            their number of rows.
        dtype: Dtype of the items, of the same size as in the file. By default, it is the dtype in
            the file. Only ``"bfloat16"`` needs this argument, because a .npy file cannot name it.
        storage_options: Arguments of fsspec's file system, such as credentials and endpoints:
            ``{"anon": True}`` for a public bucket of S3.
        attempts: Maximum attempts per request; then, the store raises the temporary error, such as
            a lost connection or a busy server.

    Raises:
        ArgumentError: If ``path`` is not a URL, fsspec does not know its file system,
            ``storage_options`` is not a dict, or ``attempts`` is below 1.
        MissingDependency: If fsspec, or a package that it needs for the URL, is not installed.
        FileMissing: If a file, or every file of a pattern, is missing.
        ReadError: If a file cannot be read.
        StoreError: If a file is not a .npy file, is truncated, has no rows, is in Fortran order, or
            has a dtype that torch does not have; or if shards do not match.

    Examples:
        >>> np.save("features.npy", np.zeros((1000, 8), "float32"))
        >>> from pathlib import Path
        >>> url = Path("features.npy").absolute().as_uri()  # or "s3://bucket/features-*.npy"
        >>> with pinfeed.RemoteStore(url) as store, pinfeed.Feeder(store, batch_size=100) as feeder:
        ...     n_batches = len(list(feeder))
    """

    reads_in_bulk = True
    resident_bytes = _MAX_GATHERS * (GROUP_BYTES + 4 * RANGE_BYTES)
    """Memory for answers, for the parts that a client joins into answers, and for sorting rows."""
    _PROCESS_STATE: ClassVar[tuple[str, ...]] = ("_gather_slots",)

    def __init__(
        self,
        path: str | Sequence[str],
        *,
        dtype: npt.DTypeLike | None = None,
        storage_options: Mapping[str, object] | None = None,
        attempts: int = 5,
    ) -> None:
        self._attempts = whole_number(attempts, "attempts")
        wanted = None if dtype is None else dtype_of(dtype, "RemoteStore")
        if not isinstance(storage_options, (Mapping, type(None))):
            raise ArgumentError(
                f"storage_options={type(storage_options).__name__}; expected a dict, such as "
                '{"anon": True}'
            )
        files = self._find(path, dict(storage_options or {}))
        found = self._headers(files, wanted)
        self._files = [file for file, _ in found]
        super().__init__([layout for _, layout in found])

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        Raises:
            ReadError: If a file was replaced or has shrunk, or cannot be read.
            FileMissing: If a file was removed since the store was opened.
        """
        self._require_open()
        target = as_bytes(out)
        for piece in runs.merged().pieces(_MAX_SORTED_ROWS):
            for group in groups_of(self._ranges(piece)):
                with self._gather_slots:
                    self._fetch(group, target)

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._gather_slots = threading.BoundedSemaphore(_MAX_GATHERS)

    def _fetch(self, group: list[ByteRange], target: npt.NDArray[np.uint8]) -> None:
        for byte_range, answer in answers_of(group, fetch, self._attempts):
            values = np.frombuffer(answer, np.uint8)
            if self._swapped:
                values = values.view(self._layouts[0].dtype).byteswap().view(np.uint8)
            byte_range.copy(values, target)

    def _ranges(self, runs: Runs) -> Iterator[ByteRange]:
        for number, part in self._by_shard(runs):
            file, layout = self._files[number], self._layouts[number]
            yield from ranges_of(file, layout, part.rows(), part.positions())

    def _find(self, path: str | Sequence[str], options: dict[str, Any]) -> list[RemoteFile]:
        """Return the files of a URL, a pattern or a sequence of URLs."""
        files = [_file(url, options) for url in _urls(path)]
        if not isinstance(path, str) or not _is_pattern(files[0]):
            return files
        found = self._ask_each(_matches, files)[files[0]]
        if not found:
            raise FileMissing(
                f"{path}: no file matches this pattern" + pattern_hint(path) * ("{" in path)
            )
        return list(found)

    def _headers(
        self, files: list[RemoteFile], dtype: np.dtype[Any] | None
    ) -> list[tuple[RemoteFile, RowLayout]]:
        """Read the version and the header of each file."""
        # A file may be given twice.
        distinct = list(dict.fromkeys(files))
        read_header = functools.partial(_header, dtype=dtype)
        # The first file is read alone, because it opens the session that the other files share.
        found = self._ask_each(read_header, distinct[:1])
        found |= self._ask_each(read_header, distinct[1:])
        return [found[file] for file in files]

    def _ask_each(
        self, call: Callable[[RemoteFile], Any], files: list[RemoteFile]
    ) -> dict[RemoteFile, Any]:
        """Return the result of a call for each file, which is repeated after temporary errors."""

        def ask(files: list[RemoteFile]) -> list[Any]:
            if len(files) == 1:
                return [_opened(call, files[0])]
            with ThreadPool(min(_HEADERS_AT_ONCE, len(files)), "pinfeed-remote") as pool:
                return list(pool.map(functools.partial(_opened, call), files))

        return dict(answers_of(files, ask, self._attempts)) if files else {}


@register
class RemoteFormat(FileFormat):
    """Remote .npy files, which are recognized by their URLs."""

    kind = "remote"
    usage = "RemoteStore(url) reads a remote file"
    store = RemoteStore
    requirement = "fsspec>=2024.2"


def _urls(path: str | Sequence[str]) -> list[str]:
    if isinstance(path, (str, os.PathLike)):
        return [path]
    try:
        urls = list(path)
    except TypeError:
        raise ArgumentError(
            f"path={path!r}: expected a URL, a pattern or a sequence of URLs"
        ) from None
    if not urls:
        raise ArgumentError("an empty list of files; expected at least one URL of a .npy file")
    return urls


def _is_pattern(file: RemoteFile) -> bool:
    """Return whether the path has wildcards; a question mark is one, except in a web address."""
    return re.search(r"[*[]" if file.is_http else r"[*?[]", file.path) is not None


def _matches(file: RemoteFile) -> list[RemoteFile]:
    """Return the files that match a pattern, or the file that has the pattern as its name."""
    fs = file.fs
    if fs.exists(file.path):
        return [file]
    return [RemoteFile(fs.unstrip_protocol(name), fs, name) for name in sorted(fs.glob(file.path))]


def _header(file: RemoteFile, dtype: np.dtype[Any] | None) -> tuple[RemoteFile, RowLayout]:
    """Return the file with its version, and the layout of its rows."""
    try:
        # The version comes first: if the file is replaced after this, its rows are refused.
        info = file.fs.info(file.path)
        if info.get("type") == "directory":
            raise StoreError(_no_file(file))
        size = info["size"]
        if size is None:
            raise StoreError(
                f"{file}: the server does not report its size, and does not support range "
                "requests; copy the file to a server that does"
            )
        start = _first_bytes(file, min(size, _HEADER_BYTES))
        layout = header_of(file.url, io.BytesIO(start), size, dtype)
        return dataclasses.replace(file, version=version_of(info)), layout
    except FileNotFoundError as error:
        cause = error.__cause__
        is_missing = (
            cause is None
            or isinstance(cause, FileNotFoundError)
            or getattr(cause, "status", None) == 404
        )
        if file.is_http and not is_missing:
            # fsspec also says "not found" if it cannot reach the server.
            raise cause from None  # type: ignore[misc]
        raise FileMissing(
            f"{file}: no such file; expected a .npy file, as numpy.save writes it"
            + pattern_hint(file.url) * ("{" in file.url or _is_pattern(file))
        ) from None
    except IsADirectoryError:
        raise StoreError(_no_file(file)) from None


def _first_bytes(file: RemoteFile, n: int) -> bytes:
    if not n:
        return b""
    no_rows = np.empty(0, np.int64)
    [answer] = fetch([ByteRange(file, 0, n, slice(0, 0), no_rows, no_rows)])
    if isinstance(answer, BaseException):
        raise answer
    return bytes(answer)


def _no_file(file: RemoteFile) -> str:
    url = file.url.rstrip("/")
    return (
        f"{file} is a directory, a bucket or a prefix of names; expected a .npy file, or a pattern "
        f"such as {url}/*.npy"
    )


def _opened(call: Callable[[RemoteFile], Any], file: RemoteFile) -> Any:
    """Return the result of a call that opens a file, or its error."""
    answer = result_or_error(call, file)
    if not isinstance(answer, Exception):
        return answer
    return result_or_error(require_connected, file, answer) or answer


def _file(url: str, options: dict[str, Any]) -> RemoteFile:
    if not has_protocol(url):
        raise ArgumentError(
            f"{url!r} is not a URL; expected a string such as 's3://bucket/x.npy' (pathlib "
            "removes a slash); for local files, use NpyStore"
        )
    fsspec = imported("fsspec.core", url)
    try:
        return RemoteFile(url, *fsspec.url_to_fs(url, **options))
    except TypeError as error:
        raise ArgumentError(
            f"{url}: {error}; storage_options has {sorted(options)}; expected arguments of "
            "fsspec's file system for this URL"
        ) from error
    except ImportError as error:
        raise MissingDependency(f"{url}: {error}") from error
    except FileNotFoundError as error:
        # The archive that contains the file does not exist.
        raise FileMissing(f"{url}: no such file ({described(error)})") from None
    except ValueError as error:
        raise ArgumentError(
            f"{url}: {error}; expected a URL that fsspec knows, such as 's3://bucket/x.npy'"
        ) from error
