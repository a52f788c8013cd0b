"""The .npy file that is streamed: rows that hold their own number, in the page cache or dropped from it."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_PIECE = 4 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of rows, and what a training loop does with them."""

    name: str
    row_shape: tuple[int, ...]
    batch_size: int
    step_s: float
    """About what a step takes, in seconds."""

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.row_shape) * 4


KINDS = {
    kind.name: kind
    for kind in (Kind("512 B", (128,), 1024, 2e-3), Kind("4 KiB", (1024,), 1024, 2e-3), Kind("image", (3, 224, 224), 64, 20e-3))
}


def create(path: Path, kind: Kind, nbytes: int) -> None:
    """Write a .npy of float32 in which every value of a row is the number of the row."""
    n_rows = nbytes // kind.row_nbytes
    if n_rows > 1 << 24:
        raise ValueError(f"{n_rows} rows; float32 tells numbers apart up to {1 << 24}: give a smaller --size")
    step = max(1, _PIECE // kind.row_nbytes)
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, *kind.row_shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, n_rows, step):
            np.arange(start, min(start + step, n_rows), dtype="<f4").repeat(math.prod(kind.row_shape)).tofile(file)
        file.flush()
        os.fsync(file.fileno())  # dirty pages could not be dropped


def expected(rows: np.ndarray, row_shape: tuple[int, ...]) -> torch.Tensor:
    """What a batch of these rows holds."""
    return torch.from_numpy(rows.astype(np.float32)).reshape(-1, *[1] * len(row_shape)).expand(-1, *row_shape)


def read_through(paths: Iterable[Path]) -> None:
    """Bring files into the page cache."""
    buffer = bytearray(_PIECE)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache.

    Raises:
        RuntimeError: Something of them is still there, as it is while a memory map uses it.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            for _ in range(20):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                if not (share := cached_share(path)):
                    break
                time.sleep(0.05)  # a page that somebody is just using is passed over
            else:
                raise RuntimeError(f"{path}: {share:.1%} of it stays in the page cache: give a --dir on a disk")
        finally:
            os.close(descriptor)


def cached_share(path: Path) -> float:
    """Share of a file that is in the page cache, by mincore(2).

    A read with RWF_NOWAIT would tell as well, but has the kernel bring in the page that it asks for: the next one would find it.
    """
    array = np.memmap(path, np.uint8, "r")
    resident = np.zeros(-(-len(array) // mmap.PAGESIZE), np.uint8)
    addresses = [ctypes.c_void_p(of.ctypes.data) for of in (array, resident)]
    if ctypes.CDLL(None, use_errno=True).mincore(addresses[0], ctypes.c_size_t(len(array)), addresses[1]) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return float((resident & 1).mean())
