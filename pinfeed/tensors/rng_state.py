"""State of the random generators of a training run or a loader, as plain values and tensors."""

from __future__ import annotations

import contextlib
import gc
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError

GLOBAL: dict[str, Any] = {
    "random": random._inst,
    "numpy.random": np.random.mtrand._rand,
    "torch": torch.default_generator,
}
"""Generators behind the functions of modules, which all threads share."""


def capture() -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and Python, and of GPUs in use."""
    # Datasets draw from numpy's global generator.
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "python": [version, torch.from_numpy(np.array(numbers, np.int64)), gauss],
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


def own_generators(loader: Any) -> list[Any]:
    """Return the generators of torch, numpy and Python that a loader has for itself, each once.

    They are in attributes, short lists and closures of the loader, its samplers, its dataset and
    other objects that it holds. Global generators also serve the training step, so they are left
    out.
    """
    found = []
    known = {id(loader)}
    todo = deque([loader])
    while todo and len(known) < _MAX_OBJECTS:
        one = todo.popleft()
        if isinstance(one, _KINDS):
            if all(one is not shared for shared in GLOBAL.values()):
                found.append(one)
            continue
        for part in _parts(one):
            if id(part) not in known:
                known.add(id(part))
                todo.append(part)
    return found


def state_of(generator: Any) -> Any:
    """Return the state of a generator, as plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def is_at(generator: Any, state: Any) -> bool:
    """Return whether a generator has a state that ``state_of`` has returned."""
    now = state_of(generator)
    return torch.equal(now, state) if isinstance(now, torch.Tensor) else bool(now == state)


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator to a return value of ``state_of``.

    Raises:
        ArgumentError: If the state belongs to another kind of generator.
    """
    try:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)
    except (TypeError, ValueError, KeyError) as error:
        raise ArgumentError(
            f"the state of a random generator does not fit {generator!r} ({error}); expected one "
            "of the same kind; give the generator of the earlier run"
        ) from None


class GeneratorStates:
    """States of a generator of a loader after each of the last batches.

    Args:
        generator: The generator.
        n_kept: Number of batches whose states are kept.
        first: Number of batches of the epoch that were requested before.
    """

    def __init__(self, generator: Any, n_kept: int, first: int) -> None:
        self._generator = generator
        self._states: deque[Any] = deque(maxlen=n_kept)
        self._n_requested = first

    def begin_batch(self) -> None:
        """Forget all states if other code has used the generator since the last batch."""
        if self._states and not self._is_at_last():
            self._states.clear()

    def end_batch(self) -> None:
        """Keep the state after a batch."""
        self._n_requested += 1
        self._states.append(state_of(self._generator))

    def rewind(self, n_requested: int) -> None:
        """Put the generator back to where it was after ``n_requested`` batches.

        It is left unchanged if other code has used it since then.
        """
        n_back = self._n_requested - n_requested
        if 0 < n_back < len(self._states) and self._is_at_last():
            for _ in range(n_back):
                self._states.pop()
            set_state(self._generator, self._states[-1])
            self._n_requested = n_requested

    def _is_at_last(self) -> bool:
        return is_at(self._generator, self._states[-1])


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Bounds of the search in a loader, which may hold large datasets.
_MAX_OBJECTS = 1_000
_MAX_ITEMS = 100


def _parts(value: Any) -> Iterable[Any]:
    """Return the objects that a value holds, if they may be generators or hold some."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ or ()
    is_long = isinstance(value, (list, tuple, dict, set)) and len(value) > _MAX_ITEMS
    if is_long or isinstance(value, (type, types.ModuleType)):
        return ()
    return gc.get_referents(value)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
