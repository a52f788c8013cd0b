"""The .npy file that is streamed: every value of a row is the index of the row."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import conditions

_PIECE = 4 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of rows, with the batch size and the training step that are used for it.

    Attributes:
        n_products: Matrix products of a training step, the same for every loader and every run. Six
            took about 2 ms on one core of the machine for which they were chosen.
    """

    name: str
    row_shape: tuple[int, ...]
    batch_size: int
    n_products: int

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.row_shape) * 4


KINDS = {
    kind.name: kind
    for kind in (
        Kind("512 B", (128,), 1024, 2),
        Kind("4 KiB", (1024,), 1024, 6),
        Kind("image", (3, 224, 224), 64, 60),
    )
}


def create(path: Path, kind: Kind, nbytes: int) -> None:
    """Write a .npy file of float32 in which every value of a row is its index."""
    n_rows = nbytes // kind.row_nbytes
    if n_rows > 1 << 24:
        raise ValueError(
            f"{n_rows} rows; expected at most {1 << 24}, because float32 "
            "represents larger indices inexactly; pass a smaller --size"
        )
    step = max(1, _PIECE // kind.row_nbytes)
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, *kind.row_shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, n_rows, step):
            np.arange(start, min(start + step, n_rows), dtype="<f4").repeat(
                math.prod(kind.row_shape)
            ).tofile(file)
        file.flush()
        # Dirty pages cannot be dropped from the page cache.
        os.fsync(file.fileno())


def expected(rows: np.ndarray, row_shape: tuple[int, ...]) -> torch.Tensor:
    """Return the expected batch of these rows."""
    return (
        torch.from_numpy(rows.astype(np.float32))
        .reshape(-1, *[1] * len(row_shape))
        .expand(-1, *row_shape)
    )


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache.

    Raises:
        RuntimeError: If pages stay in the page cache, because a memory map uses them.
    """
    for path in paths:
        conditions.drop([path])
        if share := conditions.cached_share([path]):
            raise RuntimeError(
                f"{path}: {share:.1%} of the file stays in the page cache; pass a --dir on a disk"
            )
