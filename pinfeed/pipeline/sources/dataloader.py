"""Batches of a torch DataLoader, or of another iterable of batches, as a source."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, WorkerError
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch
from pinfeed.pipeline.sources.guarded import guarded
from pinfeed.rows.epoch_hooks import EpochHooks
from pinfeed.tensors.pytree import flatten
from pinfeed.validation.suggestions import is_array_like


class HostLeaf:
    """A leaf of a loader's batch: a tensor on the host, or an object that moves itself, which has neither shape nor dtype."""

    __slots__ = ("host_value",)

    def __init__(self, value: Any) -> None:
        self.host_value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.host_value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        from pinfeed.tensors.numpy_torch import NUMPY

        return NUMPY[self.host_value.dtype]

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Copy the tensor into ``out``."""
        from pinfeed.tensors.numpy_torch import to_torch

        to_torch(out).copy_(self.host_value)
        yield


def check_loader(loader: Any) -> None:
    """Refuse what gives no batches when it is iterated.

    Raises:
        ArgumentError: ``loader`` cannot be iterated, or gives single samples or names.
    """
    # Tables of pandas and Arrow have columns and no dtype; iterating them gives columns or their
    # names.
    is_table = all(hasattr(loader, name) for name in ("shape", "columns", "__getitem__"))
    if isinstance(loader, Mapping) or is_array_like(loader) or is_table:
        gives = (
            "its keys or columns" if isinstance(loader, Mapping) or is_table else "single samples"
        )
        raise ArgumentError(
            f"loader is a {type(loader).__name__}, and iterating it gives {gives}; expected a DataLoader or another iterable of batches; "
            "give DataLoader(dataset, batch_size=...), or let pinfeed.Feeder(source, batch_size=...) read arrays and tensors as batches"
        )
    if _is_map_style(loader):
        raise ArgumentError(
            f"loader is a {type(loader).__name__}, a Dataset, which gives single samples; expected a DataLoader or another iterable of "
            "batches; give DataLoader(dataset, batch_size=...), or batch_size=None where each item is a whole batch"
        )
    if isinstance(loader, (str, bytes)) or (
        not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__")
    ):
        file = (
            "; a file is streamed by pinfeed.Feeder(path, batch_size=...)"
            if isinstance(loader, (str, bytes, os.PathLike))
            else ""
        )
        raise ArgumentError(
            f"loader={loader!r} cannot be iterated; expected a DataLoader or another iterable of batches{file}"
        )


def _is_map_style(loader: Any) -> bool:
    """Whether it is a torch Dataset that gives samples by index, and has no iteration of its own."""
    from torch.utils.data import Dataset

    return isinstance(loader, Dataset) and not isinstance(loader, Iterable)


class LoaderSource:
    """The batches of a loader.

    Args:
        loader: Iterated once per epoch.

    Raises:
        ArgumentError: It cannot be iterated, or gives single samples or names instead of batches.
    """

    fingerprint: Mapping[str, Any] = {"order": "a DataLoader's own"}

    def __init__(self, loader: Any) -> None:
        check_loader(loader)
        self.loader = loader
        self._begun: Iterator[Any] | None = None
        # If the loader is an iterator itself.
        self._used_up = False

    @property
    def epoch_hooks(self) -> EpochHooks:
        """No hooks, because the loader itself knows its epochs."""
        return EpochHooks()

    def __len__(self) -> int:
        return len(self.loader)

    def begin(self) -> None:
        """Consumer. Start the loader's next epoch, as the loop over the loader itself would now.

        Its seeds are drawn here, and its worker processes forked: before there is a reader, and
        where torch can set up its watch over them.
        """
        begun = guarded(iter, self.loader)
        if begun is self.loader and self._used_up:
            raise ArgumentError(
                f"loader={self.loader!r} is an iterator, which gives its batches once; give what it iterates for a second epoch"
            )
        self._begun = begun
        self._used_up = True

    def skip(self, n: int) -> None:
        """Consumer. Drop the first batches of the epoch that was begun.

        Raises:
            ArgumentError: There are fewer.
        """
        assert self._begun is not None
        for i in range(n):
            try:
                guarded(next, self._begun)
            except WorkerError as error:
                if not isinstance(error.__cause__, StopIteration) or not is_end(error.__cause__):
                    raise
                raise ArgumentError(
                    f"{n} batches of this epoch were done when the state was saved; now the loader gives {i}"
                ) from None

    def finish(self) -> None:
        """Consumer.

        Drop all batches that are left, for what the loader draws at the end of an epoch.
        """
        begun = self._begun
        self._begun = None
        assert begun is not None
        for _ in self._draws(begun):
            pass

    def end(self) -> None:
        """Consumer. Let go of an epoch that was begun and never asked for a batch."""
        self._begun = None

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """The batches of the epoch that was begun last, one in a load."""
        batches = self._begun
        self._begun = None
        assert batches is not None
        return self._draws(batches)

    def hint(self, draw_share: float) -> str:
        """What to change where a loop waits for this loader."""
        n_workers = getattr(self.loader, "num_workers", None)
        if draw_share < 0.5:
            return "Most of it is copying the tensors of the batches: a smaller dtype leaves less to copy (uint8, converted on the device)."
        if n_workers is None:
            return f"It is the loader ({type(self.loader).__name__}) that is waited for: pinfeed can only ask it earlier, not make it faster."
        return (
            f"It is the DataLoader that is waited for (num_workers={n_workers}): raise num_workers (this process may use "
            f"{len(os.sched_getaffinity(0))} cores), or make the dataset's __getitem__ and collate_fn cheaper."
        )

    def draw(self, batch: Any) -> BatchThunk:
        """What makes a load of a batch: called in the order of the batches, one at a time; what it returns is not."""
        return functools.partial(load_of, batch)

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        while True:
            try:
                batch = next(batches)
            except StopIteration as stop:
                if is_end(stop):
                    return
                # A RuntimeError, then, for this is a generator.
                raise
            yield self.draw(batch)


class StatefulSource(LoaderSource):
    """The batches of a loader that knows where it is, each with what it said of that when it had given it."""

    def state(self) -> Any:
        """Reader, or consumer where there is none.

        What the loader says, or its error, for whoever asks: a loop need not be resumed.
        """
        try:
            state = self.loader.state_dict()
            # What came out of worker processes stays as it is; what is in this one, a dataset may
            # go on changing.
            return state if getattr(self.loader, "num_workers", 0) else copy.deepcopy(state)
        except Exception as error:
            return error

    def draw(self, batch: Any) -> BatchThunk:
        return functools.partial(self._load, batch, self.state())

    @staticmethod
    def _load(batch: Any, state: Any) -> HostBatch:
        load = load_of(batch)
        rebuild = load.rebuild
        load.rebuild = lambda tensors: (rebuild(tensors), state)
        return load


def is_end(stop: StopIteration) -> bool:
    """Whether there are no more batches; else the user's own code raised this, here or in a worker, and DataLoader let it pass for the end.

    A number of batches below the loader's len proves nothing: there are samplers whose len is an
    upper bound.
    """
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    users = {_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__}
    return all(frame.f_code not in users for frame, _ in traceback.walk_tb(stop.__traceback__))


def load_of(batch: Any) -> HostBatch:
    """A batch whose leaves are on the host."""
    leaves, rebuild = flatten(batch)
    moves = [callable(getattr(leaf, "to", None)) for _, leaf in leaves]
    kept = [None if moved else leaf for (_, leaf), moved in zip(leaves, moves, strict=True)]
    parts = [HostLeaf(leaf) for (_, leaf), moved in zip(leaves, moves, strict=True) if moved]
    return HostBatch(
        parts,
        lambda tensors: rebuild(
            next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)
        ),
        [(_n_samples(leaves), 0)],
    )


def _n_samples(leaves: list[tuple[str, Any]]) -> int:
    """Length of the first leaf that has one: by convention, the number of samples."""
    for _, leaf in leaves:
        with contextlib.suppress(AttributeError, TypeError, IndexError, RuntimeError):
            # torch has no shape for nested tensors.
            return int(leaf.shape[0])
    return 1
