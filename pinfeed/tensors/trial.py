"""trial(): runs the user's code once, without changing the random numbers of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from pinfeed.tensors import rng_state


@contextlib.contextmanager
def trial(device: str) -> Iterator[Callable[[], int]]:
    """Run code as a trial, and restore the global random generators afterwards.

    On a GPU, this resets torch's peak statistics.

    Args:
        device: Name of the device that the code uses.

    Yields:
        A function that returns the peak GPU memory of the code so far, in bytes; 0 for other
        devices.
    """
    with rng_state.replayed(rng_state.capture()):
        if not device.startswith("cuda"):
            yield lambda: 0
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
