"""trial(): runs the user's code on trial, without changing torch's random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def trial(device: str) -> Iterator[Callable[[], int]]:
    """Run code on trial, and restore torch's random numbers afterwards.

    On a GPU, torch's peak statistics are reset.

    Args:
        device: Name of the device that the code uses.

    Yields:
        A function that returns the most bytes of a GPU that the code has taken so far; 0 for any
        other device.
    """
    if not device.startswith("cuda"):
        with torch.random.fork_rng([]):
            yield lambda: 0
        return
    with torch.random.fork_rng([torch.device(device)]):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
