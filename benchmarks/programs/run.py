"""Runs of a way of a program: its batches and losses, its time, and its memory.

``compare.py`` calls the functions in a process of its own for each way.
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


def checksum(*batch: Any, **_: Any) -> int:
    """Return a checksum of all tensors of a batch: a step that trains nothing."""
    value = 0
    for tensor in _tensors(batch):
        value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().numpy(), value)
    return value


def nothing(*batch: Any, **_: Any) -> None:
    """Do nothing: the step of a loop that is timed without a step."""


def _tensors(batch: Iterable[Any]) -> Iterator[torch.Tensor]:
    for part in batch:
        yield from (part,) if isinstance(part, torch.Tensor) else _tensors(part)


def run(
    program: Program, size: Any, way: str, folder: Path, step: Step, n_batches: int
) -> tuple[list[Any], list[float]]:
    """Run a way until its step was called for a number of batches.

    Returns:
        Results of the step for each batch, and the times at which the loop received them.

    Raises:
        AssertionError: If the program has fewer batches.
    """
    found: list[Any] = []
    seconds: list[float] = []

    def counted(*batch: Any, **trained: Any) -> Any:
        seconds.append(time.perf_counter())
        found.append(step(*batch, **trained))
        if len(found) == n_batches:
            raise EnoughError
        return found[-1]

    with contextlib.suppress(EnoughError):
        program.ways[way](folder, size, counted)
    n = len(found)
    assert n == n_batches, f"{program.title}: {way} has {n} batches, not {n_batches}"
    return found, seconds


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
    batches, _ = run(program, size, way, Path(folder), checksum, size.n_batches)
    step = program.make_step(size)

    def loss_of(*batch: Any, **trained: Any) -> float:
        return float(step(*batch, **trained))

    losses, _ = run(program, size, way, Path(folder), loss_of, size.n_steps)
    return {"batches": batches, "losses": losses}


def batch_ms(name: str, size_name: str, way: str, folder: str, has_step: bool) -> float:
    """Return the milliseconds between two batches, from the first batch to the last.

    Opening files and starting worker processes is not counted.
    """
    program = _prepared(name)
    size = program.sizes[size_name]
    step = program.make_step(size) if has_step else nothing
    touch_memory(_TOUCHED)
    n = size.n_steps if has_step else size.n_batches
    _, seconds = run(program, size, way, Path(folder), step, n)
    return (seconds[-1] - seconds[0]) / (len(seconds) - 1) * 1e3


def once(name: str, size_name: str, way: str, folder: str) -> None:
    """Run a way without a training step, while another process observes its memory."""
    program = _prepared(name)
    size = program.sizes[size_name]
    run(program, size, way, Path(folder), nothing, size.n_batches)
