"""Small batches of rows in memory and of DataLoaders, with pinfeed and without it.

A batch has 64 rows of 784 float32 in random order. The loop does nothing, or trains a small
perceptron on one thread, which takes some hundred microseconds. Run it from the root:

    # one minute
    python -m benchmarks.small_batches
    # few batches and one round; saves nothing
    python -m benchmarks.small_batches --quick

Every way runs in its own process. The processes run their epochs in turn, so each round compares
all ways under equal conditions. First, every value of two epochs and every loss are compared. The
first epoch includes the construction of the loader and is reported apart. Figures are medians of
the rounds of later epochs, and ratios and differences are medians of those of each round. Rows are
drawn in the order of ``pinfeed.rows.shuffled``, and the measured time includes drawing the order.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import resource
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import pinfeed
from benchmarks.environment import environment, save
from benchmarks.processes import new_process

N_BATCHES = 512
BATCH_SIZE = 64
N_FEATURES = 784
N_CLASSES = 10
SEED = 1

Start = Callable[[], Iterable[Any]]
"""Function that begins an epoch."""
Figures = dict[str, Any]


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
    """Epochs of a way with a step, of which the first includes the construction of the loader."""

    def __init__(self, rows: Rows, make: Callable[[Rows], Start], step: Any) -> None:
        self._rows = rows
        self._make = make
        self._step = step
        self._start: Start | None = None
        self._epoch = 0

    def run(self) -> Figures:
        """Run the next epoch, and return the figures of a batch and the last loss.

        The figures are microseconds by the clock and of the CPU in all threads, and page faults.
        """
        self._rows.epoch = self._epoch
        self._epoch += 1
        n_faults = _n_faults()
        cpu_s = time.process_time()
        begin_s = time.perf_counter()
        if self._start is None:
            self._start = self._make(self._rows)
        n = 0
        for batch in self._start():
            self._step(batch)
            n += 1
        return {
            "wall": (time.perf_counter() - begin_s) / n * 1e6,
            "cpu": (time.process_time() - cpu_s) / n * 1e6,
            "faults": (_n_faults() - n_faults) / n,
            "loss": float(self._step.loss),
        }


def _n_faults() -> int:
    """Return the page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# ---- functions that run in the process of a way --------------------------------------------------


@functools.cache
def _rows(n_batches: int) -> Rows:
    torch.set_num_threads(1)
    # A loop without a step always waits for data, and pinfeed would warn.
    logging.getLogger("pinfeed").setLevel(logging.ERROR)
    return Rows(n_batches)


@functools.cache
def _loop(group: str, way: str, n_batches: int, step: str) -> Loop:
    return Loop(_rows(n_batches), GROUPS[group][way], STEPS[step]())


def checksums(group: str, way: str, n_batches: int) -> list[int]:
    """Return a checksum of all values of each of two epochs."""
    rows = _rows(n_batches)
    rows.epoch = 0
    start = GROUPS[group][way](rows)
    found = []
    for rows.epoch in range(2):
        value = 0
        for batch in start():
            for tensor in (batch,) if isinstance(batch, torch.Tensor) else batch:
                value = zlib.crc32(tensor.numpy(), value)
        found.append(value)
    return found


def run_epoch(group: str, way: str, n_batches: int, step: str) -> Figures:
    """Run the next epoch of a way with a step."""
    return _loop(group, way, n_batches, step).run()


# ---- the comparison ------------------------------------------------------------------------------


def measure(n_rounds: int, n_batches: int = N_BATCHES) -> list[Figures]:
    """Return a record for each group and step.

    Raises:
        AssertionError: If ways of a group differ in their batches, or in the losses of an epoch.
    """
    return [record for group in GROUPS for record in measure_group(group, n_rounds, n_batches)]


def measure_group(group: str, n_rounds: int, n_batches: int) -> list[Figures]:
    """Return a record for each step."""
    ways = list(GROUPS[group])
    results = []
    with contextlib.ExitStack() as stack:
        processes = {way: stack.enter_context(new_process()) for way in ways}

        def call(function: Callable[..., Any], way: str, *arguments: Any) -> Any:
            return processes[way].submit(function, group, way, n_batches, *arguments).result()

        expected, *others = [call(checksums, way) for way in ways]
        assert all(found == expected for found in others), f"{group}: batches differ"
        for step in STEPS:
            rounds = []
            for number in range(n_rounds + 1):
                # Each round begins with another way.
                first = number % len(ways)
                found = {way: call(run_epoch, way, step) for way in ways[first:] + ways[:first]}
                assert len({one["loss"] for one in found.values()}) == 1, f"{group}: losses differ"
                rounds.append(found)
            figures = {way: summary(way, ways[0], rounds) for way in ways}
            results.append({"group": group, "step": step, "ways": figures})
    return results


def summary(name: str, reference: str, rounds: list[dict[str, Figures]]) -> Figures:
    """Return the figures of a way, compared with the first way of its group.

    Args:
        name: Name of the way.
        reference: Name of the first way.
        rounds: Figures of all ways in each round; the first round is that of first epochs.
    """
    first, *later = rounds
    pairs = [(found[name]["wall"], found[reference]["wall"]) for found in later]
    return {
        "first_us": first[name]["wall"],
        "us": statistics.median(wall for wall, _ in pairs),
        "cpu_us": statistics.median(found[name]["cpu"] for found in later),
        "faults": statistics.median(found[name]["faults"] for found in later),
        "ratio": statistics.median(base / wall for wall, base in pairs),
        "over_us": statistics.median(wall - base for wall, base in pairs),
    }


def report(results: list[Figures]) -> str:
    """Return the figures as a table in Markdown for each group and step."""
    headers = ("", "first epoch", "later epochs", "CPU", "page faults", "added", "times as fast")
    parts = []
    for result in results:
        title = f"{result['group']}, {result['step']}, µs and page faults of a batch"
        rows = []
        for name, figures in result["ways"].items():
            cells = [f"{figures[key]:.0f}" for key in ("first_us", "us", "cpu_us", "faults")]
            # The first way is the one that the others are compared with.
            compared = [f"{figures['over_us']:+.0f}", f"{figures['ratio']:.2f}"] if rows else []
            rows.append([name, *cells, *compared])
        table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{table}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of later epochs")
    parser.add_argument("--quick", action="store_true", help="few batches; saves nothing")
    arguments = parser.parse_args()
    print(environment())
    results = measure(1, 16) if arguments.quick else measure(arguments.rounds)
    print(report(results))
    if not arguments.quick:
        path = save("small-batches", results)
        path.with_suffix(".md").write_text(report(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
