"""Comparison of a strategy with the plain step on a few samples: outputs, gradients, loss."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.equivalence.conditions import (
    ONE_BY_ONE,
    PLAIN_FAILS,
    Conditions,
    Edges,
    StepSamples,
    cloned,
    first_line,
)
from pinfeed.training.large_batch.equivalence.fixed_random import FixedRandomness
from pinfeed.training.large_batch.equivalence.loss_comparison import compare_losses
from pinfeed.training.large_batch.equivalence.model_pass import Gradients, PassResult, run_model
from pinfeed.training.large_batch.equivalence.model_state import (
    perturbed_parameters,
    state_on_copies,
)
from pinfeed.training.large_batch.equivalence.rounding import DifferenceFound, Rounding, norm_of
from pinfeed.training.large_batch.equivalence.step_comparison import compare_steps
from pinfeed.training.large_batch.strategies.recompute import recomputed
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory

Context = Callable[[], AbstractContextManager[Any]]

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences that rounding explains, by dtype.

If a difference is larger, the comparison runs again in float64.
"""
_DEFAULT_ROUNDING = 1e-5
_RANGE_ENDS = (0.98, 0.02)
"""Positions of fixed random numbers; one near each end takes both sides of most branches."""


class Comparison:
    """Compares a strategy with the plain step on some samples.

    Args:
        spec: The model and the loss.
        samples: The samples.
        more: Function that returns at most the given number of samples, to compare losses.
        autocast: Dtype of autocast, or None. The comparison uses autocast only if the model does
            not run without it, because the rounding of autocast hides differences.
    """

    def __init__(
        self,
        spec: StepSpec,
        samples: StepSamples,
        more: Callable[[int], StepSamples],
        autocast: torch.dtype | None,
    ) -> None:
        dtypes = {p.dtype for p in spec.parameters}
        limits = [_ROUNDING.get(dtype, _DEFAULT_ROUNDING) for dtype in dtypes]
        rounding = Rounding(max(limits, default=_DEFAULT_ROUNDING))
        random = rng_state.capture()
        self._conditions = Conditions(spec, samples, random, contextlib.nullcontext, rounding)
        self._more = more
        self._autocast = autocast
        self._whole: Edges = [(0, samples.n)]

    def run(self, strategy: str) -> None:
        """Compare ``"accumulate"``, ``ONE_BY_ONE``, ``"two_pass"`` or ``"checkpoint"``.

        Raises:
            DifferenceFound: If the strategy differs from the plain step.
        """
        # This check is first, because the other computations would leave the parameters changed.
        self._check_parameters_are_only_read()
        plain = self._run_plain()
        if strategy == "checkpoint":
            self._compare_passes(plain, self._run_recomputed)
            return
        self._check_no_foreign_randomness()
        contexts = [self._conditions.context]
        if self._has_drawn():
            contexts = [
                _combined(contexts[0], functools.partial(FixedRandomness, at)) for at in _RANGE_ENDS
            ]
        for context in contexts:
            self._conditions = replace(self._conditions, context=context)
            plain = run_model(self._conditions, self._whole)
            self._compare_passes(plain, self._run_chunks)
            if strategy in ("accumulate", ONE_BY_ONE):
                compare_losses(self._conditions, plain, self._more)
            compare_steps(self._conditions, strategy)

    def _check_parameters_are_only_read(self) -> None:
        conditions = self._conditions
        rng_state.restore(conditions.random)
        modules = conditions.spec.modules
        with (
            state_on_copies(modules),
            perturbed_parameters(modules) as name_of_written,
            conditions.context(),
        ):
            try:
                call_model(conditions.spec.model, cloned(conditions.samples.inputs))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # The plain step fails next in the same way, and its error is reported.
            name = name_of_written()
        if name:
            raise DifferenceFound(
                f"the forward pass writes to the parameter {name!r}, so chunks would write to it "
                "several times"
            )

    def _run_plain(self) -> PassResult:
        """Run the plain step, without autocast if that works."""
        autocast = self._autocast
        try:
            return run_model(self._conditions, self._whole)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, DifferenceFound):
                raise
            if autocast is None:
                n = self._conditions.samples.n
                raise DifferenceFound(
                    f"{PLAIN_FAILS} on {n} samples of the batch ({first_line(error)})"
                ) from error
        self._autocast = None
        parameters = self._conditions.spec.parameters
        device = next((p.device for p in parameters), torch.device("cpu"))
        self._conditions = replace(
            self._conditions,
            context=lambda: torch.autocast(device.type, autocast),
            rounding=Rounding(max(self._conditions.rounding.limit, _ROUNDING[autocast])),
        )
        return self._run_plain()

    def _check_no_foreign_randomness(self) -> None:
        """Check that the forward pass draws random numbers from no library but torch."""
        now = rng_state.capture()
        for name in ("numpy", "python"):
            if str(now[name]) != str(self._conditions.random[name]):
                raise DifferenceFound(
                    f"the forward pass draws random numbers from {name}, which cannot be fixed for "
                    "a comparison"
                )

    def _has_drawn(self) -> bool:
        """Return whether the forward pass has advanced torch's random generators."""
        before = self._conditions.random
        now = rng_state.capture()
        if not torch.equal(now["torch"], before["torch"]):
            return True
        pairs = zip(now.get("cuda", []), before.get("cuda", []), strict=False)
        return any(not torch.equal(one, other) for one, other in pairs)

    def _run_recomputed(self, subtract_from: Gradients) -> PassResult:
        with recomputed(self._conditions.spec.model):
            return run_model(self._conditions, self._whole, subtract_from)

    def _run_chunks(self, subtract_from: Gradients) -> PassResult:
        return run_model(self._conditions, self._conditions.samples.edges, subtract_from)

    def _compare_passes(
        self, plain: PassResult, compute: Callable[[Gradients], PassResult]
    ) -> None:
        """Compare with a pass that subtracts its gradients from those of the plain step."""
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
        rounding = self._conditions.rounding
        rounding.check_states(plain.state, other.state)
        for one, another in zip(plain.outputs, other.outputs, strict=True):
            rounding.check(one, another, "an output of the model differs")
        differences = [norm_of(difference) for difference in other.gradients]
        rounding.check_gradient_norms(self._conditions.spec, norms, differences)


def _combined(one: Context, other: Context) -> Context:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with one(), other():
            yield

    return both
