"""Contestants: functions that yield batches of a dataset, by pinfeed and its peers.

The threads of SPDL, Grain and torchdata's nodes make samples, or whole batches in another variant.
All contestants have two workers, load ahead by about two batches, keep the order, and compute with
one torch thread in each worker.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import pinfeed
from pinfeed.rows.order_batches import OrderBatches

BATCH_SIZE = 64
N_WORKERS = 2
N_AHEAD = 2
ORDER = pinfeed.rows.shuffled(seed=1)
_NEVER = 1 << 30

Batches = Iterator[Any]


@dataclass(frozen=True)
class Task:
    """The batches that a contestant must yield, in the order of an epoch of pinfeed.

    Attributes:
        dataset: Samples by index.
    """

    dataset: Dataset[Any]

    @functools.cached_property
    def indices(self) -> list[int]:
        """Indices of the samples, in order."""
        return [index for batch in self.index_batches for index in batch]

    @functools.cached_property
    def index_batches(self) -> list[list[int]]:
        """Indices of the samples of each batch."""
        batches = OrderBatches(ORDER, len(self.dataset), BATCH_SIZE, drop_last=False)
        return [indices.rows().tolist() for indices in batches.epoch(0)]

    def batch(self, indices: list[int]) -> Any:
        """Return the batch that every contestant must yield for some indices."""
        return default_collate([self.dataset[index] for index in indices])

    def items(self, whole: bool) -> list[Any]:
        """Return the arguments of ``make``, in order."""
        return self.index_batches if whole else self.indices

    def make(self, whole: bool) -> Callable[[Any], Any]:
        """Return the function that makes a sample, or a whole batch."""
        return one_torch_thread(self.batch if whole else self.dataset.__getitem__)


def one_torch_thread(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that sets one torch thread in each thread that calls it.

    The workers of a DataLoader do the same. Without it, each worker thread has as many OpenMP
    threads as the machine has cores.
    """
    local = threading.local()

    @functools.wraps(function)
    def call(argument: Any) -> Any:
        if not hasattr(local, "is_set"):
            torch.set_num_threads(1)
            local.is_set = True
        return function(argument)

    return call


def wrap_dataset(task: Task) -> Batches:
    """Use pinfeed.wrap_dataset."""
    with pinfeed.wrap_dataset(
        task.dataset,
        batch_size=BATCH_SIZE,
        threads=N_WORKERS,
        rows=ORDER,
        depth=N_AHEAD,
        device="cpu",
    ) as feeder:
        yield from feeder


def wrap_loader(task: Task) -> Batches:
    """Use pinfeed.wrap_loader with threads instead of workers."""
    loader = DataLoader(task.dataset, BATCH_SIZE, sampler=task.indices)
    with pinfeed.wrap_loader(loader, threads=N_WORKERS, depth=N_AHEAD, device="cpu") as feeder:
        yield from feeder


def dataloader(task: Task, n_workers: int) -> Batches:
    """Use a DataLoader; its prefetch_factor is 2 for each worker, as by default."""
    workers = {"num_workers": n_workers, "persistent_workers": True} if n_workers else {}
    loader = DataLoader(task.dataset, BATCH_SIZE, sampler=task.indices, **workers)
    yield from loader


def spdl(task: Task, *, whole: bool) -> Batches:
    """Use SPDL with threads that make samples, or whole batches."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(task.items(whole))
    builder = builder.pipe(task.make(whole), concurrency=N_WORKERS, output_order="input")
    if not whole:
        builder = builder.aggregate(BATCH_SIZE).pipe(one_torch_thread(default_collate))
    pipeline = builder.add_sink(N_AHEAD).build(num_threads=N_WORKERS)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


class Source:
    """A random access source in the order of a task.

    Args:
        items: Arguments of the function.
        function: Function that makes an element.
    """

    def __init__(self, items: list[Any], function: Callable[[Any], Any]) -> None:
        self._items = items
        self._function = function

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> Any:
        return self._function(self._items[position])


def grain(task: Task, *, whole: bool) -> Batches:
    """Use Grain with threads that make samples, or whole batches."""
    import grain

    source = grain.MapDataset.source(Source(task.items(whole), task.make(whole)))
    n_ahead = N_AHEAD if whole else N_AHEAD * BATCH_SIZE
    loaded = source.to_iter_dataset(grain.ReadOptions(N_WORKERS, n_ahead))
    yield from loaded if whole else loaded.batch(BATCH_SIZE, batch_fn=default_collate)


def nodes(task: Task, *, whole: bool) -> Batches:
    """Use torchdata's nodes with threads that make samples, or whole batches."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher

    batches = ParallelMapper(
        IterableWrapper(task.items(whole)),
        task.make(whole),
        num_workers=N_WORKERS,
        method="thread",
        in_order=True,
        snapshot_frequency=_NEVER,
    )
    if not whole:
        lists = Batcher(batches, BATCH_SIZE, drop_last=False)
        collated = Mapper(lists, one_torch_thread(default_collate))
        batches = Prefetcher(collated, N_AHEAD, snapshot_frequency=_NEVER)
    yield from Loader(batches)


@dataclass(frozen=True)
class Contestant:
    """A function that yields the batches of a task.

    Attributes:
        batches: The function.
        module: A module that it needs.
    """

    batches: Callable[[Task], Iterable[Any]]
    module: str = "torch"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None


WHOLE = ", whole batches"
"""End of the name of a variant."""
CONTESTANTS = {
    "pinfeed, wrap_dataset": Contestant(wrap_dataset, "pinfeed"),
    "pinfeed, wrap_loader": Contestant(wrap_loader, "pinfeed"),
    "DataLoader": Contestant(lambda task: dataloader(task, 0)),
    "DataLoader, 2 workers": Contestant(lambda task: dataloader(task, N_WORKERS)),
}
for _name, _peer, _module in (
    ("SPDL", spdl, "spdl.pipeline"),
    ("grain", grain, "grain"),
    ("torchdata.nodes", nodes, "torchdata.nodes"),
):
    CONTESTANTS[_name] = Contestant(functools.partial(_peer, whole=False), _module)
    CONTESTANTS[_name + WHOLE] = Contestant(functools.partial(_peer, whole=True), _module)
