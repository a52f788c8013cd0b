"""The comparison of ``pinfeed bench``: a torch DataLoader over memory maps, as programs use it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, StackDataset

from pinfeed.rows.batches import RowBatches
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


def parts_of(batch: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a batch: one, or one of each source."""
    return batch if isinstance(batch, (tuple, list)) else (batch,)


class _IndexSampler:
    """A sampler that yields the row indices of each batch of an epoch."""

    def __init__(self, batches: RowBatches, *, as_lists: bool) -> None:
        self._batches = batches
        self._as_lists = as_lists
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for indices in self._batches.epoch(self.epoch):
            rows = indices.rows()
            yield rows.tolist() if self._as_lists else rows


@contextlib.contextmanager
def loader_epochs(
    sources: Sequence[Sequence[str]],
    batches: RowBatches,
    device: str,
    *,
    n_workers: int,
    by_row: bool,
) -> Iterator[Callable[[int], Iterable[Any]]]:
    """Make a DataLoader; yield a function that returns its batches of an epoch, on the device.

    The workers continue from epoch to epoch, and end with the context.

    Args:
        sources: The files of each source.
        batches: The row indices of each batch.
        device: Name of the torch device.
        n_workers: Number of worker processes.
        by_row: Whether an item is a row, and the loader stacks rows as in most programs; False
            makes an item a whole batch.
    """
    indices = _IndexSampler(batches, as_lists=by_row)
    options: dict[str, Any] = {"sampler": indices, "batch_size": None}
    if by_row:
        options = {"batch_sampler": indices}
    if n_workers:
        options |= {"num_workers": n_workers, "persistent_workers": True, "prefetch_factor": 4}
    on_gpu = device != "cpu"
    datasets = list(map(Rows, sources))
    dataset = StackDataset(*datasets) if len(datasets) > 1 else datasets[0]
    loaders = [DataLoader(dataset, pin_memory=on_gpu, **options)]

    def epoch(number: int) -> Iterator[Any]:
        indices.epoch = number
        for batch in loaders[0]:
            if on_gpu:
                moved = [part.to(device, non_blocking=True) for part in parts_of(batch)]
                yield moved if len(moved) > 1 else moved[0]
            else:
                yield batch

    try:
        yield epoch
    finally:
        # Dropping the last reference ends the workers and unmaps the files.
        loaders.clear()
