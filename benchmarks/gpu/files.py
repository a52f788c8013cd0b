"""Copying rows of .npy files in the page cache to the device, by a Feeder and plain loops."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.conditions import read_through
from benchmarks.gpu.bench import Bench, rate, wait
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.rowfile import KINDS, create
from pinfeed import Feeder, rows
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import Order

_BATCH_ROWS = {"512 B": 16_384, "4 KiB": 4096, "image": 64}
_N_CHECKED = 3
_N_BUFFERS = 3
_EPOCHS = 2


@dataclass
class Files:
    """A file in a temporary folder, one at a time, and the throughput of the link."""

    run: Run
    nbytes: int
    folder: Path
    kind: str = ""
    path: Path = field(default_factory=Path)

    def file(self, kind: str) -> Path:
        """Return the file with rows of a kind, in the page cache. The previous file is deleted."""
        if kind != self.kind:
            if self.kind:
                self.path.unlink()
            self.kind = kind
            self.path = self.folder / f"{kind.replace(' ', '-')}.npy"
            create(self.path, KINDS[kind], self.nbytes)
        read_through([self.path])
        return self.path

    @functools.cached_property
    def link_gb_per_s(self) -> float:
        bench = Bench(self.run.device)
        memory = bench.words((512 << 20) if self.run.cuda else (8 << 20))
        return Ceilings(bench, memory).engine("to the device")

    def measure(self, kind: str, name: str) -> Fields:
        """Compare the first batches of all loops, and time their epochs."""
        path = self.file(kind)
        order = order_of(name)
        device = self.run.device
        batch_size = _BATCH_ROWS[kind] if self.run.cuda else _BATCH_ROWS[kind] // 8
        by_torch = PlainLoop(path, order, batch_size, device, _gather_by_torch)
        by_numpy = PlainLoop(path, order, batch_size, device, _gather_by_numpy)
        with Feeder(
            path, batch_size=batch_size, rows=order, drop_last=True, device=device
        ) as feeder:
            loops: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
                "pinfeed": feeder.__iter__,
                "by_hand_torch": by_torch.epoch,
                "by_hand_numpy": by_numpy.epoch,
            }
            compare({loop: first_batches(make) for loop, make in loops.items()})
            rates = {loop: self._rate(make) for loop, make in loops.items()}
        by_hand_best = max(found for loop, found in rates.items() if loop != "pinfeed")
        return {
            "batch_size": batch_size,
            **{f"{loop}_gb_per_s": found for loop, found in rates.items()},
            "to_by_hand": round(rates["pinfeed"] / by_hand_best, 3),
            "to_link": round(rates["pinfeed"] / self.link_gb_per_s, 3),
            "link_gb_per_s": self.link_gb_per_s,
        }

    def _rate(self, make: Callable[[], Iterator[torch.Tensor]]) -> float:
        """Return GB/s of the fastest epoch after the first, which sets up page tables and code."""
        found = []
        for _ in range(1 + _EPOCHS):
            wait(self.run.device)
            begin = time.perf_counter()
            nbytes = sum(batch.nbytes for batch in make())
            wait(self.run.device)
            found.append(rate(nbytes, time.perf_counter() - begin))
        return max(found[1:])


def files(run: Run) -> list[Cell]:
    """Return a cell for each kind of rows and each order.

    The folder is removed with the other temporary files of the part.
    """
    shared = Files(
        run, (1 << 30) if run.cuda else (64 << 20), Path(tempfile.mkdtemp(prefix="files-"))
    )
    return [
        Cell({"rows": kind, "order": order}, functools.partial(shared.measure, kind, order))
        for kind, order in itertools.product(_BATCH_ROWS, ("shuffled", "sequential"))
    ]


def first_batches(make: Callable[[], Iterator[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the first batches of an epoch, on the host, and close the epoch."""
    with contextlib.closing(make()) as epoch:  # type: ignore[type-var]  # a generator
        return [batch.cpu().clone() for batch in itertools.islice(epoch, _N_CHECKED)]


def compare(batches: dict[str, list[torch.Tensor]]) -> None:
    """Compare the batches of all loops with those of pinfeed.

    Raises:
        AssertionError: If they differ.
    """
    for loop, found in batches.items():
        same = [torch.equal(*pair) for pair in zip(found, batches["pinfeed"], strict=True)]
        if not all(same):
            raise AssertionError(f"the batches of '{loop}' are not those of pinfeed: {same}")


def order_of(name: str) -> Order:
    return rows.shuffled(1) if name == "shuffled" else rows.sequential()


class PlainLoop:
    """A plain loop: memory map, gather into a page-locked buffer, asynchronous copy."""

    def __init__(
        self, path: Path, order: Order, batch_size: int, device: str, gather: Callable[..., None]
    ) -> None:
        # Mode "c" reads as mode "r" does, but torch accepts it without a warning.
        self._array: np.ndarray = np.load(path, mmap_mode="c").view(np.ndarray)
        self._device = device
        self._gather = gather
        shape = (batch_size, *self._array.shape[1:])
        self._buffers = [torch.empty(shape, pin_memory=device == "cuda") for _ in range(_N_BUFFERS)]
        draws = OrderBatches(order, len(self._array), batch_size, drop_last=True).epoch(0)
        self._batches = [draw.rows() for draw in draws]

    def epoch(self) -> Iterator[torch.Tensor]:
        """Yield the batches, each in its own memory on the device."""
        copied: list[Any] = [None] * _N_BUFFERS
        for i, numbers in enumerate(self._batches):
            buffer = self._buffers[i % _N_BUFFERS]
            if copied[i % _N_BUFFERS] is not None:
                copied[i % _N_BUFFERS].synchronize()
            self._gather(self._array, numbers, buffer)
            if self._device == "cuda":
                batch = buffer.to(self._device, non_blocking=True)
                copied[i % _N_BUFFERS] = torch.cuda.current_stream().record_event()
            else:
                batch = buffer.clone()
            yield batch


def _gather_by_torch(array: np.ndarray, numbers: np.ndarray, out: torch.Tensor) -> None:
    source = torch.from_numpy(array)
    if _in_sequence(numbers):
        out.copy_(source[int(numbers[0]) : int(numbers[-1]) + 1])
    else:
        torch.index_select(source, 0, torch.from_numpy(numbers), out=out)


def _gather_by_numpy(array: np.ndarray, numbers: np.ndarray, out: torch.Tensor) -> None:
    if _in_sequence(numbers):
        np.copyto(out.numpy(), array[int(numbers[0]) : int(numbers[-1]) + 1])
    else:
        np.take(array, numbers, axis=0, out=out.numpy(), mode="clip")


def _in_sequence(numbers: np.ndarray) -> bool:
    return bool(numbers[-1] - numbers[0] == len(numbers) - 1 and numbers[1] == numbers[0] + 1)
