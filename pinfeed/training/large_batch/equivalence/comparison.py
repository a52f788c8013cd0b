"""Comparison of a strategy with the plain step on a few samples: outputs, gradients, state, losses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.training import rng_state
from pinfeed.training.large_batch.equivalence.fixed_random import FixedRandomness
from pinfeed.training.large_batch.equivalence.model_state import (
    State,
    perturbed_parameters,
    state_on_copies,
)
from pinfeed.training.large_batch.equivalence.rounding import (
    DifferenceFound,
    Rounding,
    added,
    first_line,
    norm_of,
    random_rows,
)
from pinfeed.training.large_batch.equivalence.step_comparison import (
    ONE_BY_ONE,
    Edges,
    StepSamples,
    cloned,
    compare_steps,
    gradients_set_aside,
)
from pinfeed.training.large_batch.strategies.gradients import StepSpec
from pinfeed.training.large_batch.strategies.micro_batches import (
    check_output_rows,
    concatenate,
    select_samples,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.recompute import recomputed
from pinfeed.training.memory_model.estimate import call_model
from pinfeed.training.memory_model.probe import is_out_of_memory

Context = Callable[[], AbstractContextManager[Any]]


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


_LOSS_BYTES = 16 << 20
"""Bytes of outputs for which losses are compared."""
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences that rounding explains, by dtype.

Larger ones are computed again in float64.
"""
PLAIN_FAILS = "the plain step fails"
"""The beginning of a problem that the plain step has as well."""


class Comparison:
    """Compares a strategy with the plain step on some samples.

    Args:
        spec: The model and the loss.
        samples: The samples.
        more: Returns at most so many samples for which losses are compared: outputs of few are
            repeated for them.
        autocast: The dtype of autocast, or None. It is used only where the model does not run
            without it.
    """

    def __init__(
        self,
        spec: StepSpec,
        samples: StepSamples,
        more: Callable[[int], StepSamples],
        autocast: torch.dtype | None,
    ) -> None:
        self._spec = spec
        self._samples = samples
        self._more = more
        self._autocast = autocast
        self._inputs = samples.inputs
        self._edges = samples.edges
        self._whole: Edges = [(0, samples.edges[-1][1])]
        self._parameters = spec.parameters
        self._random = rng_state.capture()
        self._context: Context = contextlib.nullcontext
        kinds = {p.dtype for p in self._parameters}
        self._rounding = Rounding(max((_ROUNDING.get(kind, 1e-5) for kind in kinds), default=1e-5))

    def run(self, strategy: str) -> None:
        """Compare ``"accumulate"``, ``ONE_BY_ONE``, ``"two_pass"`` or ``"checkpoint"``.

        Raises:
            DifferenceFound: The strategy gives something else.
        """
        # First, for the other computations would leave the parameters changed.
        self._require_parameters_are_read()
        plain = self._plain()
        if strategy == "checkpoint":
            self._compare(plain, self._computed_again)
            return
        self._require_no_other_randomness()
        contexts = [self._context]
        if self._has_drawn():
            # A number near each end of its range takes both ways of most branches.
            contexts = [
                _both(self._context, functools.partial(FixedRandomness, at)) for at in (0.98, 0.02)
            ]
        for context in contexts:
            self._context = context
            plain = self._compute(self._whole)
            self._compare(plain, lambda into: self._compute(self._edges, into))
            if strategy in ("accumulate", ONE_BY_ONE):
                self._compare_losses(plain)
            compare_steps(
                self._spec, strategy, self._samples, self._random, self._rounding, context
            )

    def _require_no_other_randomness(self) -> None:
        now = rng_state.capture()
        for name in ("numpy", "python"):
            if str(now[name]) != str(self._random[name]):
                raise DifferenceFound(
                    f"the forward pass draws random numbers of {name}, which cannot be fixed for a comparison"
                )

    def _require_parameters_are_read(self) -> None:
        rng_state.restore(self._random)
        modules = self._spec.modules
        with state_on_copies(modules), perturbed_parameters(modules) as written, self._context():
            try:
                call_model(self._spec.model, cloned(self._inputs))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # The plain step is about to fail as well, and says so.
            name = written()
        if name:
            raise DifferenceFound(
                f"the forward pass writes into the parameter {name!r}, which it would do for each chunk"
            )

    def _plain(self) -> _Computed:
        """The plain step; without autocast, whose rounding hides differences, if that works."""
        device = next((p.device for p in self._parameters), torch.device("cpu"))
        autocast = self._autocast
        try:
            return self._compute(self._whole)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, DifferenceFound):
                raise
            if autocast is None:
                n = self._edges[-1][1]
                raise DifferenceFound(
                    f"{PLAIN_FAILS} on {n} samples of the batch ({first_line(error)})"
                ) from error
        self._autocast = None
        self._context = lambda: torch.autocast(device.type, autocast)
        self._rounding = Rounding(max(self._rounding.limit, _ROUNDING[autocast]))
        return self._plain()

    def _compute(self, edges: Edges, into: list[torch.Tensor | None] | None = None) -> _Computed:
        """Outputs, gradients and state, chunk by chunk; ``into`` has the gradients taken away."""
        rng_state.restore(self._random)
        total: list[torch.Tensor | None] = [None] * len(self._parameters) if into is None else into
        sign = 1 if into is None else -1
        parts = []
        with state_on_copies(self._spec.modules) as state, self._context():
            copied = cloned(self._inputs)
            for start, stop in edges:
                outputs = call_model(self._spec.model, slice_samples(copied, start, stop))
                check_output_rows(outputs, stop - start)
                leaves, rebuild = flatten(outputs)
                tensors = [leaf for _, leaf in leaves]
                found = self._gradients(tensors, start, stop)
                # One by one, so that no third set of gradients is kept.
                for i, gradient in enumerate(found):
                    total[i] = added(total[i], gradient, sign)
                parts.append(rebuild(map(_detached, tensors)))
            leaves, rebuild = flatten(concatenate(parts))
            return _Computed([leaf for _, leaf in leaves], rebuild, total, state())

    def _computed_again(self, into: list[torch.Tensor | None]) -> _Computed:
        with recomputed(self._spec.model):
            return self._compute(self._whole, into)

    def _gradients(
        self, outputs: Sequence[Any], start: int, stop: int
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of the parameters for random gradients of the outputs of these samples."""
        wanted = [
            (leaf, random_rows(i, leaf, start, stop))
            for i, leaf in enumerate(outputs)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not wanted or not self._parameters:
            return [None for _ in self._parameters]
        leaves, cotangents = zip(*wanted, strict=True)
        with gradients_set_aside(self._parameters):
            # As a training step does it, with its hooks, and for models that compute parts again.
            torch.autograd.backward(leaves, cotangents)
            return [p.grad for p in self._parameters]

    def _has_drawn(self) -> bool:
        """Whether torch's generators are elsewhere than at the beginning."""
        now = rng_state.capture()
        if not torch.equal(now["torch"], self._random["torch"]):
            return True
        pairs = zip(now.get("cuda", []), self._random.get("cuda", []), strict=False)
        return any(not torch.equal(one, other) for one, other in pairs)

    def _compare(
        self, plain: _Computed, compute: Callable[[list[torch.Tensor | None]], _Computed]
    ) -> None:
        norms = [norm_of(gradient) for gradient in plain.gradients]
        try:
            other = compute(plain.gradients)
        except DifferenceFound:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise DifferenceFound(
                f"the model fails on some of the samples ({first_line(error)})"
            ) from None
        self._rounding.require_states(plain.state, other.state)
        for one, another in zip(plain.outputs, other.outputs, strict=True):
            self._rounding.require(one, another, "an output of the model differs")
        self._rounding.require_norms(
            self._spec, norms, [norm_of(difference) for difference in other.gradients]
        )

    def _compare_losses(self, plain: _Computed) -> None:
        """Compare the loss of all targets, and its gradients, with those of the chunks; outputs are repeated where there are fewer."""
        spec = self._spec
        n_computed = self._whole[0][1]
        nbytes = sum(leaf.nbytes for leaf in plain.outputs if isinstance(leaf, torch.Tensor))
        batch = self._more(max(2 * n_computed, _LOSS_BYTES // max(1, nbytes // n_computed)))
        n = batch.edges[-1][1]
        repeated = torch.arange(n) % n_computed
        outputs = [
            _leaf(leaf)
            for _, leaf in flatten(select_samples(plain.rebuild(iter(plain.outputs)), repeated))[0]
        ]
        parameters = [p for m in spec.modules if m is not spec.model for p in m.parameters()]
        wanted = [t for t in (*outputs, *parameters) if getattr(t, "requires_grad", False)]

        def loss(start: int, stop: int) -> torch.Tensor:
            given = slice_samples(plain.rebuild(iter(outputs)), start, stop)
            return spec.loss(given, slice_samples(batch.targets, start, stop))

        def gradients(of: torch.Tensor) -> Sequence[torch.Tensor | None]:
            return torch.autograd.grad(of, wanted, allow_unused=True, retain_graph=True)

        with state_on_copies(spec.modules), self._context():
            try:
                whole = loss(0, n)
                terms = [
                    spec.terms(
                        slice_samples(batch.inputs, *edge), slice_samples(batch.targets, *edge)
                    )
                    for edge in batch.edges
                ]
                total = sum(terms) if spec.reduction == "mean" else 1.0
                weights = terms if spec.reduction == "mean" else [1.0 for _ in terms]
                # A mean of no terms is not a number, and no part of the whole.
                chunks = [
                    loss(*edge) * (weight / total)
                    for edge, weight in zip(batch.edges, weights, strict=True)
                    if weight
                ]
                if not chunks or not wanted:
                    return
                made = torch.stack(chunks).sum()
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise DifferenceFound(
                    f"the loss fails on some of the samples ({first_line(error)})"
                ) from None
            said = "the losses of chunks do not make that of the batch: "
            self._rounding.require(whole.detach(), made.detach(), f"{said}it differs")
            for one, another in zip(gradients(whole), gradients(made), strict=True):
                self._rounding.require(one, another, f"{said}its gradients differ")


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _leaf(value: Any) -> Any:
    """An output as the beginning of a graph."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value


def _both(one: Context, other: Context) -> Context:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with one(), other():
            yield

    return entered
