"""What people write without pinfeed: a torch DataLoader over memory maps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pinfeed.rows.batches import RowBatches
from pinfeed.stores.base import run_of


class Rows(Dataset[torch.Tensor]):
    """Rows of .npy files that are mapped: ``rows[number]`` is one of them, ``rows[numbers]`` are many, as an owning tensor.

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
        # Counted from the end.
        return torch.from_numpy(
            np.array(self._maps[number][rows - self._ends[number]], self._dtype)
        )

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Rows as an array: a slice of the map where they are consecutive, and numpy's fastest way where they are not."""
        if len(self._maps) == 1:
            if (run := run_of(rows)) is not None:
                return np.array(self._maps[0][run], self._dtype)
            return np.take(self._maps[0], rows, axis=0).astype(self._dtype, copy=False)
        out = np.empty((len(rows), *self._maps[0].shape[1:]), self._dtype)
        shard_of = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(shard_of):
            there = shard_of == number
            out[there] = self._maps[number][
                rows[there] - (self._ends[number] - len(self._maps[number]))
            ]
        return out


class _Together(Dataset[tuple[torch.Tensor, ...]]):
    """Rows of several sources, as a tuple."""

    def __init__(self, sources: Sequence[Rows]) -> None:
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sources[0])

    def __getitem__(self, rows: Any) -> tuple[torch.Tensor, ...]:
        return tuple(source[rows] for source in self._sources)


def _dataset(sources: Sequence[Sequence[str]]) -> Dataset[Any]:
    return Rows(sources[0]) if len(sources) == 1 else _Together([Rows(paths) for paths in sources])


def parts_of(batch: Any) -> Sequence[torch.Tensor]:
    """The tensors of a batch: one, or one of each source."""
    return batch if isinstance(batch, (tuple, list)) else (batch,)


class _Numbers:
    """A sampler: the row numbers of each batch of an epoch, drawn when they are asked for."""

    def __init__(self, batches: RowBatches, *, as_lists: bool) -> None:
        self._batches = batches
        self._as_lists = as_lists
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for indices in self._batches.epoch(self.epoch):
            rows = indices.rows()
            yield rows.tolist() if self._as_lists else rows

    def __len__(self) -> int:
        return len(self._batches)


@contextlib.contextmanager
def loader_epochs(
    sources: Sequence[Sequence[str]],
    batches: RowBatches,
    device: str,
    *,
    n_workers: int,
    by_row: bool,
) -> Iterator[Callable[[int], Iterable[Any]]]:
    """A DataLoader's epochs on the device, by their number; its workers stay from epoch to epoch, and end with the context.

    Args:
        sources: The files of each source.
        batches: Which rows.
        device: As torch writes it.
        n_workers: Worker processes.
        by_row: Whether an item is a row, and the loader stacks them, as most programs have it; or a
            whole batch.
    """
    numbers = _Numbers(batches, as_lists=by_row)
    how: dict[str, Any] = (
        {"batch_sampler": numbers} if by_row else {"sampler": numbers, "batch_size": None}
    )
    if n_workers:
        how |= {"num_workers": n_workers, "persistent_workers": True, "prefetch_factor": 4}
    on_gpu = device != "cpu"
    loaders = [DataLoader(_dataset(sources), pin_memory=on_gpu, **how)]

    def epoch(number: int) -> Iterator[Any]:
        numbers.epoch = number
        for batch in loaders[0]:
            if on_gpu:
                moved = [part.to(device, non_blocking=True) for part in parts_of(batch)]
                yield moved if len(moved) > 1 else moved[0]
            else:
                yield batch

    try:
        yield epoch
    finally:
        # The last reference: the workers end, and nothing stays mapped.
        loaders.clear()
