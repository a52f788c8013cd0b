"""Differences between what two computations give, and which of them rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.errors import described
from pinfeed.training.large_batch.equivalence.model_state import ReshapedTensor, State
from pinfeed.training.large_batch.strategies.gradients import StepSpec

_NEGLIGIBLE = 1e-3
"""A parameter with a smaller share of the gradient's norm is compared with that share of it."""


class DifferenceFound(Exception):
    """A comparison has found a difference; the message says which.

    Args:
        message: A clause.
        error: Size of the difference, relative to what differs.
    """

    def __init__(self, message: str, error: float = math.inf) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True)
class Rounding:
    """Compares numbers.

    Attributes:
        limit: The largest relative difference that counts as rounding.
    """

    limit: float

    def require(self, one: Any, other: Any, said: str) -> None:
        """Check that two values are equal but for rounding.

        Raises:
            DifferenceFound: They are not.
        """
        found = error_of(one, other)
        if found > self.limit:
            raise DifferenceFound(f"{said} by {found:.2%}", found)

    def require_states(self, plain: State, other: State) -> None:
        """Check that a model ends in the same state, bit for bit.

        Raises:
            DifferenceFound: It does not.
        """
        for name in dict.fromkeys((*plain, *other)):
            one, another = plain.get(name), other.get(name)
            is_record = isinstance(one, ReshapedTensor) or isinstance(another, ReshapedTensor)
            if is_record and getattr(one, "shape", None) != getattr(another, "shape", None):
                # An attribute that follows the shape of the batch shows the last batch.
                continue
            # The same computation gives the same bits; a state that has gone further does not.
            if error_of(_value(one), _value(another)) > 0:
                raise DifferenceFound(
                    f"{name!r} of the model, which the forward pass changes, has other values afterwards"
                )

    def require_gradients(
        self,
        spec: StepSpec,
        plain: Sequence[torch.Tensor | None],
        other: Sequence[torch.Tensor | None],
    ) -> None:
        """Check the gradients of all parameters.

        Raises:
            DifferenceFound: Some differ.
        """
        differences = [
            norm_of(added(one, another, -1)) for one, another in zip(plain, other, strict=True)
        ]
        self.require_norms(spec, [norm_of(one) for one in plain], differences)

    def require_norms(
        self, spec: StepSpec, norms: Sequence[float], differences: Sequence[float]
    ) -> None:
        """Check the gradients of all parameters, of which norms and the norms of differences are known.

        Raises:
            DifferenceFound: Some differ.
        """
        least = _NEGLIGIBLE * math.hypot(*norms)
        errors = {
            name: difference / (max(norm, least) or 1.0)
            for name, norm, difference in zip(names_of(spec), norms, differences, strict=True)
        }
        wrong = {name: error for name, error in errors.items() if not error <= self.limit}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            said = f"gradients of {len(wrong)} of {len(errors)} parameters differ, that of {worst!r} by {wrong[worst]:.2%}"
            raise DifferenceFound(said, wrong[worst])


def _value(state: Any) -> Any:
    return state.value if isinstance(state, ReshapedTensor) else state


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or described(error)).splitlines()[0]


def names_of(spec: StepSpec) -> list[str]:
    """Names of the parameters of a spec, in their order."""
    named = (pair for module in spec.modules for pair in module.named_parameters())
    names = {id(p): name for name, p in named}
    return [names[id(p)] for p in spec.parameters]


def random_rows(i: int, leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Gradients of output ``i``, the same for a sample in whatever chunk it is."""
    if not leaf.ndim:
        return torch.ones_like(leaf)
    generator = torch.Generator()
    rows = []
    for row in range(start, stop):
        generator.manual_seed(1000 * i + row)
        rows.append(torch.rand(leaf.shape[1:], generator=generator).sub_(0.5))
    return torch.stack(rows).to(leaf.device, leaf.dtype)


def added(one: torch.Tensor | None, other: torch.Tensor | None, sign: int) -> torch.Tensor | None:
    """``one + sign * other``; None is zero."""
    if other is None:
        return one
    if one is None:
        return other if sign > 0 else -other
    return one.add(other, alpha=sign)


def norm_of(tensor: torch.Tensor | None) -> float:
    """The Euclidean norm, in float64; of sparse tensors too."""
    if tensor is None or not tensor.numel():
        return 0.0
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=_wide(values.dtype)))


def error_of(one: Any, other: Any) -> float:
    """Norm of the difference relative to the larger norm; infinite if shapes or kinds differ.

    Two values that are not finite, at the same places, are equal.
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
    wide = _wide(one.dtype)
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        one, other = one.to(wide), other.to(wide)
    difference, size = norm_of(one - other), max(norm_of(one), norm_of(other))
    if not math.isfinite(difference) or not math.isfinite(size):
        a, b = one.to(wide), other.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        difference = norm_of(torch.where(same, 0, a - b))
        size = max(norm_of(torch.where(same & ~a.isfinite(), 0, x)) for x in (a, b))
    error = difference / (size or 1.0)
    return math.inf if math.isnan(error) else error


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # An array, or an object whose comparison is no bool.
        return False


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
