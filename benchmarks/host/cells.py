"""The cells of the benchmark of host work, and the ways to run each of them."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import ArrayStore, Feeder, wrap_loader

SEED = 1
TABLE_BYTES = 64 << 20
BY_HAND = "by hand"
TO = "`to`"

Tensors = list[torch.Tensor]
Loop = Callable[[Any, int], Iterator[Any]]
"""Takes a device and a number of batches, and yields the batches."""


@dataclass(frozen=True)
class Cell:
    """Loops that yield equal batches.

    Attributes:
        name: Name in the table.
        goal: Goal for the first way, in µs.
        n_batches: Batches of a measured loop.
        ways: Loops by name; the first one is that of pinfeed.
        expected: The loop without a device, on the host.
        on_gpu: Whether the device is the simulated GPU, and not the CPU.
        step: Training step, whose time is not part of the gap.
        check: Function that checks what a loop has written, if its step adds 1 to each batch.
    """

    name: str
    goal: str
    n_batches: int
    ways: dict[str, Loop]
    expected: Loop
    on_gpu: bool = True
    step: Callable[[], object] | None = None
    check: Callable[[], object] | None = None


# ---- loops without pinfeed -----------------------------------------------------------------------


def by_hand(
    inputs: Iterable[Any],
    like: Sequence[torch.Tensor],
    stage: Callable[[Any, Tensors], Tensors],
    depth: int,
) -> Iterator[Tensors]:
    """Prefetch with a side stream and page-locked staging memory.

    Args:
        inputs: What ``stage`` makes a batch from.
        like: Tensors as those of a batch.
        stage: Takes an input and staging memory, and returns page-locked tensors.
        depth: Batches that are copied in advance.
    """
    side = torch.cuda.Stream()
    buffers = [[torch.empty_like(tensor) for tensor in like] for _ in range(depth + 1)]
    copied: list[Any] = [None] * (depth + 1)
    ahead: deque[tuple[Tensors, Any]] = deque()
    for i, one in enumerate(itertools.chain(inputs, itertools.repeat(None, depth))):
        if one is not None:
            place = i % (depth + 1)
            if copied[place] is not None:
                # The last copies of this staging memory may still read it.
                copied[place].synchronize()
            staged = stage(one, buffers[place])
            with torch.cuda.stream(side):
                batch = [torch.empty_like(tensor) for tensor in staged]
                for target, source in zip(batch, staged, strict=True):
                    target.copy_(source, non_blocking=True)
                copied[place] = side.record_event()
            ahead.append((batch, copied[place]))
        if i >= depth:
            batch, event = ahead.popleft()
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for tensor in batch:
                tensor.record_stream(current)
            yield batch


def to(value: torch.Tensor, pageable: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Do what ``value.to(device, non_blocking=True)`` does.

    Args:
        value: A tensor on the host.
        pageable: The driver's own memory, through which it copies pageable memory.
    """
    target = torch.empty_like(value)
    if not value.is_pinned():
        own = pageable.get(value.shape)
        if own is None:
            own = pageable[value.shape] = torch.empty_like(value)
        value = own.copy_(value)
    return target.copy_(value, non_blocking=True)


# ---- rows ----------------------------------------------------------------------------------------


class Rows:
    """Loops over rows of a table in memory, in random order.

    Args:
        row_nbytes: Bytes of a row.
        batch_size: Rows of a batch.
    """

    def __init__(self, row_nbytes: int, batch_size: int) -> None:
        self._table = torch.rand(TABLE_BYTES // row_nbytes, row_nbytes // 4)
        self._batch_size = batch_size

    def _indices(self, n: int) -> Iterator[torch.Tensor]:
        """Yield the row indices of ``n`` batches, epoch by epoch."""
        n_rows = len(self._table)
        n_whole = n_rows // self._batch_size * self._batch_size
        for epoch in itertools.count():
            at = pinfeed.rows.shuffled(SEED).bind(n_rows, epoch)
            order = torch.as_tensor(at(np.arange(n_rows)))
            for indices in order[:n_whole].split(self._batch_size):
                if not n:
                    return
                n -= 1
                yield indices

    def expected(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        return (self._table[indices] for indices in self._indices(n))

    def pinfeed(self, device: Any, n: int, **options: Any) -> Iterator[Any]:
        store = ArrayStore(self._table.numpy())
        given = {"batch_size": self._batch_size, "shuffle": True, "seed": SEED, "drop_last": True}
        with Feeder(store, device=device, **given, **options) as feeder:
            epochs = itertools.chain.from_iterable(itertools.repeat(feeder))
            yield from itertools.islice(epochs, n)

    def by_hand(self, device: Any, n: int) -> Iterator[Tensors]:
        def gather(indices: torch.Tensor, out: Tensors) -> Tensors:
            torch.index_select(self._table, 0, indices, out=out[0])
            return out

        return by_hand(self._indices(n), [self._table[: self._batch_size]], gather, 2)

    def to(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        pageable: dict[Any, torch.Tensor] = {}
        return (to(self._table.index_select(0, one), pageable) for one in self._indices(n))


def rows_cell(rows: Rows, name: str, n: int, goal: str, depth: int | None) -> Cell:
    ways = {
        "pinfeed": functools.partial(rows.pinfeed, depth=depth),
        BY_HAND: rows.by_hand,
        TO: rows.to,
    }
    depth_name = "default depth" if depth is None else f"depth {depth}"
    return Cell(f"{name}, {depth_name}", goal, n, ways, rows.expected)


class WrittenRows:
    """A loop that writes every batch back, as its step leaves it."""

    def __init__(self) -> None:
        self._rows = np.empty(0)

    def expected(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        return iter(torch.arange(n * 64, dtype=torch.float32).view(n, 16, 4))

    def pinfeed(self, device: Any, n: int) -> Iterator[torch.Tensor]:
        self._rows = np.arange(n * 64, dtype=np.float32).reshape(-1, 4)
        with Feeder(ArrayStore(self._rows), batch_size=16, depth=2, device=device) as feeder:
            batches: Any = feeder.batches()
            for batch in batches:
                yield batch.data
                batch.write_back(batch.data)

    def check(self) -> None:
        """Check the table after a loop whose step has added 1 to all values.

        Raises:
            AssertionError: If the values differ.
        """
        expected = np.arange(1, self._rows.size + 1, dtype=np.float32)
        assert np.array_equal(self._rows.ravel(), expected), "other values were written back"


# ---- loaders -------------------------------------------------------------------------------------


class Loader:
    """Loops over a loader that has its batches already.

    Args:
        n_tensors: Tensors of a batch.
        nbytes: Bytes of a tensor.
        is_pinned: Whether the tensors count as page-locked.
    """

    def __init__(self, n_tensors: int, nbytes: int, *, is_pinned: bool = False) -> None:
        self._batches = [list(torch.rand(n_tensors, nbytes // 4)) for _ in range(8)]
        for tensor in itertools.chain.from_iterable(self._batches):
            # A tensor of an array of tensors is a view.
            tensor.is_pinned = lambda: is_pinned  # type: ignore[method-assign]

    def expected(self, device: Any, n: int) -> Iterator[Tensors]:
        return itertools.islice(itertools.cycle(self._batches), n)

    def pinfeed(self, device: Any, n: int) -> Iterator[Any]:
        with wrap_loader(list(self.expected(device, n)), device=device) as feeder:
            yield from feeder

    def by_hand(self, device: Any, n: int) -> Iterator[Tensors]:
        def stage(batch: Tensors, out: Tensors) -> Tensors:
            pairs = zip(batch, out, strict=True)
            return [value if value.is_pinned() else own.copy_(value) for value, own in pairs]

        return by_hand(self.expected(device, n), self._batches[0], stage, 1)

    def to(self, device: Any, n: int) -> Iterator[Tensors]:
        pageable: dict[Any, torch.Tensor] = {}
        for batch in self.expected(device, n):
            yield [to(tensor, pageable) for tensor in batch]


def loader_cell(name: str, loader: Loader, n: int, goal: str) -> Cell:
    ways: dict[str, Loop] = {"pinfeed": loader.pinfeed, BY_HAND: loader.by_hand, TO: loader.to}
    return Cell(f"loader, {name}", goal, n, ways, loader.expected)


# ---- the CPU -------------------------------------------------------------------------------------


def busy(seconds: float = 0.5e-3) -> None:
    """Compute for a time."""
    end = time.perf_counter() + seconds
    x = torch.ones(64, 64)
    while time.perf_counter() < end:
        x = torch.clamp(x @ x, 0, 1)


class CpuLoader:
    """A DataLoader of single rows, without and with pinfeed on the CPU.

    Args:
        batch_size: Rows of a batch.
        n_features: Values of a row.
    """

    def __init__(self, batch_size: int, n_features: int) -> None:
        self._batch_size = batch_size
        self._n_features = n_features

    def _loader(self, n: int) -> DataLoader[Any]:
        rows = torch.arange(n * self._batch_size, dtype=torch.float32)
        x = rows[:, None].expand(-1, self._n_features)
        return DataLoader(TensorDataset(x), self._batch_size)

    def bare(self, device: Any, n: int) -> Iterator[Any]:
        return iter(self._loader(n))

    def pinfeed(self, device: Any, n: int) -> Iterator[Any]:
        with wrap_loader(self._loader(n), depth=0, device=device) as feeder:
            yield from feeder


def cpu_cells() -> Iterator[Cell]:
    for batch_size, n_features, n in ((32, 8, 2000), (64, 784, 1000)):
        loader = CpuLoader(batch_size, n_features)
        ways = {"pinfeed": loader.pinfeed, "DataLoader": loader.bare}
        name = f"CPU loader, depth 0, {batch_size} x {n_features} floats"
        yield Cell(name, "+8", n, ways, loader.bare, on_gpu=False)
        name = f"{name}, step of 0.5 ms"
        yield Cell(name, "+15", n // 2, ways, loader.bare, on_gpu=False, step=busy)


def cells() -> Iterator[Cell]:
    """Yield all cells. Each holds its data, so that data are freed in turn."""
    for name, batch_size, row_nbytes, n, goals in (
        ("64 rows of 3 KB", 64, 3072, 2000, ("32 / 52 (40)", "22 / 42")),
        ("256 rows of 384 B", 256, 384, 4000, ("28 / 42 (30)", "16 / 32")),
        ("4 MB of 4 KiB rows", 1024, 4096, 150, ("120 / 480 (260)",)),
    ):
        rows = Rows(row_nbytes, batch_size)
        for depth, goal in zip((2, None), goals, strict=False):
            yield rows_cell(rows, name, n, goal, depth)
    yield from loader_cells()
    written = WrittenRows()
    ways: dict[str, Loop] = {"pinfeed": written.pinfeed}
    yield Cell(
        "write_back, depth 2",
        "110 / 200, 1 switch",
        1000,
        ways,
        written.expected,
        check=written.check,
    )
    rows = Rows(3072, 64)
    ways = {
        "pinfeed": functools.partial(rows.pinfeed, depth=2, host_transform=lambda batch: batch),
        "without it": functools.partial(rows.pinfeed, depth=2),
    }
    yield Cell("host_transform, 64 rows of 3 KB", "+20", 2000, ways, rows.expected)
    yield from cpu_cells()


def loader_cells() -> Iterator[Cell]:
    by_hand_goal = "1.5 x by hand, all threads"
    for name, n_tensors, nbytes, is_pinned, n, goal in (
        ("one page-locked tensor of 320 KB", 1, 320_000, True, 1500, by_hand_goal),
        ("pageable tensor of 320 KB", 1, 320_000, False, 1500, by_hand_goal),
        ("two tensors of 4 B", 2, 4, False, 1500, by_hand_goal),
        ("40 tensors of 8 KB", 40, 8192, False, 400, "0.6 x `to`"),
    ):
        loader = Loader(n_tensors, nbytes, is_pinned=is_pinned)
        yield loader_cell(name, loader, n, goal)
