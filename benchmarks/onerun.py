"""One run of one contestant, in a process of its own.

So every run has its own peak of memory, allocator and threads.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed
from benchmarks.conditions import (
    ComputingStep,
    cached_share,
    memory_by_kind,
    read_through,
    touch_memory,
)
from benchmarks.peers import CONTESTANTS, Contestant, Epochs, Task, litdata_folder, order_of
from benchmarks.rowfile import Kind, drop, expected

_CHECKED_BATCHES = 8
_CHECKED_FEEDER_BATCHES = 300
_WARM_EPOCHS = 3
# Memory to touch before a run, as a multiple of the file's size. It is for batches and for a copy
# of the file that a loader may make. If the file is cold, it is for the page cache as well. If the
# host has taken the memory back, touching it takes most of the time of a run.
_TOUCHED_WARM = 1.25
_TOUCHED_COLD = 2.0
_MEETING_S = 60.0


def check(path: Path, kind: Kind, order: str, name: str) -> None:
    """Compare the first batches of two epochs with the expected rows.

    Raises:
        AssertionError: If they differ, are not float32 tensors of the right shape on the CPU, or
            change while later batches are drawn.
    """
    contestant = CONTESTANTS[name]
    task = Task.make(path, kind, order, 2, cold=False)
    own_order = contestant.own_order and order != "sequential"
    epochs = contestant.epochs(task)
    for wanted, epoch in zip(task.epochs, epochs, strict=True):
        given = list(itertools.islice(epoch, _CHECKED_BATCHES))
        assert len(given) >= min(len(wanted), _CHECKED_BATCHES) or contestant.own_order, (
            f"{name}: {len(given)} batches"
        )
        seen = np.concatenate(
            [batch.reshape(len(batch), -1)[:, 0].numpy() for batch in given]
        ).astype(np.int64)
        numbers = np.concatenate([np.r_[rows] for rows in wanted[: len(given)]])
        if own_order:
            assert len(np.unique(seen)) == len(seen), f"{name}: a row occurs twice"
            numbers = seen
        for i, batch in enumerate(given):
            rows = numbers[i * kind.batch_size :][: kind.batch_size]
            assert (batch.dtype, batch.device.type, batch.is_contiguous()) == (
                torch.float32,
                "cpu",
                True,
            ), name
            assert torch.equal(batch, expected(rows, kind.row_shape)), (
                f"{name}: batch {i} of {kind.name} rows, {order}"
            )
    epochs.close()
    if name == "pinfeed":
        check_feeder(task)


def check_feeder(task: Task) -> None:
    """Compare the row indices and the rows of 300 batches."""
    order = order_of(task.order, task.kind)
    with pinfeed.Feeder(
        task.path, batch_size=task.kind.batch_size, rows=order, drop_last=True, device="cpu"
    ) as feeder:
        for wanted, batch in itertools.islice(
            zip(task.epochs[0], feeder.batches(), strict=False), _CHECKED_FEEDER_BATCHES
        ):
            assert np.array_equal(batch.rows, np.r_[wanted])
            assert torch.equal(batch.data, expected(batch.rows, task.kind.row_shape))


@dataclass(frozen=True)
class Meeting:
    """A point at which processes that run at the same time wait for each other.

    Attributes:
        folder: An empty folder that all of them use.
        rank: Number of this process.
        n_processes: Number of processes; one does not wait.
    """

    folder: Path
    rank: int = 0
    n_processes: int = 1

    def wait(self, name: str) -> None:
        """Wait until all processes have called this with the same name.

        Raises:
            TimeoutError: If one of them has not called it after a minute.
        """
        (self.folder / f"{name}-{self.rank}").touch()
        deadline = time.perf_counter() + _MEETING_S
        while len(list(self.folder.glob(f"{name}-*"))) < self.n_processes:
            if time.perf_counter() > deadline:
                raise TimeoutError(
                    f"not all of {self.n_processes} processes have reached this point: {name}"
                )
            time.sleep(1e-3)


def run(
    path: Path,
    tiny: Path,
    kind: Kind,
    order: str,
    name: str,
    *,
    cold: bool,
    computes: bool,
    cap_s: float,
    meeting: Meeting,
) -> dict[str, Any]:
    """Time one epoch of a cold file, or three of a warm one.

    Args:
        path: Path of the file.
        tiny: Path of a file of a few rows, for the fixed cost of a first use.
        kind: Kind of the rows.
        order: Name of the order.
        name: Name of the contestant.
        cold: Whether the file is dropped from the page cache first.
        computes: Whether the loop has a training step.
        cap_s: Seconds after which the run is stopped. The rate of an epoch is then that of the
            rows so far.
        meeting: Meeting with other processes, immediately before the memory is touched and the
            clock starts.

    Returns:
        ``epochs`` with ``gb_per_s`` and the share of time that the loop ``waited``, whether the run
        was ``complete``, and the growth of memory in bytes.
    """
    contestant = CONTESTANTS[name]
    n_epochs = 1 if cold else _WARM_EPOCHS
    task = Task.make(path, kind, order, n_epochs, cold=cold, seed=1 + meeting.rank)
    step = None
    if computes:
        torch.set_num_threads(1)
        step = ComputingStep(kind.n_products)
    warm_up(contestant, tiny, cold=cold)
    files = [path, *sorted(litdata_folder(path).glob("*.bin"))] if name == "litdata" else [path]
    (drop if cold else read_through)(files)
    meeting.wait("prepared")
    touch_memory(round(path.stat().st_size * (_TOUCHED_COLD if cold else _TOUCHED_WARM)))
    reset_peak()
    cached = _share(files[-1])
    resident = memory()["VmRSS"]
    before = memory_by_kind()
    samples: list[dict[str, int]] = []
    meeting.wait("touched")
    epochs = contestant.epochs(task)
    timings, complete = timed(epochs, step, cap_s, lambda: samples.append(memory_by_kind()))
    peak = memory()["VmHWM"]
    grown = (_share(files[-1]) - cached) * files[-1].stat().st_size
    epochs.close()
    if not contestant.own_order:
        compare_sums(task, timings, complete=complete)
    return {
        "epochs": [timing.values(kind.row_nbytes) for timing in timings],
        "complete": complete,
        "growth": {key: max(one[key] for one in samples) - before[key] for key in before},
        "peak_growth": peak - resident,
        "page_cache_growth": round(grown),
        **task.notes,
    }


def warm_up(contestant: Contestant, tiny: Path, *, cold: bool) -> None:
    """Run a contestant on a tiny file, so that the cost of a first use is not measured."""
    task = Task.make(tiny, Kind("tiny", (1,), 8, 0), "sequential", 1, cold=cold)
    for epoch in contestant.epochs(task):
        for _ in epoch:
            pass


def reset_peak() -> None:
    """Free unused objects, and reset the peak of resident memory, see proc(5).

    Without the permission for it, the peak is that since the process began.
    """
    gc.collect()
    with contextlib.suppress(PermissionError):
        Path("/proc/self/clear_refs").write_text("5")


@dataclass(frozen=True)
class EpochTiming:
    """Time of an epoch by the clock of the loop.

    Attributes:
        n_rows: Rows that the loop received.
        seconds: Seconds of the epoch. The first one includes the construction of the loader.
        waited_s: Seconds that the loop waited for batches.
        total: Sum of the first values of all rows.
    """

    n_rows: int
    seconds: float
    waited_s: float
    total: float

    def values(self, row_nbytes: int) -> dict[str, float]:
        """Return the rate in GB/s and the share of time that the loop waited."""
        return {
            "gb_per_s": self.n_rows * row_nbytes / self.seconds / 1e9,
            "waited": self.waited_s / self.seconds,
        }


def timed(
    epochs: Epochs,
    step: Callable[[], object] | None,
    cap_s: float,
    sample: Callable[[], object],
) -> tuple[list[EpochTiming], bool]:
    """Return the timing of each epoch, and whether all epochs were complete.

    The loop adds up a value of every row, so that it uses all rows and can be compared with the
    file.
    """
    timings: list[EpochTiming] = []
    begin = time.perf_counter()
    deadline = begin + cap_s
    for epoch in epochs:
        n_rows = 0
        waited_s = 0.0
        total = 0.0
        asked = begin
        for batch in epoch:
            waited_s += time.perf_counter() - asked
            n_rows += len(batch)
            total += float(batch.view(len(batch), -1)[:, 0].sum(dtype=torch.float64))
            if step is not None:
                step()
            asked = time.perf_counter()
            if asked > deadline:
                break
        now = time.perf_counter()
        timings.append(EpochTiming(n_rows, now - begin, waited_s + now - asked, total))
        sample()
        if now > deadline:
            return timings, False
        begin = time.perf_counter()
    return timings, True


def compare_sums(task: Task, timings: list[EpochTiming], *, complete: bool) -> None:
    """Compare what the loop added up with the rows of the task, in whole epochs.

    Raises:
        AssertionError: If rows are missing, or are not those of the file.
    """
    whole = timings if complete else timings[:-1]
    for number, (timing, wanted) in enumerate(zip(whole, task.epochs, strict=False)):
        rows = np.concatenate([np.r_[rows] for rows in wanted])
        assert (timing.n_rows, timing.total) == (len(rows), float(rows.sum())), (
            f"epoch {number}: the rows are not those of the file"
        )


def memory() -> dict[str, int]:
    """Return the kernel's counters for this process, without its workers, in bytes."""
    status = Path("/proc/self/status").read_text()
    return {
        key: int(value) * 1024
        for key, value in re.findall(r"(Vm(?:HWM|RSS)|Rss\w+):\s+(\d+) kB", status)
    }


def _share(path: Path) -> float:
    """Return the share of the file in the page cache, for a file of this user."""
    return cached_share([path]) or 0.0


def load(contestant: Contestant) -> None:
    """Import the module of a contestant, outside the measured time."""
    # Grain logs that jax is missing.
    logging.disable(logging.WARNING)
    importlib.import_module(contestant.module)
