"""Whole steps on a few samples, by the code that trains: the plain step beside a strategy's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten
from pinfeed.training import rng_state
from pinfeed.training.large_batch.equivalence.model_state import State, state_on_copies
from pinfeed.training.large_batch.equivalence.rounding import (
    DifferenceFound,
    Rounding,
    first_line,
    random_rows,
)
from pinfeed.training.large_batch.strategies.gradients import (
    Chunks,
    GradientAccumulator,
    StepSpec,
    plain,
    two_pass,
)
from pinfeed.training.large_batch.strategies.micro_batches import slice_samples
from pinfeed.training.memory_model.probe import is_out_of_memory

Edges = Sequence[tuple[int, int]]
"""First row, and row after the last, of each chunk."""


@dataclass(frozen=True)
class StepSamples:
    """Samples on which a strategy is compared with the plain step.

    Attributes:
        inputs: The samples, on the device.
        targets: Their targets, on the device; or None.
        edges: Their chunks.
    """

    inputs: Any
    targets: Any
    edges: Edges


ONE_BY_ONE = "accumulate one by one"
"""``"accumulate"`` for batches that come one by one, whose number of terms is known at the end."""


def compare_steps(
    spec: StepSpec,
    strategy: str,
    samples: StepSamples,
    random: dict[str, Any],
    rounding: Rounding,
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Compare the loss, the gradients and the state after the plain step and after a strategy's.

    Args:
        spec: The model and the loss.
        strategy: ``"accumulate"``, ``ONE_BY_ONE`` or ``"two_pass"``.
        samples: What is computed.
        random: The state of the random generators to begin with.
        rounding: What differences are.
        context: What forward passes and losses run in.

    Raises:
        DifferenceFound: They are not equal.
    """
    spec = replace(spec, context=context, scale=lambda loss: loss)
    inputs, targets = samples.inputs, samples.targets
    try:
        whole = _step(spec, random, lambda: plain(spec, cloned(inputs), targets))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if strategy != "two_pass":
            raise DifferenceFound(
                f"the loss fails on some of the samples ({first_line(error)})"
            ) from error
        # A loss that needs the whole batch: two passes give it all outputs, so any loss will do.
        spec = replace(spec, loss=_any_loss)
        whole = _step(spec, random, lambda: plain(spec, cloned(inputs), targets))

    # One copy for both passes: a model that changes its inputs changes them twice.
    copied = cloned(inputs)

    def pieces() -> Chunks:
        for edge in samples.edges:
            x, y = slice_samples(copied, *edge), slice_samples(targets, *edge)
            yield x, y, spec.terms(x, y)

    def in_chunks() -> torch.Tensor:
        if strategy == "two_pass":
            return two_pass(spec, pieces, targets)
        return GradientAccumulator(spec).run(
            pieces(), None if strategy == ONE_BY_ONE else spec.terms(inputs, targets)
        )

    if strategy != "two_pass" and spec.reduction == "mean" and not spec.terms(inputs, targets):
        return
    try:
        loss, gradients, state = _step(spec, random, in_chunks)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise DifferenceFound(
            f"the step fails in chunks of some of the samples ({first_line(error)})"
        ) from error
    rounding.require_states(whole[2], state)
    rounding.require(whole[0], loss, "the loss of a step differs")
    rounding.require_gradients(spec, whole[1], gradients)


Step = tuple[torch.Tensor, list[torch.Tensor | None], State]
"""Loss, gradients and state of a step."""


def _step(spec: StepSpec, random: dict[str, Any], compute: Callable[[], torch.Tensor]) -> Step:
    parameters = spec.parameters
    rng_state.restore(random)
    with gradients_set_aside(parameters), state_on_copies(spec.modules) as state:
        return compute(), [p.grad for p in parameters], state()


@contextlib.contextmanager
def gradients_set_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Begin without gradients, and put those of the caller back at the end."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient


def _any_loss(outputs: Any, targets: Any) -> torch.Tensor:
    tensors = [leaf for _, leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    floats = [leaf for leaf in tensors if leaf.is_floating_point()]
    sums = [
        (leaf * random_rows(i, leaf, 0, len(leaf))).sum().float() for i, leaf in enumerate(floats)
    ]
    return torch.stack(sums).sum()


def cloned(batch: Any) -> Any:
    """The batch in memory of its own: a model may change its inputs."""
    leaves, rebuild = flatten(batch)
    return rebuild(
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for _, leaf in leaves
    )
