"""Modes and generators of torch for transforms, independent of the thread that calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

# Tensors of the simulated devices are computed on the CPU.
_SIMULATED = ("meta", "sim")


@contextlib.contextmanager
def modes_of_a_new_thread() -> Iterator[None]:
    """Run code as in a new thread, outside of the caller's modes.

    These are ``no_grad``, ``inference_mode``, autocast and the default device.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def no_grad() -> contextlib.AbstractContextManager[None]:
    """Return a context without gradients."""
    return torch.no_grad()


def seeded_generator(device: str, entropy: Sequence[int]) -> torch.Generator:
    """Return a generator whose seed is a function of some numbers.

    Args:
        device: Name of the device that the generator draws on.
        entropy: The numbers, none of them negative.
    """
    seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
    generator = torch.Generator("cpu" if device in _SIMULATED else device)
    return generator.manual_seed(int(seed))
