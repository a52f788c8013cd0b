"""StepResult: loss, gradients and state of the model after a step that leaves no trace.

The state is that of buffers, and of attributes with tensors or numbers. A model that draws random
numbers gets fixed ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError
from pinfeed.tensors import rng_state
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.restored_state import State, gradients_set_aside, state_on_copies
from pinfeed.training.large_batch.step_spec import StepSpec

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences that rounding explains, by dtype.

If a difference is larger, the comparison runs again in float64.
"""
_BATCH_ROUNDING = {**ROUNDING, torch.float32: 1e-4}
"""The same for ``Check``; sums over a batch of any size round more."""


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


def largest_rounding(spec: StepSpec, by_dtype: Mapping[torch.dtype, float]) -> float:
    """Return the largest difference that the rounding of a parameter's dtype explains."""
    usual = by_dtype[torch.float32]
    return max((by_dtype.get(p.dtype, usual) for p in spec.parameters), default=usual)


@dataclass(frozen=True, repr=False)
class Check:
    """Differences between a strategy and the plain step; ``str(check)`` is a sentence.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> with pinfeed.BigBatch(model, torch.nn.MSELoss(), chunk_size=64) as big_batch:
        ...     check = big_batch.check(torch.randn(9, 8), torch.randn(9, 1))
        >>> bool(check)
        True

    Attributes:
        strategy: The strategy that was compared.
        gradient_error: Norm of the difference of all gradients, relative to their norm.
        loss_error: Difference of the losses, relative to the loss.
        buffer_error: Largest norm of the difference of a buffer (such as running statistics),
            relative to the buffer's norm.
        is_exact: Whether all differences are no more than rounding; ``bool(check)`` is the same.
        has_fixed_numbers: Whether torch returned fixed random numbers in both steps, because chunks
            draw others than the whole batch.
    """

    strategy: str
    gradient_error: float
    loss_error: float
    buffer_error: float
    is_exact: bool
    has_fixed_numbers: bool

    def __bool__(self) -> bool:
        return self.is_exact

    def __repr__(self) -> str:
        verdict = "equal except for rounding" if self.is_exact else "NOT equal"
        errors = (
            f"gradients {self.gradient_error:.1e}, loss {self.loss_error:.1e}, "
            f"buffers {self.buffer_error:.1e}"
        )
        fixed = ", with fixed random numbers" if self.has_fixed_numbers else ""
        return f"{self.strategy} and the plain step{fixed}: {verdict} ({errors})"


def compare_with_plain_step(
    spec: StepSpec,
    strategy: str,
    plain: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
    *,
    is_cut: bool,
) -> Check:
    """Run two steps from the same state and compare them.

    The model, its gradients and the random generators do not change.

    Args:
        spec: The model and the loss.
        strategy: Name of the strategy, for the result.
        plain: Runs the plain step and returns its loss.
        other: Runs the step of the strategy and returns its loss.
        is_cut: Whether the strategy computes chunks, which draw other random numbers.

    Raises:
        ArgumentError: If chunks draw random numbers that cannot be fixed.
    """
    state = rng_state.capture()
    drawn = run_step(spec, plain, state).drawn if is_cut else set()
    checks = []
    for context in number_contexts(drawn):
        with context():
            want, got = (run_step(spec, compute, state) for compute in (plain, other))
        errors = _errors_of(want, got)
        is_exact = max(errors) <= largest_rounding(spec, _BATCH_ROUNDING)
        checks.append(Check(strategy, *errors, is_exact, has_fixed_numbers=bool(drawn)))
    # The first one that is not exact, if there is one.
    return min(checks, key=bool)


def _errors_of(want: StepResult, got: StepResult) -> tuple[float, float, float]:
    """Return the relative errors of gradients, loss and buffers."""
    gradients = zip(want.gradients, got.gradients, strict=True)
    difference = math.hypot(*(relative_error(one, other, 1.0) for one, other in gradients))
    size = math.hypot(*map(norm_of, want.gradients))
    buffers = (relative_error(value, got.buffers[name]) for name, value in want.buffers.items())
    loss_error = relative_error(want.loss, got.loss)
    return difference / (size or 1.0), loss_error, max(buffers, default=0.0)


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
