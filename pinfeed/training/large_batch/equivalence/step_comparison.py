"""Comparison of whole training steps, run by the code that trains: plain step and strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pinfeed.tensors import rng_state
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.equivalence.conditions import (
    ONE_BY_ONE,
    Conditions,
    cloned,
    first_line,
)
from pinfeed.training.large_batch.equivalence.fixed_random import random_rows
from pinfeed.training.large_batch.equivalence.model_state import State, state_on_copies
from pinfeed.training.large_batch.equivalence.rounding import DifferenceFound
from pinfeed.training.large_batch.strategies.accumulation import GradientAccumulator
from pinfeed.training.large_batch.strategies.gradients import backward_whole, gradients_set_aside
from pinfeed.training.large_batch.strategies.micro_batches import Chunk, Chunks, slice_samples
from pinfeed.training.large_batch.strategies.two_pass import backward_two_pass
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class _StepResult:
    """Loss, gradients and state of the model after a step."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    state: State


def compare_steps(conditions: Conditions, strategy: str) -> None:
    """Compare loss, gradients and state after the plain step and after a step of a strategy.

    Args:
        conditions: The model, the loss and the samples.
        strategy: ``"accumulate"``, ``ONE_BY_ONE`` or ``"two_pass"``.

    Raises:
        DifferenceFound: If they differ by more than rounding.
    """
    spec = replace(conditions.spec, context=conditions.context, scale=lambda loss: loss)
    conditions = replace(conditions, spec=spec)
    try:
        plain = _plain_step(conditions)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if strategy != "two_pass":
            raise DifferenceFound(
                f"the loss fails on some of the samples ({first_line(error)})"
            ) from error
        # The loss needs the whole batch. Two passes give all outputs to the loss, so any loss
        # shows whether the gradients are right.
        conditions = replace(conditions, spec=replace(spec, loss=_any_loss))
        plain = _plain_step(conditions)
    if strategy != "two_pass" and _is_mean_of_nothing(conditions):
        return
    try:
        other = _step_in_chunks(conditions, strategy)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise DifferenceFound(
            f"the step fails in chunks of some of the samples ({first_line(error)})"
        ) from error
    conditions.rounding.check_states(plain.state, other.state)
    conditions.rounding.check(plain.loss, other.loss, "the loss of a step differs")
    conditions.rounding.check_gradients(spec, plain.gradients, other.gradients)


def _plain_step(conditions: Conditions) -> _StepResult:
    samples = conditions.samples

    def compute() -> torch.Tensor:
        return backward_whole(conditions.spec, cloned(samples.inputs), samples.targets)

    return _run_step(conditions, compute)


def _step_in_chunks(conditions: Conditions, strategy: str) -> _StepResult:
    spec = conditions.spec
    samples = conditions.samples
    # Both passes get the same copy, so a model that changes its inputs changes them twice.
    inputs = cloned(samples.inputs)

    def chunks() -> Chunks:
        for start, stop in samples.edges:
            x = slice_samples(inputs, start, stop)
            y = slice_samples(samples.targets, start, stop)
            yield Chunk(x, y, spec.count_terms(x, y))

    def compute() -> torch.Tensor:
        if strategy == "two_pass":
            return backward_two_pass(spec, chunks, samples.targets)
        total = None
        if strategy != ONE_BY_ONE:
            total = spec.count_terms(samples.inputs, samples.targets)
        return GradientAccumulator(spec).run(chunks(), total)

    return _run_step(conditions, compute)


def _run_step(conditions: Conditions, compute: Callable[[], torch.Tensor]) -> _StepResult:
    spec = conditions.spec
    parameters = spec.parameters
    rng_state.restore(conditions.random)
    with gradients_set_aside(parameters), state_on_copies(spec.modules) as state:
        loss = compute()
        return _StepResult(loss, [p.grad for p in parameters], state())


def _is_mean_of_nothing(conditions: Conditions) -> bool:
    spec = conditions.spec
    if spec.reduction != "mean":
        return False
    return not spec.count_terms(conditions.samples.inputs, conditions.samples.targets)


def _any_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Return a loss that depends on every output of every sample."""
    tensors = [leaf for _, leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    floats = [leaf for leaf in tensors if leaf.is_floating_point()]
    sums = []
    for i, leaf in enumerate(floats):
        sums.append((leaf * random_rows(i, leaf, 0, len(leaf))).sum().float())
    return torch.stack(sums).sum()
