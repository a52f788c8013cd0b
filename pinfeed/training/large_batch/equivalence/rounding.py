"""Rounding: decides whether rounding explains the difference between two results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.training.large_batch.equivalence.model_state import ReshapedTensor, State
from pinfeed.training.large_batch.strategies.step_spec import StepSpec

_NEGLIGIBLE = 1e-3
"""Smallest share of the whole gradient's norm that the error of a parameter is divided by."""


class DifferenceFound(Exception):
    """A comparison found a difference, which the message describes as a clause.

    Args:
        message: The clause.
        error: Relative size of the difference.
    """

    def __init__(self, message: str, error: float = math.inf) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True)
class Rounding:
    """Comparison of results with a tolerance for rounding.

    Attributes:
        limit: Largest relative difference that counts as rounding.
    """

    limit: float

    def check(self, one: Any, other: Any, what_differs: str) -> None:
        """Check that two values are equal except for rounding.

        Raises:
            DifferenceFound: If the values differ by more.
        """
        error = error_of(one, other)
        if error > self.limit:
            raise DifferenceFound(f"{what_differs} by {error:.2%}", error)

    def check_states(self, plain: State, other: State) -> None:
        """Check that a model ends in the same state, bit for bit.

        The same computation gives the same bits; a state that was updated more often differs.

        Raises:
            DifferenceFound: If the states differ.
        """
        for name in dict.fromkeys((*plain, *other)):
            one = plain.get(name)
            another = other.get(name)
            if _follows_batch_shape(one, another):
                continue
            if error_of(_value(one), _value(another)) > 0:
                raise DifferenceFound(
                    f"the forward pass changes {name!r} of the model, and chunks leave other "
                    "values in it"
                )

    def check_gradients(
        self,
        spec: StepSpec,
        plain: Sequence[torch.Tensor | None],
        other: Sequence[torch.Tensor | None],
    ) -> None:
        """Check that the gradients of all parameters are equal except for rounding.

        Raises:
            DifferenceFound: If some differ.
        """
        differences = [
            norm_of(added(one, another, -1)) for one, another in zip(plain, other, strict=True)
        ]
        self.check_gradient_norms(spec, [norm_of(one) for one in plain], differences)

    def check_gradient_norms(
        self, spec: StepSpec, norms: Sequence[float], differences: Sequence[float]
    ) -> None:
        """Check the gradients of all parameters, given the norms of gradients and differences.

        Raises:
            DifferenceFound: If some differ.
        """
        least = _NEGLIGIBLE * math.hypot(*norms)
        errors = {
            name: difference / (max(norm, least) or 1.0)
            for name, norm, difference in zip(names_of(spec), norms, differences, strict=True)
        }
        # A comparison with NaN is false, so NaN counts as wrong.
        wrong = {name: error for name, error in errors.items() if not error <= self.limit}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            raise DifferenceFound(
                f"the gradients of {len(wrong)} of {len(errors)} parameters differ; the gradient "
                f"of {worst!r} differs by {wrong[worst]:.2%}",
                wrong[worst],
            )


def _follows_batch_shape(one: Any, other: Any) -> bool:
    """Return whether a state follows the last batch: its shape differs between the two sides."""
    is_reshaped = isinstance(one, ReshapedTensor) or isinstance(other, ReshapedTensor)
    return is_reshaped and getattr(one, "shape", None) != getattr(other, "shape", None)


def _value(state: Any) -> Any:
    return state.value if isinstance(state, ReshapedTensor) else state


def names_of(spec: StepSpec) -> list[str]:
    """Return the names of the parameters that require gradients, in the order of the spec."""
    named = (pair for module in spec.modules for pair in module.named_parameters())
    names = {id(p): name for name, p in named}
    return [names[id(p)] for p in spec.parameters]


def added(one: torch.Tensor | None, other: torch.Tensor | None, sign: int) -> torch.Tensor | None:
    """Return ``one + sign * other``, where None is zero."""
    if other is None:
        return one
    if one is None:
        return other if sign > 0 else -other
    return one.add(other, alpha=sign)


def norm_of(tensor: torch.Tensor | None) -> float:
    """Return the Euclidean norm, computed in float64; the tensor may be sparse."""
    if tensor is None or not tensor.numel():
        return 0.0
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=_double_dtype(values.dtype)))


def error_of(one: Any, other: Any) -> float:
    """Return the norm of the difference, relative to the larger norm.

    The error is infinite if shapes or kinds differ. Non-finite values at the same positions are
    equal. None equals a tensor of zeros.
    """
    if one is None or other is None:
        only = one if other is None else other
        is_zero = isinstance(only, torch.Tensor) and not bool(only.any())
        return 0.0 if only is None or is_zero else math.inf
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0 if one is other or _is_equal(one, other) else math.inf
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    return _relative_error(one, other)


def _relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    dtype = _double_dtype(one.dtype)
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        one = one.to(dtype)
        other = other.to(dtype)
    difference = norm_of(one - other)
    size = max(norm_of(one), norm_of(other))
    if not math.isfinite(difference) or not math.isfinite(size):
        a = one.to(dtype)
        b = other.to(dtype)
        is_same = (a == b) | (a.isnan() & b.isnan())
        is_ignored = is_same & ~a.isfinite()
        difference = norm_of(torch.where(is_same, 0, a - b))
        size = max(norm_of(torch.where(is_ignored, 0, x)) for x in (a, b))
    error = difference / (size or 1.0)
    return math.inf if math.isnan(error) else error


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # Some objects, such as arrays, do not compare to a bool.
        return False


def _double_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
