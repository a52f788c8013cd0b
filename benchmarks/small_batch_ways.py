"""Ways to iterate small batches: rows in memory, and DataLoaders with and without wrap_loader.

The functions are called in a process of their own for each way, by ``benchmarks/earlier.py``. Rows
are drawn in the order of ``pinfeed.rows.shuffled``, which differs between epochs. The measured time
includes drawing the order.
"""

from __future__ import annotations

import functools
import logging
import resource
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import pinfeed

N_BATCHES = 512
BATCH_SIZE = 64
N_FEATURES = 784
N_CLASSES = 10
SEED = 1

Start = Callable[[], Iterable[Any]]
"""Function that begins an epoch."""


class Rows:
    """Rows in memory with their labels, and a sampler of their order in the current epoch."""

    def __init__(self, n_batches: int = N_BATCHES) -> None:
        generator = torch.Generator().manual_seed(SEED)
        n_rows = n_batches * BATCH_SIZE
        self.x = torch.rand(n_rows, N_FEATURES, generator=generator)
        self.y = torch.randint(N_CLASSES, (n_rows,), generator=generator)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[int]:
        """Yield row indices, as torch's RandomSampler does."""
        yield from self.draw().tolist()

    def draw(self) -> torch.Tensor:
        """Draw the order of the epoch."""
        n_rows = len(self.x)
        at = pinfeed.rows.shuffled(SEED).bind(n_rows, self.epoch)
        return torch.as_tensor(at(np.arange(n_rows)))


class IndexTensors:
    """Sampler that gives a tensor of row indices for each batch.

    Args:
        rows: Rows that are sampled.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows) // BATCH_SIZE

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self._rows.draw().split(BATCH_SIZE)


class WholeBatches:
    """Dataset whose items are whole batches.

    Args:
        x: Rows.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return self._x.index_select(0, torch.as_tensor(rows))


def feeder(rows: Rows, depth: int | None) -> Start:
    made = pinfeed.Feeder(
        rows.x, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, depth=depth, device="cpu"
    )
    return lambda: made


def plain_loop(rows: Rows) -> Start:
    return lambda: (rows.x[batch] for batch in IndexTensors(rows))


def gather_alone(rows: Rows) -> Start:
    """Gather into one buffer, which every batch reuses.

    This is not a loader, but the lower bound of the time.
    """
    out = torch.empty(BATCH_SIZE, N_FEATURES)
    return lambda: (torch.index_select(rows.x, 0, batch, out=out) for batch in IndexTensors(rows))


def batch_sampler(rows: Rows) -> Start:
    """Use a DataLoader with a BatchSampler, which makes a list of row indices for each batch."""
    sampler = BatchSampler(rows, BATCH_SIZE, drop_last=False)
    loader = DataLoader(WholeBatches(rows.x), sampler=sampler, batch_size=None)  # type: ignore[arg-type]
    return lambda: loader


def index_tensors(rows: Rows) -> Start:
    """Use a DataLoader that is given a tensor of row indices for each batch."""
    loader = DataLoader(WholeBatches(rows.x), sampler=IndexTensors(rows), batch_size=None)  # type: ignore[arg-type]
    return lambda: loader


def single_rows(rows: Rows) -> Start:
    dataset = TensorDataset(rows.x, rows.y)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=rows)
    return lambda: loader


def whole_batches(rows: Rows) -> Start:
    sampler = BatchSampler(rows, BATCH_SIZE, drop_last=False)
    loader = DataLoader(TensorDataset(rows.x, rows.y), sampler=sampler, batch_size=None)
    return lambda: loader


def wrapped(rows: Rows, make: Callable[[Rows], Start], depth: int | None) -> Start:
    given: dict[str, Any] = {"depth": depth, "device": "cpu"}
    made = pinfeed.wrap_loader(make(rows)(), **given)
    return lambda: made


DEPTHS = (None, 2, 0)
PLAIN = "DataLoader"
REFERENCE = "DataLoader, BatchSampler"
IN_MEMORY = "rows in memory"
SINGLE_ROWS = "a DataLoader of single rows"
WHOLE_BATCHES = "a DataLoader of whole batches"


def _wrappers(make: Callable[[Rows], Start]) -> dict[str, Callable[[Rows], Start]]:
    found: dict[str, Callable[[Rows], Start]] = {PLAIN: make}
    for depth in DEPTHS:
        found[f"wrap_loader, depth={depth}"] = functools.partial(wrapped, make=make, depth=depth)
    return found


GROUPS: dict[str, dict[str, Callable[[Rows], Start]]] = {
    IN_MEMORY: {
        REFERENCE: batch_sampler,
        "DataLoader, index tensors": index_tensors,
        "plain loop": plain_loop,
        "gather alone": gather_alone,
        **{f"Feeder, depth={depth}": functools.partial(feeder, depth=depth) for depth in DEPTHS},
    },
    SINGLE_ROWS: _wrappers(single_rows),
    WHOLE_BATCHES: _wrappers(whole_batches),
}
"""Ways by the name of their group; each group is compared with its first way."""


class TrainingStep:
    """A step of a small perceptron on one thread, with SGD.

    Attributes:
        loss: Loss of the last step.
    """

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self._model = nn.Sequential(nn.Linear(N_FEATURES, 64), nn.ReLU(), nn.Linear(64, N_CLASSES))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._zeros = torch.zeros(BATCH_SIZE, dtype=torch.int64)
        self.loss = torch.zeros(())

    def __call__(self, batch: Any) -> None:
        x, y = (batch, self._zeros) if isinstance(batch, torch.Tensor) else batch
        loss = nn.functional.cross_entropy(self._model(x), y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        # An autograd graph that is kept alive would keep the batch.
        self.loss = loss.detach()


class EmptyStep:
    """A step that does nothing."""

    loss = torch.zeros(())

    def __call__(self, batch: Any) -> None:
        pass


STEPS: dict[str, Callable[[], Any]] = {"no step": EmptyStep, "training step": TrainingStep}


class Loop:
    """Epochs of a way with a step.

    Args:
        rows: Rows to iterate.
        make: Function that makes the loader.
        step: The step.
    """

    def __init__(self, rows: Rows, make: Callable[[Rows], Start], step: Any) -> None:
        self._rows = rows
        self._make = make
        self._step = step
        self._start: Start | None = None
        self._epoch = 0

    def run(self) -> dict[str, float]:
        """Run the next epoch; the first one includes the construction of the loader.

        Returns:
            Microseconds of a batch, by the clock and of the CPU in all threads, the page faults of
            a batch, and the last loss.
        """
        self._rows.epoch = self._epoch
        self._epoch += 1
        step = self._step
        n_faults = _n_faults()
        cpu_s = time.process_time()
        begin_s = time.perf_counter()
        if self._start is None:
            self._start = self._make(self._rows)
        n = 0
        for batch in self._start():
            step(batch)
            n += 1
        wall_s = time.perf_counter() - begin_s
        cpu_s = time.process_time() - cpu_s
        return {
            "wall": wall_s / n * 1e6,
            "cpu": cpu_s / n * 1e6,
            "faults": (_n_faults() - n_faults) / n,
            "loss": float(step.loss),
        }

    @property
    def choice(self) -> str:
        """The depth that pinfeed chose and its reason, if it chose one."""
        made = None if self._start is None else self._start()
        return str(getattr(made, "depth_reason", ""))


def _n_faults() -> int:
    """Return the page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def _rows(n_batches: int) -> Rows:
    torch.set_num_threads(1)
    # A loop without a step always waits for data, and pinfeed would warn.
    logging.getLogger("pinfeed").setLevel(logging.ERROR)
    return Rows(n_batches)


@functools.cache
def _loop(group: str, way: str, step: str, n_batches: int) -> Loop:
    return Loop(_rows(n_batches), GROUPS[group][way], STEPS[step]())


def checksums(group: str, way: str, n_batches: int) -> list[int] | None:
    """Return a checksum of all values of each of two epochs; None if the way does not exist yet."""
    rows = _rows(n_batches)
    rows.epoch = 0
    try:
        start = GROUPS[group][way](rows)
    except pinfeed.ArgumentError:
        return None
    found = []
    for epoch in range(2):
        rows.epoch = epoch
        found.append(_checksum(start()))
    return found


def _checksum(batches: Iterable[Any]) -> int:
    value = 0
    for tensor in _tensors(batches):
        value = zlib.crc32(tensor.numpy(), value)
    return value


def _tensors(batches: Iterable[Any]) -> Iterator[torch.Tensor]:
    for batch in batches:
        yield from (batch,) if isinstance(batch, torch.Tensor) else batch


def run_epoch(group: str, way: str, step: str, n_batches: int) -> dict[str, float]:
    """Run the next epoch of a way with a step."""
    return _loop(group, way, step, n_batches).run()


def choice(group: str, way: str, step: str, n_batches: int) -> str:
    """Return the depth that pinfeed chose for a way with a step, and its reason."""
    return _loop(group, way, step, n_batches).choice
