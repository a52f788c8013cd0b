"""The cells of the benchmark of host work, and the ways to run each of them.

A way takes a device and a number of batches, and yields the batches.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    MiB,
    PinnedStore,
    RowOptimizer,
    train_rows,
    wrap_loader,
)

Tensors = list[torch.Tensor]
Way = Callable[[Any, int], Iterator[Any]]


@dataclass(frozen=True)
class Cell:
    """Ways that yield equal batches.

    Attributes:
        name: Name in the table.
        goal: Goal of pinfeed, in µs.
        n_batches: Batches of a measured loop.
        ways: Ways by name; the first one is pinfeed's.
        expected: The way that copies nothing.
        device: "cpu", or "cuda" for the simulated GPU.
        step: Training step, whose time is not part of the gap.
        steps_s: Seconds of what the ways have done so far that is not counted.
        check: Function that checks what was written by a loop whose step adds 1 to each batch.
    """

    name: str
    goal: str
    n_batches: int
    ways: dict[str, Way]
    expected: Way
    device: str = "cuda"
    step: Callable[[], object] = bool
    steps_s: Callable[[], float] = float
    check: Callable[[], object] = bool


def by_hand(
    inputs: Iterable[Any], like: Tensors, stage: Callable[[Any, Tensors], Tensors], depth: int
) -> Iterator[Tensors]:
    """Prefetch batches in a side stream, as careful programs do.

    Args:
        inputs: What ``stage`` makes batches of.
        like: Tensors as those of a batch.
        stage: Takes an input and page-locked memory, and returns page-locked tensors.
        depth: Batches that are prefetched.
    """
    side = torch.cuda.Stream()
    buffers = [[torch.empty_like(tensor) for tensor in like] for _ in range(depth + 1)]
    events: list[Any] = [None] * (depth + 1)
    ahead: deque[tuple[Tensors, Any]] = deque()
    for i, given in enumerate(itertools.chain(inputs, itertools.repeat(None, depth))):
        if given is not None:
            at = i % (depth + 1)
            if events[at] is not None:
                # The last copies from these buffers may not be done.
                events[at].synchronize()
            staged = stage(given, buffers[at])
            with torch.cuda.stream(side):
                batch = [to(tensor) for tensor in staged]
                events[at] = side.record_event()
            ahead.append((batch, events[at]))
        if i >= depth:
            batch, event = ahead.popleft()
            compute = torch.cuda.current_stream()
            compute.wait_event(event)
            for tensor in batch:
                tensor.record_stream(compute)
            yield batch


def to(tensor: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ``tensor.to(device, non_blocking=True)`` does.

    Args:
        tensor: Tensor on the host.
        own: The driver's own memory, through which it copies pageable memory.
    """
    source = tensor if own is None else own.copy_(tensor)
    return torch.empty_like(tensor).copy_(source, non_blocking=True)


def reached(array: np.ndarray) -> PinnedStore:
    """Return a store that the simulated GPU reads and writes itself, as it does all memory."""
    store = PinnedStore(array, pin=False)
    store.page_locked = True
    return store


class Rows:
    """Rows of a table of 64 MiB in memory, in random order."""

    def __init__(self, row_nbytes: int, batch_size: int) -> None:
        self._row_nbytes = row_nbytes
        self._batch_size = batch_size

    @cached_property
    def _table(self) -> torch.Tensor:
        return torch.rand(MiB(64) // self._row_nbytes, self._row_nbytes // 4)

    @cached_property
    def _pinned(self) -> PinnedStore:
        return reached(self._table.numpy())

    def _indices(self) -> Iterator[torch.Tensor]:
        n_rows = len(self._table)
        for epoch in itertools.count():
            order = torch.as_tensor(pinfeed.rows.shuffled().bind(n_rows, epoch)(np.arange(n_rows)))
            yield from order[: n_rows - n_rows % self._batch_size].split(self._batch_size)

    def expected(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        indices = itertools.islice(self._indices(), n)
        return (self._table.index_select(0, one) for one in indices)

    def pinfeed(self, device: Any, n: int, **options: Any) -> Iterator[Any]:
        options = {"batch_size": self._batch_size, "shuffle": True, "drop_last": True} | options
        store = self._pinned if "route" in options else ArrayStore(self._table.numpy())
        with Feeder(store, device=device, **options) as feeder:
            epochs = itertools.repeat(feeder)
            yield from itertools.islice(itertools.chain.from_iterable(epochs), n)

    def by_hand(self, device: Any, n: int) -> Iterator[Tensors]:
        def gather(indices: torch.Tensor, out: Tensors) -> Tensors:
            torch.index_select(self._table, 0, indices, out=out[0])
            return out

        indices = itertools.islice(self._indices(), n)
        return by_hand(indices, [self._table[: self._batch_size]], gather, 2)

    def to(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        own = torch.empty_like(self._table[: self._batch_size])
        return (to(batch, own) for batch in self.expected(device, n))


class WrittenRows:
    """A loop that writes every batch back, as its step leaves it."""

    def expected(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        return iter(torch.arange(n * 64.0).view(n, 16, 4))

    def pinfeed(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        self._table = np.arange(n * 64, dtype=np.float32).reshape(-1, 4)
        with Feeder(ArrayStore(self._table), batch_size=16, depth=2, device=device) as feeder:
            batches: Any = feeder.batches()
            for batch in batches:
                yield batch.data
                batch.write_back(batch.data)

    def check(self) -> None:
        expected = np.arange(1, self._table.size + 1)
        assert np.array_equal(self._table.ravel(), expected), "other values were written back"


class TrainedRows:
    """Rows of a table that the GPU reads and writes itself, which Adam trains.

    Args:
        n_ids: Ids of a batch.
    """

    def __init__(self, n_ids: int) -> None:
        self._n_ids = n_ids
        self._steps_s = 0.0

    def steps_s(self) -> float:
        """Return the CPU time of all steps and optimizers so far, in seconds."""
        return self._steps_s

    def _train(self, device: Any, n: int, **options: Any) -> Iterator[torch.Tensor]:
        begin_s = time.thread_time()
        n_rows, dim = 1 << 19, 4
        table = HostEmbedding(n_rows, dim, store=reached(np.ones((n_rows, dim), np.float32)))
        optimizer = RowOptimizer(
            torch.optim.Adam,
            [table],
            state=lambda table, key, shape, dtype: reached(np.zeros(shape, dtype)),
            foreach=True,
        )
        generator = torch.Generator().manual_seed(0)
        batches = list(torch.randint(n_rows, (n, self._n_ids), generator=generator))
        tables: Any = {table: lambda ids: ids}
        self._steps_s += time.thread_time() - begin_s
        for _ in train_rows(batches, tables, optimizer=optimizer, device=device, **options):
            begin_s = time.thread_time()
            # A lookup would need positions that a loop without moves does not have.
            (rows,) = optimizer.parameters()
            rows.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            self._steps_s += time.thread_time() - begin_s
            yield rows.detach().clone()

    def expected(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        return self._train("cpu", n, depth=0)

    def pinfeed(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        return self._train(device, n, route="direct")


class Loader:
    """A loader that has its batches already, whose tensors count as page-locked or pageable."""

    def __init__(self, n_tensors: int, nbytes: int, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._batches = [[torch.rand(nbytes // 4) for _ in range(n_tensors)] for _ in range(8)]
        for tensor in itertools.chain.from_iterable(self._batches):
            tensor.is_pinned = lambda: is_pinned

    def expected(self, device: Any, n: int) -> Iterator[Tensors]:
        return itertools.islice(itertools.cycle(self._batches), n)

    def pinfeed(self, device: Any, n: int) -> Iterator[Any]:
        with wrap_loader(list(self.expected(device, n)), device=device) as feeder:
            yield from feeder

    def by_hand(self, device: Any, n: int) -> Iterator[Tensors]:
        def stage(batch: Tensors, out: Tensors) -> Tensors:
            return batch if self._is_pinned else list(map(torch.Tensor.copy_, out, batch))

        return by_hand(self.expected(device, n), self._batches[0], stage, 1)

    def to(self, device: Any, n: int) -> Iterator[Tensors]:
        own = None if self._is_pinned else torch.empty_like(self._batches[0][0])
        return ([to(tensor, own) for tensor in batch] for batch in self.expected(device, n))


class CpuLoader:
    """A DataLoader of rows on the CPU, with and without pinfeed."""

    def __init__(self, batch_size: int, n_values: int) -> None:
        self._batch_size = batch_size
        self._n_values = n_values

    def _loader(self, n: int) -> DataLoader[Any]:
        x = torch.arange(float(n * self._batch_size))[:, None].expand(-1, self._n_values)
        return DataLoader(TensorDataset(x), self._batch_size)

    def expected(self, device: Any, n: int) -> Iterator[Any]:
        return iter(self._loader(n))

    def pinfeed(self, device: Any, n: int) -> Iterator[Any]:
        with wrap_loader(self._loader(n), depth=0, device=device) as feeder:
            yield from feeder


def busy_step() -> None:
    """Compute for half a millisecond."""
    end = time.perf_counter() + 0.5e-3
    x = torch.ones(64, 64)
    while time.perf_counter() < end:
        x = (x @ x).clamp(0, 1)


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for size, row_nbytes, n, name, goals in (
        (64, 3072, 2000, "64 rows of 3 KB", {2: "32 / 52 (40)", None: "22 / 42"}),
        (256, 384, 4000, "256 rows of 384 B", {2: "28 / 42 (30)", None: "16 / 32"}),
        (1024, 4096, 150, "4 MB of 4 KiB rows", {2: "120 / 480 (260)"}),
    ):
        rows = Rows(row_nbytes, size)
        for depth, goal in goals.items():
            ways = {"pinfeed": partial(rows.pinfeed, depth=depth), "by hand": rows.by_hand}
            title = f"{name}, {f'depth {depth}' if depth else 'default depth'}"
            yield Cell(title, goal, n, ways | {"to": rows.to}, rows.expected)
        direct = {"pinfeed": partial(rows.pinfeed, depth=2, route="direct")}
        yield Cell(f"{name}, read by the GPU, depth 2", "", n, direct, rows.expected)
    for shape, n, name, goal in (
        (
            (1, 320_000, True),
            1500,
            "one page-locked tensor of 320 KB",
            "1.5 x by hand, all threads",
        ),
        ((1, 320_000, False), 1500, "pageable tensor of 320 KB", "1.5 x by hand, all threads"),
        ((2, 4, False), 1500, "two tensors of 4 B", "1.5 x by hand, all threads"),
        ((40, 8192, False), 400, "40 tensors of 8 KB", "0.6 x to"),
    ):
        loader = Loader(*shape)
        ways = {"pinfeed": loader.pinfeed, "by hand": loader.by_hand, "to": loader.to}
        yield Cell(f"loader, {name}", goal, n, ways, loader.expected)
    written = WrittenRows()
    goal, ways = "110 / 200, 1 switch", {"pinfeed": written.pinfeed}
    yield Cell("write_back, depth 2", goal, 1000, ways, written.expected, check=written.check)
    for n_ids, goal, n in ((1024, "120 / 250", 400), (32_768, "250 / 1000", 60)):
        trained = TrainedRows(n_ids)
        ways = {"pinfeed": trained.pinfeed}
        title = f"tables, {n_ids:,} ids, without the step"
        yield Cell(title, goal, n, ways, trained.expected, steps_s=trained.steps_s)
    rows = Rows(3072, 64)
    plain = partial(rows.pinfeed, depth=2)
    ways = {"pinfeed": partial(plain, host_transform=lambda batch: batch), "without it": plain}
    yield Cell("host_transform, 64 rows of 3 KB", "+20", 2000, ways, rows.expected)
    for shape, n in (((32, 8), 2000), ((64, 784), 1000)):
        cpu = CpuLoader(*shape)
        ways = {"pinfeed": cpu.pinfeed, "DataLoader": cpu.expected}
        title = f"CPU loader depth 0, {shape[0]} x {shape[1]} floats"
        yield Cell(title, "+8", n, ways, cpu.expected, "cpu")
        yield Cell(f"{title}, step of 0.5 ms", "+15", n // 2, ways, cpu.expected, "cpu", busy_step)
