"""Runs of a way of a program: its batches and losses, its time, and its memory.

The functions are called in a process of its own for each way, by ``benchmarks/earlier.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import touch_memory
from benchmarks.programs.program import Program, Step, load
from pinfeed import MiB

# A run needs less than this, not counting the files in the page cache.
_TOUCHED = MiB(256)


class EnoughError(Exception):
    """The step was called for the last batch that is needed."""


class Checksums:
    """Step that keeps a checksum of all tensors of each batch, and trains nothing.

    Attributes:
        found: Checksum of each batch.
    """

    def __init__(self) -> None:
        self.found: list[int] = []

    def __call__(self, *batch: Any, **_: Any) -> None:
        value = 0
        for tensor in _tensors(batch):
            value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), value)
            value = zlib.crc32(tensor.contiguous().numpy(), value)
        self.found.append(value)


class Losses:
    """Step that trains, and keeps the loss of each batch.

    Args:
        step: The training step.

    Attributes:
        found: Loss of each batch.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.found: list[float] = []

    def __call__(self, *batch: Any, **trained: Any) -> None:
        self.found.append(float(self._step(*batch, **trained)))


class Clock:
    """Step that records when the loop receives each batch.

    Args:
        step: The training step; None for a loop that does nothing.

    Attributes:
        seconds: Time of each call.
    """

    def __init__(self, step: Step | None) -> None:
        self._step = step
        self.seconds: list[float] = []

    def __call__(self, *batch: Any, **trained: Any) -> None:
        self.seconds.append(time.perf_counter())
        if self._step is not None:
            self._step(*batch, **trained)


def _tensors(batch: Iterable[Any]) -> Iterator[torch.Tensor]:
    for part in batch:
        yield from (part,) if isinstance(part, torch.Tensor) else _tensors(part)


def run(program: Program, size: Any, way: str, folder: Path, step: Step, n_batches: int) -> None:
    """Run a way until its step was called for a number of batches.

    Raises:
        AssertionError: If the program has fewer batches.
    """
    n_calls = 0

    def counted(*batch: Any, **trained: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        loss = step(*batch, **trained)
        if n_calls == n_batches:
            raise EnoughError
        return loss

    with contextlib.suppress(EnoughError):
        program.ways[way](folder, size, counted)
    assert n_calls == n_batches, f"{program.title}: {way} has {n_calls} batches, not {n_batches}"


@functools.cache
def _prepared(name: str) -> Program:
    """Load a program, once in a process."""
    torch.set_num_threads(1)
    # A loop without a step always waits for data, and pinfeed would warn.
    logging.getLogger("pinfeed").setLevel(logging.ERROR)
    return load(name)


def results(name: str, size_name: str, way: str, folder: str) -> dict[str, list[Any]]:
    """Return the checksums of batches, and the losses of training on batches from the first on."""
    program = _prepared(name)
    size = program.sizes[size_name]
    checksums = Checksums()
    run(program, size, way, Path(folder), checksums, size.n_batches)
    losses = Losses(program.make_step(size))
    run(program, size, way, Path(folder), losses, size.n_steps)
    return {"batches": checksums.found, "losses": losses.found}


def batch_ms(name: str, size_name: str, way: str, folder: str, has_step: bool) -> float:
    """Return the milliseconds between two batches, from the first batch to the last.

    Opening files and starting worker processes is not counted.
    """
    program = _prepared(name)
    size = program.sizes[size_name]
    clock = Clock(program.make_step(size) if has_step else None)
    touch_memory(_TOUCHED)
    run(program, size, way, Path(folder), clock, size.n_steps if has_step else size.n_batches)
    return (clock.seconds[-1] - clock.seconds[0]) / (len(clock.seconds) - 1) * 1e3


def once(name: str, size_name: str, way: str, folder: str) -> None:
    """Run a way without a training step, while another process observes its memory."""
    program = _prepared(name)
    size = program.sizes[size_name]
    run(program, size, way, Path(folder), Clock(None), size.n_batches)
