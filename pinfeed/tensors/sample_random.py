"""SampleRandom: the random numbers of a sample, which depend on the sample and on nothing else.

Threads that make samples share torch's global generator, so the numbers that each draws from it
would depend on the others. In a thread with a SampleRandom, torch's random functions draw from the
sample's own generator instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pinfeed.errors import ArgumentError
from pinfeed.tensors.transform_calls import seeded_generator

_FUNCTIONS = (
    *("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm", "_sample_dirichlet", "_standard_gamma"),
    "binomial",
)
_METHODS = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("multinomial", "normal_", "random_", "uniform_"),
)
_DRAWS = frozenset(
    getattr(owner, name)
    for owner, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS))
    for name in names
)
"""Functions of torch that take a generator, and draw from the global one without it."""
_DROPOUTS = frozenset(
    getattr(torch.nn.functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")
) | {torch.dropout}
"""Functions of torch that always draw from the global generator, unless training is False."""


class SampleRandom(TorchFunctionMode):
    """Makes torch's random functions draw from the generator of one sample at a time, in a thread.

    Raises:
        ArgumentError: If a function that takes no generator draws random numbers in the thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entropy: Sequence[int] = ()
        self._generator: torch.Generator | None = None

    def begin(self, entropy: Sequence[int]) -> None:
        """Begin a sample.

        Args:
            entropy: Numbers that the generators of the sample are seeded with, none of them
                negative.
        """
        self._entropy = entropy
        self._generator = None

    def generator(self) -> torch.Generator:
        """Return the generator of the sample, which is made when it is first needed."""
        if self._generator is None:
            self._generator = seeded_generator("cpu", self._entropy)
        return self._generator

    def rng(self) -> np.random.Generator:
        """Return a new generator of numpy for the sample."""
        return np.random.default_rng(self._entropy)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _DRAWS and _is_on_cpu(args, kwargs) and not (kwargs or {}).get("generator"):
            return func(*args, **{**(kwargs or {}), "generator": self.generator()})
        if func in _DROPOUTS and _is_training(args, kwargs):
            raise ArgumentError(
                f"a sample called {func.__name__}, which always draws from torch's global "
                "generator, so its numbers would depend on other threads; multiply with a mask "
                "from torch.bernoulli instead, or give reproducible=False"
            )
        return func(*args, **(kwargs or {}))


def _is_on_cpu(args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a random function makes numbers on the CPU, where the generator is."""
    device = (kwargs or {}).get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    tensors = [value for value in args[:2] if isinstance(value, torch.Tensor)]
    return all(tensor.is_cpu for tensor in tensors)


def _is_training(args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a dropout, given an input, p and training, draws numbers."""
    return bool(args[2] if len(args) > 2 else (kwargs or {}).get("training", True))


def global_draws(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; return its result, and the global generators that it has drawn from."""
    before = _global_states()
    result = make()
    after = _global_states()
    return result, [name for name, state in after.items() if state != before[name]]


def _global_states() -> dict[str, Any]:
    """Return the states of the global generators, by the name of their module."""
    # Datasets draw from numpy's global generator.
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "random": random.getstate(),
        "numpy.random": (np.asarray(keys).tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


@contextlib.contextmanager
def one_compute_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone, as it does in the workers of a DataLoader.

    Otherwise, each thread that makes samples would start as many OpenMP threads as the process has
    cores. Other threads, such as that of the training loop, keep their number.
    """
    n_threads = torch.get_num_threads()
    # torch.set_num_threads also changes the number of threads that begin later.
    set_own = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if n_threads == 1 or set_own is None:
        yield
        return
    set_own(1)
    try:
        yield
    finally:
        set_own(n_threads)
