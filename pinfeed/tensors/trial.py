"""trial(): runs the user's code on trial, without changing the random numbers of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from pinfeed.tensors import rng_state


@contextlib.contextmanager
def trial(device: str) -> Iterator[Callable[[], int]]:
    """Run code on trial, and restore the global random generators afterwards.

    On a GPU, torch's peak statistics are reset.

    Args:
        device: Name of the device that the code uses.

    Yields:
        A function that returns the most bytes of a GPU that the code has taken so far; 0 for any
        other device.
    """
    with rng_state.replayed(rng_state.capture()):
        if not device.startswith("cuda"):
            yield lambda: 0
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
