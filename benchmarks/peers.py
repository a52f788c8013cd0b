"""Contestants: functions that read float32 batches of a .npy file, by pinfeed and its peers.

Each peer has the settings that won a trial of several. A contestant yields epochs, and an epoch
yields batches, so that a loader is constructed once and used for all epochs. The batches own their
memory. Peers get the row indices (a slice if they are consecutive) and, if they accept one, a
reader of whole batches. pinfeed computes its own order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed
from benchmarks.rowfile import Kind
from pinfeed.rows.order_batches import OrderBatches
from pinfeed.rows.orders import Order

Batches = list[Any]
"""Row indices of each batch, shape (batch_size,), or slices."""
Epochs = Iterator[Iterable[torch.Tensor]]

LIMITED = "pinfeed, half the memory"
"""Name of pinfeed with a memory limit of half the file's size."""


@dataclass(frozen=True)
class Task:
    """The batches that a contestant must yield.

    Attributes:
        seed: Seed of the order; processes that read the same file have different ones.
    """

    path: Path
    kind: Kind
    order: str
    n_epochs: int
    cold: bool
    epochs: list[Batches]
    seed: int = 1

    @classmethod
    def make(
        cls, path: Path, kind: Kind, order: str, n_epochs: int, *, cold: bool, seed: int = 1
    ) -> Task:
        n_rows = len(np.load(path, mmap_mode="r"))
        rows = order_of(order, kind, seed)
        batches = OrderBatches(rows, n_rows, kind.batch_size, drop_last=True)
        epochs = [
            [indices.rows() for indices in batches.epoch(number)] for number in range(n_epochs)
        ]
        if order == "sequential":
            epochs = [
                [slice(int(rows[0]), int(rows[-1]) + 1) for rows in epoch] for epoch in epochs
            ]
        return cls(path, kind, order, n_epochs, cold, epochs, seed)


def order_of(name: str, kind: Kind, seed: int = 1) -> Order:
    if name == "sequential":
        return pinfeed.rows.sequential()
    if name == "shuffled":
        return pinfeed.rows.shuffled(seed)
    return pinfeed.rows.block_shuffled(
        seed, block_rows=max(1, pinfeed.MiB(1) // kind.row_nbytes), window_blocks=16
    )


class Reader:
    """Whole batches of a memory map: ``reader[rows]`` is a tensor with its own memory."""

    def __init__(self, path: Path) -> None:
        # np.memmap itself is slower to index.
        self.array = np.load(path, mmap_mode="r").view(np.ndarray)

    def __getitem__(self, rows: Any) -> torch.Tensor:
        # np.take was 1.4 to 1.7 times as fast as array[rows] in a loop, and as fast or faster in
        # the threads of every peer.
        return torch.from_numpy(
            self.array[rows].copy()
            if isinstance(rows, slice)
            else np.take(self.array, rows, axis=0)
        )


def feeder(task: Task, memory_share: float | None = None) -> Epochs:
    """Use a Feeder, with all of the memory or with a limit below the size of the file.

    Args:
        task: The batches.
        memory_share: Limit of host memory as a share of the file; None sets no limit.
    """
    size: dict[str, Any] = {"batch_size": task.kind.batch_size}
    # The tiny file of the first use is smaller than any plan.
    if memory_share is not None and task.kind.name != "tiny":
        limit = int(task.path.stat().st_size * memory_share)
        config = pinfeed.Config(cpu_memory_limit=limit, preferred_batch_size=task.kind.batch_size)
        size = {"config": config}
    order = order_of(task.order, task.kind, task.seed)
    with pinfeed.Feeder(task.path, rows=order, drop_last=True, device="cpu", **size) as made:
        for _ in range(task.n_epochs):
            yield made


def loop(task: Task) -> Epochs:
    """Gather from a memory map in a plain loop, the first version of most users."""
    array = np.load(task.path, mmap_mode="r")
    for batches in task.epochs:
        yield (
            torch.from_numpy(array[rows].copy() if isinstance(rows, slice) else array[rows])
            for rows in batches
        )


def dataloader(task: Task, n_workers: int = 0) -> Epochs:
    """Use a DataLoader with whole batches as items, and row indices as the sampler."""
    given: Batches = []
    workers = {"num_workers": n_workers, "persistent_workers": True, "prefetch_factor": 4}
    loader = torch.utils.data.DataLoader(
        Reader(task.path), sampler=given, batch_size=None, **(workers if n_workers else {})
    )
    for batches in task.epochs:
        given[:] = batches
        yield loader


def torchdata_nodes(task: Task) -> Epochs:
    """Use torchdata's nodes with one thread, four batches ahead.

    Four threads were faster only while they wait for a disk. Snapshots per batch cost time and are
    off.
    """
    from torchdata.nodes import IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher

    reader = Reader(task.path)
    never = 1 << 30
    for batches in task.epochs:
        source = IterableWrapper(batches)
        if task.cold:
            yield Loader(
                ParallelMapper(
                    source,
                    reader.__getitem__,
                    num_workers=4,
                    method="thread",
                    snapshot_frequency=never,
                )
            )
        else:
            yield Loader(
                Prefetcher(
                    Mapper(source, reader.__getitem__), prefetch_factor=4, snapshot_frequency=never
                )
            )


def spdl(task: Task) -> Epochs:
    """Use SPDL with one thread.

    Two or four threads were slower, and not faster on a cold file. A longer queue did not help.
    """
    from spdl.pipeline import PipelineBuilder

    def run(batches: Batches) -> Iterator[torch.Tensor]:
        builder = (
            PipelineBuilder()
            .add_source(batches)
            .pipe(reader.__getitem__, concurrency=1, output_order="input")
            .add_sink(3)
        )
        pipeline = builder.build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    reader = Reader(task.path)
    for batches in task.epochs:
        yield run(batches)


def grain(task: Task) -> Epochs:
    """Use Grain with a batch as the element, two threads, and four batches ahead.

    Two threads were faster than one for every size of rows.
    """
    import grain as library

    class Source:
        def __init__(self, batches: Batches) -> None:
            self.batches = batches

        def __len__(self) -> int:
            return len(self.batches)

        def __getitem__(self, number: int) -> torch.Tensor:
            return reader[self.batches[number]]

    reader = Reader(task.path)
    options = library.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    for batches in task.epochs:
        yield library.MapDataset.source(Source(batches)).to_iter_dataset(options)


@dataclass(frozen=True)
class Contestant:
    """A function that yields epochs of a task, and when it takes part.

    Attributes:
        epochs: The function.
        traits: Traits of cells that it takes part in, besides plain ones: "cold", "step" and
            "processes".
        module: A module that it needs.
        quick: Whether it takes part in ``--quick``.
        kinds: Names of the kinds of rows that it reads; None for all.
    """

    epochs: Callable[[Task], Epochs]
    traits: frozenset[str] = frozenset()
    module: str = "torch"
    quick: bool = True
    kinds: tuple[str, ...] | None = None

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None


_STEP = frozenset({"cold", "step"})
_ALL = frozenset({"cold", "step", "processes"})
CONTESTANTS = {
    "pinfeed": Contestant(feeder, _ALL),
    LIMITED: Contestant(
        lambda task: feeder(task, 0.5), frozenset({"cold"}), quick=False, kinds=("4 KiB",)
    ),
    # In a loop that waits for a disk or computes a step, it is as fast as the DataLoader.
    "loop": Contestant(loop),
    "DataLoader": Contestant(dataloader, _STEP),
    "torchdata.nodes": Contestant(torchdata_nodes, _ALL, "torchdata.nodes"),
    "grain": Contestant(grain, _ALL, "grain"),
    # The next ones read a warm file more slowly than others read a cold one.
    "SPDL": Contestant(spdl, module="spdl.pipeline", quick=False),
    "DataLoader, 2 workers": Contestant(lambda task: dataloader(task, 2), quick=False),
}
