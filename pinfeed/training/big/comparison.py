"""Comparison of a strategy with the plain step on a few samples: outputs, gradients, state, losses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...tree import Rebuild, flatten
from .. import randomness
from ..memory.estimate import call
from ..memory.probe import is_out_of_memory
from .check import ROUNDING
from .chunks import check_rows, joined, part, some
from .fixedrandom import FixedRandomness
from .modelstate import State, on_copies
from .recompute import recomputed
from .strategies import Task

Context = Callable[[], AbstractContextManager[Any]]
Edges = Sequence[tuple[int, int]]
"""First row, and row after the last, of each chunk."""

_NEGLIGIBLE = 1e-3
"""A parameter with a smaller share of the gradient's norm is compared with that share of it."""


class Differs(Exception):
    """The comparison has found a difference; the message says which.

    Args:
        message: A clause.
        error: Size of the difference, relative to what differs.
    """

    def __init__(self, message: str, error: float = math.inf) -> None:
        super().__init__(message)
        self.error = error


@dataclass
class _Computed:
    """Results of one forward and backward pass over all samples.

    Attributes:
        outputs: Leaves of the outputs, without gradients.
        rebuild: Makes outputs of such leaves.
        gradients: One for each parameter; None where the outputs do not depend on it.
        state: State of the model afterwards.
    """

    outputs: list[Any]
    rebuild: Rebuild
    gradients: list[torch.Tensor | None]
    state: State


@dataclass(frozen=True)
class LossBatch:
    """Samples for which losses are compared.

    Attributes:
        inputs: The samples.
        targets: Their targets, on the device; or None.
        edges: Their chunks.
    """

    inputs: Any
    targets: Any
    edges: Edges


class Comparison:
    """Compares a strategy with the plain step on some samples.

    Args:
        task: The model and the loss.
        inputs: The samples, on the device.
        edges: Their chunks.
    """

    def __init__(self, task: Task, inputs: Any, edges: Edges) -> None:
        self._task = task
        self._inputs = inputs
        self._edges = edges
        self._whole: Edges = [(0, edges[-1][1])]
        self._parameters = task.parameters
        self._random = randomness.capture()
        self._context: Context = contextlib.nullcontext
        kinds = {p.dtype for p in self._parameters}
        self._rounding = max((ROUNDING.get(kind, 1e-4) for kind in kinds), default=1e-4)

    def run(self, strategy: str, device: torch.device, autocast: torch.dtype | None, loss: LossBatch) -> None:
        """Compare.

        Args:
            strategy: ``"accumulate"``, ``"two_pass"`` or ``"checkpoint"``.
            device: Where the samples are.
            autocast: The dtype of autocast.
            loss: For what targets losses are compared.

        Raises:
            Differs: The strategy gives something else.
        """
        plain = self._plain(device, autocast)
        if strategy == "checkpoint":
            self._compare(plain, self._computed_again)
            return
        if self._has_drawn():
            self._context = _both(self._context, FixedRandomness)
            plain = self._compute(self._whole)
        self._compare(plain, lambda into: self._compute(self._edges, into))
        if strategy == "accumulate":
            self._compare_losses(plain, loss)

    def _plain(self, device: torch.device, autocast: torch.dtype | None) -> _Computed:
        """The plain step; without autocast, whose rounding hides differences, if that works."""
        if autocast is None:
            return self._compute(self._whole)
        try:
            return self._compute(self._whole)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
        self._context = lambda: torch.autocast(device.type, autocast)
        self._rounding = max(self._rounding, ROUNDING[autocast])
        return self._compute(self._whole)

    def _compute(self, edges: Edges, into: list[torch.Tensor | None] | None = None) -> _Computed:
        """Outputs, gradients and state, chunk by chunk; ``into`` has the gradients taken away."""
        randomness.restore(self._random)
        total: list[torch.Tensor | None] = [None] * len(self._parameters) if into is None else into
        sign = 1 if into is None else -1
        parts = []
        with on_copies(self._task.modules) as state, self._context():
            for start, stop in edges:
                outputs = call(self._task.model, part(self._inputs, start, stop))
                check_rows(outputs, stop - start)
                leaves, rebuild = flatten(outputs)
                tensors = [leaf for _, leaf in leaves]
                found = self._gradients(tensors, start, stop)
                # One by one, so that no third set of gradients is kept.
                for i, gradient in enumerate(found):
                    total[i] = _sum(total[i], gradient, sign)
                parts.append(rebuild(map(_detached, tensors)))
            leaves, rebuild = flatten(joined(parts))
            return _Computed([leaf for _, leaf in leaves], rebuild, total, state())

    def _computed_again(self, into: list[torch.Tensor | None]) -> _Computed:
        with recomputed(self._task.model):
            return self._compute(self._whole, into)

    def _gradients(self, outputs: Sequence[Any], start: int, stop: int) -> Sequence[torch.Tensor | None]:
        """Gradients of the parameters for random gradients of the outputs of these samples."""
        wanted = [
            (leaf, _random_rows(i, leaf, start, stop))
            for i, leaf in enumerate(outputs)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not wanted or not self._parameters:
            return [None for _ in self._parameters]
        leaves, cotangents = zip(*wanted, strict=True)
        return torch.autograd.grad(leaves, self._parameters, cotangents, allow_unused=True)

    def _has_drawn(self) -> bool:
        """Whether torch's generators are elsewhere than at the beginning."""
        now = randomness.capture()
        if not torch.equal(now["torch"], self._random["torch"]):
            return True
        pairs = zip(now.get("cuda", []), self._random.get("cuda", []), strict=False)
        return any(not torch.equal(one, other) for one, other in pairs)

    def _compare(self, plain: _Computed, compute: Callable[[list[torch.Tensor | None]], _Computed]) -> None:
        norms = [_norm(gradient) for gradient in plain.gradients]
        try:
            other = compute(plain.gradients)
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            raise Differs(f"the model fails on some of the samples ({_first_line(error)})") from None
        self._compare_states(plain.state, other.state)
        for one, another in zip(plain.outputs, other.outputs, strict=True):
            self._require_equal(one, another, "an output of the model differs")
        self._compare_norms(norms, [_norm(difference) for difference in other.gradients])

    def _compare_states(self, plain: State, other: State) -> None:
        for name in dict.fromkeys((*plain, *other)):
            # The same computation gives the same bits; a state that has gone further does not.
            if _error(plain.get(name), other.get(name)) > 0:
                raise Differs(f"{name!r} of the model, which the forward pass changes, has other values afterwards")

    def _compare_norms(self, norms: Sequence[float], differences: Sequence[float]) -> None:
        least = _NEGLIGIBLE * math.hypot(*norms)
        errors = {
            name: difference / (max(norm, least) or 1.0) for name, norm, difference in zip(self._names(), norms, differences, strict=True)
        }
        wrong = {name: error for name, error in errors.items() if not error <= self._rounding}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            said = f"gradients of {len(wrong)} of {len(errors)} parameters differ, that of {worst!r} by {wrong[worst]:.2%}"
            raise Differs(said, wrong[worst])

    def _compare_losses(self, plain: _Computed, batch: LossBatch) -> None:
        """Compare the loss of all targets, and its gradients, with those of the chunks; outputs are repeated where there are fewer."""
        task = self._task
        n = batch.edges[-1][1]
        repeated = torch.arange(n) % self._whole[0][1]
        outputs = [_leaf(leaf) for _, leaf in flatten(some(plain.rebuild(iter(plain.outputs)), repeated))[0]]
        parameters = [p for m in task.modules if m is not task.model for p in m.parameters()]
        wanted = [t for t in (*outputs, *parameters) if getattr(t, "requires_grad", False)]

        def loss(start: int, stop: int) -> torch.Tensor:
            given = part(plain.rebuild(iter(outputs)), start, stop)
            return task.loss(given, part(batch.targets, start, stop))

        def gradients(of: torch.Tensor) -> Sequence[torch.Tensor | None]:
            return torch.autograd.grad(of, wanted, allow_unused=True, retain_graph=True)

        with on_copies(task.modules), self._context():
            try:
                whole = loss(0, n)
                terms = [task.terms(part(batch.inputs, *edge), part(batch.targets, *edge)) for edge in batch.edges]
                total = sum(terms) if task.reduction == "mean" else 1.0
                weights = terms if task.reduction == "mean" else [1.0 for _ in terms]
                # A mean of no terms is not a number, and no part of the whole.
                chunks = [loss(*edge) * (weight / total) for edge, weight in zip(batch.edges, weights, strict=True) if weight]
            except (RuntimeError, ValueError, IndexError) as error:
                if is_out_of_memory(error):
                    raise
                raise Differs(f"the loss fails on some of the samples ({_first_line(error)})") from None
            if not chunks or not wanted:
                return
            made = torch.stack(chunks).sum()
            said = "the losses of chunks do not make that of the batch: "
            self._require_equal(whole.detach(), made.detach(), f"{said}it differs")
            for one, another in zip(gradients(whole), gradients(made), strict=True):
                self._require_equal(one, another, f"{said}its gradients differ")

    def _require_equal(self, one: Any, other: Any, said: str) -> None:
        found = _error(one, other)
        if found > self._rounding:
            raise Differs(f"{said} by {found:.2%}", found)

    def _names(self) -> list[str]:
        named = (pair for module in self._task.modules for pair in module.named_parameters())
        names = {id(p): name for name, p in named}
        return [names[id(p)] for p in self._parameters]


def _random_rows(i: int, leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Gradients of output ``i``, the same for a sample in whatever chunk it is."""
    if not leaf.ndim:
        return torch.ones_like(leaf)
    generator = torch.Generator()
    rows = []
    for row in range(start, stop):
        generator.manual_seed(1000 * i + row)
        rows.append(torch.rand(leaf.shape[1:], generator=generator).sub_(0.5))
    return torch.stack(rows).to(leaf.device, leaf.dtype)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _leaf(value: Any) -> Any:
    """An output as the beginning of a graph."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value


def _sum(one: torch.Tensor | None, other: torch.Tensor | None, sign: int) -> torch.Tensor | None:
    if other is None:
        return one
    if one is None:
        return other if sign > 0 else -other
    return one.add(other, alpha=sign)


def _norm(tensor: torch.Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=_wide(values.dtype)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _error(one: Any, other: Any) -> float:
    """Norm of the difference relative to the larger norm; infinite if shapes or kinds differ.

    Two values that are not finite, at the same places, are equal.
    """
    if one is None or other is None:
        only = one if other is None else other
        is_zero = isinstance(only, torch.Tensor) and not bool(only.any())
        return 0.0 if only is None or is_zero else math.inf
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0 if one is other or bool(one == other) else math.inf
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    wide = _wide(one.dtype)
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        one, other = one.to(wide), other.to(wide)
    difference, size = _norm(one - other), max(_norm(one), _norm(other))
    if not math.isfinite(difference) or not math.isfinite(size):
        a, b = one.to(wide), other.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        difference = _norm(torch.where(same, 0, a - b))
        size = max(_norm(torch.where(same & ~a.isfinite(), 0, x)) for x in (a, b))
    error = difference / (size or 1.0)
    return math.inf if math.isnan(error) else error


def _both(one: Context, other: Context) -> Context:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with one(), other():
            yield

    return entered
