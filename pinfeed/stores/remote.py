"""RemoteStore: rows of .npy files that fsspec reaches: object stores, web servers, archives."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from pinfeed.errors import (
    ArgumentError,
    ClosedError,
    FileMissing,
    MissingDependency,
    StoreError,
    described,
)
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, run_of
from pinfeed.stores.byte_ranges import (
    RANGE_BYTES,
    WINDOW_BYTES,
    ByteRange,
    RemoteFile,
    answers_of,
    pieces_of,
    read,
    tried,
    windows_of,
)
from pinfeed.stores.formats.npy import header_of
from pinfeed.stores.formats.row_layout import RowLayout
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.sharded_file import ShardedStore, as_bytes
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.threads.pool import ThreadPool
from pinfeed.validation.arguments import whole_number

# Rows that are brought into the order of the file at a time.
_SORTED = 1 << 16
# At a time, each with many requests: one asks while the other one copies.
_GATHERS = 2
_HEADERS_AT_ONCE = 16
# What a file system may read ahead.
_HEADER_BYTES = 64 << 10


# No shard is ever open: each request is on its own.
class RemoteStore(ShardedStore[NoReturn]):
    """Rows of .npy files that are elsewhere, read-only. Any thread may gather.

    Neighbouring rows are fetched by one request, and many requests wait at the same time where the
    file system can do that (those of object stores and web servers can). Raw and safetensors files
    have to be local: see ``MmapStore``.

    Args:
        path: A URL (``"s3://bucket/x.npy"``), a pattern (``"gs://bucket/x-*.npy"``, in sorted
            order) or a sequence of URLs; several are shards of one store and may differ in their
            number of rows.
        dtype: Take the items for this dtype of the same size: ``"bfloat16"``, which a .npy file
            cannot name.
        storage_options: What fsspec's file system is to know: credentials, endpoints.
        attempts: How often a request is made, before an error that may pass (a lost connection, a
            busy server) is raised.

    Raises:
        ArgumentError: Not a URL, of a file system that fsspec does not know, or ``attempts``
            below 1.
        MissingDependency: fsspec is not installed, or not what it needs for such a URL.
        FileMissing: A file, or every file of a pattern, is missing.
        ReadError: A file cannot be read.
        StoreError: Not a .npy file, truncated, no rows, Fortran order, a dtype that torch has not,
            or shards that do not match.
    """

    resident_bytes = _GATHERS * (WINDOW_BYTES + 4 * RANGE_BYTES)
    """The answers, what a client puts them together of, and what brings rows into order."""
    _PROCESS_STATE: ClassVar[tuple[str, ...]] = (*ShardedStore._PROCESS_STATE, "_gathers")

    def __init__(
        self,
        path: str | Sequence[str],
        *,
        dtype: npt.DTypeLike | None = None,
        storage_options: Mapping[str, Any] | None = None,
        attempts: int = 5,
    ) -> None:
        self._attempts = whole_number(attempts, "attempts")
        wanted = None if dtype is None else dtype_of(dtype, "RemoteStore")
        self._files = self._find(path, dict(storage_options or {}))
        super().__init__(self._headers(wanted))

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def gather_at(self, rows: Rows, out: Array, positions: Rows) -> None:
        """Copy rows, shape (m,), into ``out[positions]``; ``out`` is C-contiguous, shape (n, *row_shape), of the store's dtype.

        The caller has checked all three.

        Raises:
            ReadError: A file has shrunk, or cannot be read.
            FileMissing: A file has gone since the store was opened.
        """
        if self._closed:
            raise ClosedError(f"{self!r} is closed; open it again")
        target = as_bytes(out)
        step = _SORTED if run_of(rows) is None else max(1, len(rows))
        for i in range(0, len(rows), step):
            for window in windows_of(self._pieces(rows[i : i + step], positions[i : i + step])):
                with self._gathers:
                    self._fetch(window, target)

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._gathers = threading.BoundedSemaphore(_GATHERS)

    def _fetch(self, window: list[ByteRange], target: npt.NDArray[np.uint8]) -> None:
        for piece, answer in answers_of(window, read, self._attempts):
            values = np.frombuffer(answer, np.uint8)
            if self._swapped:
                values = values.view(self._layouts[0].dtype).byteswap().view(np.uint8)
            piece.copy(values, target)

    def _pieces(self, rows: Rows, positions: Rows) -> Iterator[ByteRange]:
        for number, shard_rows, places in self._by_shard(rows):
            yield from pieces_of(
                self._files[number], self._layouts[number], shard_rows, positions[places]
            )

    def _find(self, path: str | Sequence[str], options: dict[str, Any]) -> list[RemoteFile]:
        if isinstance(path, (str, os.PathLike)):
            urls = [path]
        else:
            try:
                urls = list(path)
            except TypeError:
                raise ArgumentError(
                    f"path={path!r}: expected a URL, a pattern or a sequence of URLs"
                ) from None
            if not urls:
                raise ArgumentError(
                    "an empty list of files; expected at least one URL of a .npy file"
                )
        files = [_file(url, options) for url in urls]
        if not isinstance(path, str) or not _is_pattern(files[0]):
            return files
        [(_, found)] = answers_of(
            files, lambda files: [tried(_matches, file) for file in files], self._attempts
        )
        if not found:
            raise FileMissing(f"{path}: no file matches this pattern")
        return list(found)

    def _headers(self, dtype: np.dtype[Any] | None) -> list[RowLayout]:
        # A file may stand twice, and one of fsspec may not be read by two threads.
        different = list(dict.fromkeys(self._files))
        header = functools.partial(tried, _header, dtype=dtype)
        # the first one alone: it opens the session that the others share
        found = dict(
            answers_of(
                different[:1], lambda files: [header(file) for file in files], self._attempts
            )
        )
        if different[1:]:
            with ThreadPool(min(_HEADERS_AT_ONCE, len(different) - 1), "pinfeed-remote") as pool:
                found |= answers_of(
                    different[1:], lambda files: list(pool.map(header, files)), self._attempts
                )
        return [found[file] for file in self._files]


def _is_pattern(file: RemoteFile) -> bool:
    """Whether its name has wildcards; a question mark is one, except in a web address."""
    return re.search(r"[*[]" if "http" in file.fs.protocol else r"[*?[]", file.path) is not None


def _matches(file: RemoteFile) -> list[RemoteFile]:
    """The files that its name matches, or itself where it is called so."""
    fs = file.fs
    if fs.exists(file.path):
        return [file]
    return [RemoteFile(fs.unstrip_protocol(name), fs, name) for name in sorted(fs.glob(file.path))]


def _header(file: RemoteFile, dtype: np.dtype[Any] | None) -> RowLayout:
    try:
        with file.fs.open(file.path, "rb", block_size=_HEADER_BYTES) as opened:
            size = getattr(opened, "size", None) or file.fs.size(file.path)
            if size is None:
                raise StoreError(
                    f"{file}: its server does not tell its size and gives no parts of it; copy it to one that does"
                )
            layout = header_of(file.url, opened, size, dtype)
            if "http" in file.fs.protocol:
                # A server that always sends all of the file is found out here, where fsspec does
                # not take it.
                opened.seek(size - 1)
                opened.read(1)
            return layout
    except FileNotFoundError as error:
        cause = error.__cause__
        is_missing = (
            cause is None
            or isinstance(cause, FileNotFoundError)
            or getattr(cause, "status", None) == 404
        )
        if "http" in file.fs.protocol and not is_missing:
            raise cause from None  # type: ignore[misc]  # fsspec says "not found" of a server that cannot be reached as well
        raise FileMissing(
            f"{file}: no such file; expected a .npy file, as numpy.save writes it"
        ) from None
    except IsADirectoryError:
        raise StoreError(
            f"{file} is a directory; expected a .npy file, or a pattern such as {file}/*.npy"
        ) from None


def _file(url: str, options: dict[str, Any]) -> RemoteFile:
    if not has_protocol(url):
        raise ArgumentError(
            f"{url!r} is not a URL; expected a string such as 's3://bucket/x.npy' (pathlib takes a slash away); MmapStore opens local files"
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(
            f'{url}: fsspec is needed; pip install "pinfeed[remote]"'
        ) from error
    try:
        return RemoteFile(url, *url_to_fs(url, **options))
    except ImportError as error:
        raise MissingDependency(f"{url}: {error}") from error
    except FileNotFoundError as error:
        # An archive that is to be looked into.
        raise FileMissing(f"{url}: no such file ({described(error)})") from None
    except ValueError as error:
        raise ArgumentError(
            f"{url}: {error}; expected a URL that fsspec knows, such as 's3://bucket/x.npy'"
        ) from error
