"""Rows: a torch dataset over memory maps, as programs use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from pinfeed.stores.store import run_of


class Rows(Dataset[torch.Tensor]):
    """Rows of mapped .npy files, as tensors that own their memory.

    ``rows[index]`` is one row, and ``rows[indices]`` with an array are many.

    Args:
        paths: The files, in the order of their rows.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        # np.memmap itself is slower to index.
        self._maps = [np.load(path, mmap_mode="r").view(np.ndarray) for path in paths]
        self._ends = np.cumsum([len(rows) for rows in self._maps])
        self._dtype = self._maps[0].dtype.newbyteorder("=")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: Any) -> torch.Tensor:
        if isinstance(rows, np.ndarray):
            return torch.from_numpy(self.gather(rows))
        number = int(np.searchsorted(self._ends, rows, side="right"))
        # A negative index counts from the end of the file.
        row = self._maps[number][rows - self._ends[number]]
        return torch.from_numpy(np.array(row, self._dtype))

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Return rows as an array: by a slice if they are consecutive, else by ``np.take``."""
        if len(self._maps) == 1:
            if (run := run_of(rows)) is not None:
                return np.array(self._maps[0][run], self._dtype)
            return np.take(self._maps[0], rows, axis=0).astype(self._dtype, copy=False)
        out = np.empty((len(rows), *self._maps[0].shape[1:]), self._dtype)
        shard_of = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(shard_of):
            in_shard = shard_of == number
            shard = self._maps[number]
            out[in_shard] = shard[rows[in_shard] - (self._ends[number] - len(shard))]
        return out
