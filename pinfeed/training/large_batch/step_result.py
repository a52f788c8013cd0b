"""StepResult: loss, gradients and state of the model after a step that leaves no trace.

The state is that of buffers, and of attributes with tensors or numbers. A model that draws random
numbers gets fixed ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError
from pinfeed.tensors import rng_state
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.step_spec import (
    StepSpec,
    copies_of,
    gradients_set_aside,
    restored,
)

_SIMPLE_TYPES = (bool, int, float, complex, str, type(None))
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


State = dict[str, Any]
"""Copies of buffers or of attributes of modules, by name."""


@contextlib.contextmanager
def state_on_copies(modules: Sequence[nn.Module]) -> Iterator[Callable[[], tuple[State, State]]]:
    """Let modules change copies of their state, and restore the originals at the end.

    Lists, dicts and other objects that a module keeps are not copied.

    Args:
        modules: Root modules, whose children are included.

    Yields:
        A function that returns the current buffers and attributes.
    """
    every = {id(one): (name, one) for root in modules for name, one in root.named_modules()}
    owners = [owner for _, one in every.values() for owner in (one._buffers, vars(one))]
    objects = [value for owner in owners for value in owner.values()]
    generators = [(one, one.get_state()) for one in objects if isinstance(one, torch.Generator)]

    def state() -> tuple[State, State]:
        buffers: State = {}
        attributes: State = {}
        for name, module in every.values():
            prefix = f"{name}." if name else ""
            for owned, found in ((module._buffers, buffers), (_attributes(module), attributes)):
                found |= {f"{prefix}{key}": value for key, value in copies_of(owned).items()}
        return buffers, attributes

    with restored(owners):
        for _, module in every.values():
            module._buffers.update(copies_of(module._buffers))
            vars(module).update(copies_of(_attributes(module)))
        try:
            yield state
        finally:
            for generator, numbers in generators:
                generator.set_state(numbers)


@contextlib.contextmanager
def _data_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Yield the data of the parameters, and restore it at the end."""
    originals = [p.data for p in parameters]
    try:
        yield originals
    finally:
        for p, data in zip(parameters, originals, strict=True):
            p.data = data


@contextlib.contextmanager
def perturbed_parameters(modules: Sequence[nn.Module]) -> Iterator[Callable[[], str]]:
    """Let modules compute with slightly different parameters, and restore the originals at the end.

    Yields:
        A function that returns the name of a parameter that was written in the block, or "".
    """
    # The forward pass of a table with max_norm rescales rows with a larger norm, which gives the
    # same result in chunks.
    renormalized = {
        id(one.weight)
        for root in modules
        for one in root.modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None
    }
    every = {id(p): (name, p) for root in modules for name, p in root.named_parameters()}
    named = [pair for key, pair in every.items() if key not in renormalized]

    def perturbed(i: int, data: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.01 * random.Random(i).random()
        return data * scale if data.is_floating_point() else data.clone()

    def name_of_written() -> str:
        for i, (data, (name, p)) in enumerate(zip(originals, named, strict=True)):
            if not p.data.equal(perturbed(i, data)):
                return name
        return ""

    with _data_set_aside([p for _, p in named]) as originals:
        for i, (data, (_, p)) in enumerate(zip(originals, named, strict=True)):
            p.data = perturbed(i, data)
        yield name_of_written


@contextlib.contextmanager
def in_float64(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules compute in float64, and restore their parameters and state at the end.

    The modules themselves are changed, not copies, because a loss may refer to them.
    """
    parameters = [p for module in modules for p in module.parameters()]
    with gradients_set_aside(parameters), state_on_copies(modules), _data_set_aside(parameters):
        for module in modules:
            module.double()
        yield


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the module's own attributes that are tensors or simple values."""
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _MODULE_ATTRIBUTES
        and isinstance(value, (torch.Tensor, *_SIMPLE_TYPES))
        and not isinstance(value, nn.Parameter)
    }


@dataclass(frozen=True)
class StepResult:
    """Loss and gradients of a step, and state of the model after it.

    Attributes:
        loss: The loss, without a graph.
        gradients: Gradient of each parameter.
        buffers: Buffers of the modules, by name.
        attributes: Attributes of the modules that are tensors or simple values, by name.
        drawn: Names of the random generators that the step has used, such as ``"torch"``.
    """

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: State
    attributes: State
    drawn: set[str]

    def differing_state(self, other: StepResult) -> str:
        """Return the name of a buffer or an attribute that is not equal bit for bit; else "".

        The same computation gives the same bits; a state that was updated more often differs.
        """
        for one, another in ((self.buffers, other.buffers), (self.attributes, other.attributes)):
            for name in one | another:
                values = one.get(name), another.get(name)
                shapes = {value.shape for value in values if isinstance(value, torch.Tensor)}
                # An attribute of another shape follows the last batch.
                follows = one is self.attributes and len(shapes) > 1
                if not follows and relative_error(*values) > 0:
                    return name
        return ""


def run_step(
    spec: StepSpec, compute: Callable[[], torch.Tensor], random_state: dict[str, Any]
) -> StepResult:
    """Run a step that leaves gradients, state and random generators unchanged.

    Args:
        spec: The model and the loss.
        compute: Computes the gradients, and returns the loss.
        random_state: State of the random generators at the beginning of the step.
    """
    parameters = spec.parameters
    with (
        rng_state.replayed(random_state),
        gradients_set_aside(parameters),
        state_on_copies(spec.modules) as state,
    ):
        loss = compute()
        gradients = [p.grad for p in parameters]
        return StepResult(loss, gradients, *state(), _drawn_since(random_state))


def _drawn_since(before: dict[str, Any]) -> set[str]:
    """Return which generators have drawn numbers: ``"torch"``, ``"cuda"``, ``"numpy"``, ..."""
    pairs = zip(flatten(rng_state.capture())[0], flatten(before)[0], strict=False)
    return {path.split("'")[1] for (path, now), (_, then) in pairs if relative_error(now, then) > 0}


def norm_of(tensor: torch.Tensor | None) -> float:
    """Return the Euclidean norm, computed in float64; the tensor may be sparse."""
    if tensor is None or not tensor.numel():
        return 0.0
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(values, dtype=dtype))


def relative_error(one: Any, other: Any, size: float | None = None) -> float:
    """Return the norm of the difference, relative to ``size``, or to the larger norm.

    The error is infinite if shapes or kinds differ. Non-finite values at the same positions are
    equal. None equals a tensor of zeros.
    """
    if one is None and isinstance(other, torch.Tensor):
        one = torch.zeros_like(other)
    if other is None and isinstance(one, torch.Tensor):
        other = torch.zeros_like(one)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        # Some objects, such as arrays, do not compare to a bool.
        with contextlib.suppress(Exception):
            return 0.0 if one is other or one == other else math.inf
        return math.inf
    if one.shape != other.shape:
        return math.inf
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        one = one.double()
        other = other.double()
    difference = norm_of(one - other)
    if size is None:
        size = max(norm_of(one), norm_of(other))
    if not math.isfinite(difference + size) and one.layout is torch.strided:
        is_same = (one == other) | (one.isnan() & other.isnan())
        is_ignored = is_same & ~one.isfinite()
        difference = norm_of(torch.where(is_same, 0, one - other))
        size = max(norm_of(torch.where(is_ignored, 0, x)) for x in (one, other))
    error = difference / (size or 1.0)
    return math.inf if math.isnan(error) else error


_RANGE_ENDS = (0.98, 0.02)
"""Positions of fixed random numbers; one near each end takes both sides of most branches."""


def number_contexts(drawn: set[str]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return the contexts in which a batch and its chunks compute with the same random numbers.

    Args:
        drawn: Names of the random generators that a step of the whole batch uses.

    Raises:
        ArgumentError: If their numbers cannot be fixed.
    """
    for name in ("numpy", "python"):
        if name in drawn:
            raise ArgumentError(
                f"the forward pass draws random numbers from {name}, which cannot be fixed for a "
                "comparison"
            )
    if not drawn:
        return [contextlib.nullcontext]
    return [functools.partial(FixedRandomness, at) for at in _RANGE_ENDS]


_KEEPING_ALL = {"native_dropout": {"p": 0.0}, "_fused_dropout": {"p": 1.0}}
"""Arguments with which operations of dropout keep every number."""


class FixedRandomness(TorchDispatchMode):
    """Context in which torch's operations draw fixed numbers and dropout keeps every number.

    A model with dropout draws other numbers for a batch than for its chunks. With fixed numbers,
    both compute the same function, and their gradients can be compared.

    Args:
        at: Position of the numbers in the range of a distribution, from 0 to 1.

    Raises:
        ArgumentError: If an unknown operation draws random numbers.
    """

    def __init__(self, at: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if name in _KEEPING_ALL or "dropout_p" in names:
            return func(**given | _KEEPING_ALL.get(name, {"dropout_p": 0.0}))
        low, high = _range_of(name, given)
        drawn = func(*args, **kwargs)
        if name == "randperm":
            # A permutation that moves samples reveals whether samples depend on each other.
            return drawn.copy_(torch.arange(len(drawn)).flip(0))
        if name in ("bernoulli", "bernoulli_"):
            # A single number decides a branch; several numbers are a mask.
            return drawn.fill_(1.0 if drawn.numel() > 1 else round(self._at))
        drawn.fill_(low + self._at * (high - low))
        if drawn.is_floating_point() and drawn.ndim == 1 and len(drawn) > 1:
            # A model may sort a vector to shuffle samples. Descending numbers move the samples.
            drawn -= 1e-3 * torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
        return drawn


def _range_of(name: str, given: dict[str, Any]) -> tuple[float, float]:
    """Return the range of the numbers that an operation draws, for arguments by name."""
    if name in ("rand", "rand_like", "uniform_"):
        return given.get("from", 0.0), given.get("to", 1.0)
    if name in ("randn", "randn_like", "normal_"):
        mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        return mean - 2 * std, mean + 2 * std
    if name in ("randint", "randint_like"):
        return given.get("low", 0), given["high"]
    if name in ("randperm", "bernoulli", "bernoulli_"):
        return 0.0, 1.0
    raise ArgumentError(f"{name} draws random numbers, which cannot be fixed for a comparison")
