"""State of the random generators of a training run, as plain values and tensors."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and Python, and of GPUs in use."""
    # Datasets draw from numpy's global generator.
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the global generators to ``state``."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    for index, cuda in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, index)


@contextlib.contextmanager
def replayed(state: dict[str, Any]) -> Iterator[None]:
    """Draw from ``state`` in the block, and restore the generators at its end."""
    now = capture()
    try:
        restore(state)
        yield
    finally:
        restore(now)


def generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader and its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
