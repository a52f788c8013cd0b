"""SampleRandom: the random numbers of a sample, which depend on the sample and on nothing else.

Threads that make samples share torch's global generator, so the numbers that each draws from it
would depend on the others. In a thread with a SampleRandom, torch's random functions draw from the
sample's own generator instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pinfeed.errors import ArgumentError
from pinfeed.tensors import rng_state
from pinfeed.tensors.transform_calls import seeded_generator


def _functions(owner: Any, names: str) -> list[Any]:
    """Return the functions of a module or a class that have these names."""
    return [getattr(owner, name) for name in names.split()]


_DRAWS = {
    *_functions(
        torch,
        "bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like "
        "randperm _sample_dirichlet _standard_gamma binomial rrelu rrelu_",
    ),
    *_functions(
        torch.Tensor,
        "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ "
        "random_ uniform_",
    ),
    # Inside a function of this module, torch calls no mode.
    *_functions(torch.nn.init, "kaiming_uniform_ normal_ uniform_"),
}
"""Functions of torch that take a generator, and draw from the global one without it."""
_DROPOUTS = {
    *_functions(
        torch.nn.functional,
        "alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout gumbel_softmax "
        "rrelu",
    ),
    *_functions(
        torch,
        "alpha_dropout alpha_dropout_ dropout dropout_ feature_dropout feature_dropout_ "
        "feature_alpha_dropout feature_alpha_dropout_ native_dropout",
    ),
}
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
        given = kwargs or {}
        if func in _DRAWS and _takes_own(args, given):
            return func(*args, **{**given, "generator": self.generator()})
        if func in _DROPOUTS and _is_training(args, given):
            raise ArgumentError(
                f"a sample called {func.__name__}, which always draws from torch's global "
                "generator, so its numbers would depend on other threads; multiply with a mask "
                "from torch.bernoulli instead, or give wrap_dataset reproducible=False"
            )
        return func(*args, **given)


def _takes_own(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random function draws on the CPU, and was given no generator."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return not any(
        isinstance(value, torch.Generator) or (isinstance(value, torch.Tensor) and not value.is_cpu)
        for value in (*args, *kwargs.values())
    )


def _is_training(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a dropout, given an input, p and training, draws numbers."""
    if len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("training", kwargs.get("train", True)))


def global_draws(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; return its result, and the global generators that it has drawn from."""
    shared = rng_state.GLOBAL
    before = {name: rng_state.state_of(one) for name, one in shared.items()}
    result = make()
    return result, [name for name in shared if not rng_state.is_at(shared[name], before[name])]


@contextlib.contextmanager
def one_compute_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone, as it does in the workers of a DataLoader.

    Otherwise, each thread that makes samples would start as many OpenMP threads as the process has
    cores. Other threads, such as that of the training loop, keep their number.
    """
    n_threads = torch.get_num_threads()
    set_own = _openmp() if n_threads > 1 else None
    if set_own is None:
        yield
        return
    set_own(1)
    try:
        yield
    finally:
        set_own(n_threads)


@functools.cache
def _openmp() -> Callable[[int], object] | None:
    """Return the function that sets the number of OpenMP threads of the calling thread, if any.

    torch.set_num_threads also changes the number of threads that begin later.
    """
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
