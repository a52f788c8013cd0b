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
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed
from benchmarks.ceilings import Compute
from benchmarks.peers import CONTESTANTS, Contestant, Epochs, Task, litdata_folder, order_of
from benchmarks.rowfile import Kind, drop, expected
from pinfeed.cli.measure.page_cache import cached_share, read_through

_CHECKED_BATCHES = 8
_CHECKED_FEEDER_BATCHES = 300


def check(path: Path, kind: Kind, order: str, name: str) -> None:
    """Compare the first batches of two epochs with the expected rows.

    Raises:
        AssertionError: If they differ, are no float32 tensors of the right shape on the CPU, or
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


def run(
    path: Path,
    tiny: Path,
    kind: Kind,
    order: str,
    name: str,
    *,
    cold: bool,
    n_products: int,
    cap_s: float,
) -> dict[str, Any]:
    """Time one epoch of a cold file, or three of a warm one.

    Args:
        path: Path of the file.
        tiny: Path of a file of a few rows, for the fixed cost of a first use.
        kind: Kind of the rows.
        order: Name of the order.
        name: Name of the contestant.
        cold: Whether the file is dropped from the page cache first.
        n_products: Matrix products of the training step; 0 for no step.
        cap_s: Seconds after which the run is stopped. Its rate is then that of the rows so far.

    Returns:
        ``gb_per_s`` of each epoch, whether the run was ``complete``, and the growth of memory.
    """
    contestant = CONTESTANTS[name]
    task = Task.make(path, kind, order, 1 if cold else 3, cold=cold)
    step = Compute(n_products) if n_products else lambda: None
    warm_up(contestant, tiny, cold=cold)
    files = [path, *sorted(litdata_folder(path).glob("*.bin"))] if name == "litdata" else [path]
    read_through(files)
    if cold:
        # The file is dropped only now. On a virtual machine, the first use of memory that has been
        # free for some seconds is slow.
        drop(files)
    reset_peak()
    before = memory()
    cached = _share(files[-1])
    samples: list[dict[str, int]] = []
    epochs = contestant.epochs(task)
    rates, complete = timed(epochs, step, cap_s, lambda: samples.append(memory()))
    peak = memory()["VmHWM"]
    growth = {
        key: max(sample[key] for sample in samples) - before[key]
        for key in ("RssAnon", "RssFile", "RssShmem")
    }
    grown = (_share(files[-1]) - cached) * files[-1].stat().st_size
    epochs.close()
    return {
        "gb_per_s": [n_rows * kind.row_nbytes / seconds / 1e9 for n_rows, seconds in rates],
        "complete": complete,
        "peak_growth": peak - before["VmRSS"],
        "growth": growth,
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


def timed(
    epochs: Epochs, step: Callable[[], object], cap_s: float, sample: Callable[[], object]
) -> tuple[list[tuple[int, float]], bool]:
    """Return the rows and seconds of each epoch, and whether all epochs were complete.

    The first epoch includes the construction of the loader.
    """
    rates: list[tuple[int, float]] = []
    begin = time.perf_counter()
    deadline = begin + cap_s
    for epoch in epochs:
        n_rows = 0
        for batch in epoch:
            n_rows += len(batch)
            step()
            if time.perf_counter() > deadline:
                break
        now = time.perf_counter()
        rates.append((n_rows, now - begin))
        sample()
        if now > deadline:
            return rates, False
        begin = time.perf_counter()
    return rates, True


def memory() -> dict[str, int]:
    """Return the kernel's counters for this process, without its workers, in bytes."""
    status = Path("/proc/self/status").read_text()
    return {
        key: int(value) * 1024
        for key, value in re.findall(r"(Vm(?:HWM|RSS)|Rss\w+):\s+(\d+) kB", status)
    }


def _share(path: Path) -> float:
    """Return the share of the file in the page cache; the kernel tells it for own files."""
    return cached_share([path]) or 0.0


def load(contestant: Contestant) -> None:
    """Import the module of a contestant, outside the measured time."""
    # Grain logs that jax is missing.
    logging.disable(logging.WARNING)
    importlib.import_module(contestant.module)
