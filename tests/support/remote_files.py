"""File systems of fsspec that fail or wait at the request of a test."""

import asyncio
import collections
import contextlib
import io
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec.core
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.implementations.memory import MemoryFileSystem

from pinfeed.stores import retries

# Start fsspec's thread now, because it stays, and would count as a leak of a test.
get_loop()


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # numpy warns of versions that old releases of numpy cannot read.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, array, version)
    return file.getvalue()


class Shaky(MemoryFileSystem):
    """Files in memory, behind a connection that fails at the request of a test."""

    protocol = "shaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[collections.deque[Any]] = collections.deque()
    """Result of each future request: an exception, a number of bytes, or None for a good answer."""
    requests: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("shaky:/"))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        if start:
            # Requests of headers are not recorded.
            self.requests.append((start, end or 0))
        return self._suffer(super().cat_file(path, start, end, **options))

    def _suffer(self, answer: bytes) -> bytes:
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, BaseException):
            raise fault
        return answer if fault is None else (answer + bytes(100))[:fault]


class Crowd(AsyncFileSystem):
    """Answers no request before ``Crowd.least`` are waiting at the same time."""

    protocol = "crowd"
    least = 1
    waiting = 0
    content = b""

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.content), "type": "file"}

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        if start == 0:
            # A header, which is read alone.
            return self.content[start:end]
        Crowd.waiting += 1
        while Crowd.waiting < self.least:
            await asyncio.sleep(0)
        return self.content[start:end]


fsspec.register_implementation("shaky", Shaky, clobber=True)


fsspec.register_implementation("crowd", Crowd, clobber=True)


def put(
    array: np.ndarray, url: str = "memory://x.npy", version: tuple[int, int] | None = None
) -> str:
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, npy(array, version))
    return url


PROTOCOLS = ["memory", "file"]


def urls_of(protocol: str, array: np.ndarray, tmp_path: Path, cuts: list[int]) -> list[str]:
    root = f"file://{tmp_path}" if protocol == "file" else f"{protocol}://data"
    return [
        put(array[start:stop], f"{root}/x-{i}.npy")
        for i, (start, stop) in enumerate(itertools.pairwise([0, *cuts, len(array)]))
    ]


@contextlib.contextmanager
def fresh_file_systems() -> Iterator[None]:
    """Empty file systems, and no delay before a request is repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "_FIRST_DELAY_S", 0)
        for fs in (MemoryFileSystem, Shaky):
            fs.store.clear()
        Shaky.faults.clear()
        Shaky.requests.clear()
        yield
        for fs in (MemoryFileSystem, Shaky):
            fs.store.clear()
