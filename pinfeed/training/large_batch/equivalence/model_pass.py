"""Forward and backward pass of a model over all samples of a comparison, in chunks or at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.tensors import rng_state
from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.training.large_batch.equivalence.conditions import Conditions, Edges, cloned
from pinfeed.training.large_batch.equivalence.fixed_random import random_rows
from pinfeed.training.large_batch.equivalence.model_state import State, state_on_copies
from pinfeed.training.large_batch.equivalence.rounding import added
from pinfeed.training.large_batch.strategies.gradients import gradients_set_aside
from pinfeed.training.large_batch.strategies.micro_batches import (
    check_output_rows,
    concatenate,
    slice_samples,
)
from pinfeed.training.memory_model.models import call_model

Gradients = list[torch.Tensor | None]
"""One gradient per parameter; None if the outputs do not depend on the parameter."""


@dataclass
class PassResult:
    """Results of one forward and backward pass over all samples.

    Attributes:
        outputs: Leaves of the outputs, without gradients.
        rebuild: Function that makes the structure of the outputs from such leaves.
        gradients: Gradients of the parameters.
        state: State of the model afterwards.
    """

    outputs: list[Any]
    rebuild: Rebuild
    gradients: Gradients
    state: State


def run_model(
    conditions: Conditions, edges: Edges, subtract_from: Gradients | None = None
) -> PassResult:
    """Compute outputs, gradients and state, chunk by chunk.

    The backward pass starts from random gradients of the outputs.

    Args:
        conditions: The model and the samples.
        edges: Edges of the chunks.
        subtract_from: List of gradients. The pass subtracts its gradients from them, in this list.
            None returns the gradients themselves.
    """
    spec = conditions.spec
    rng_state.restore(conditions.random)
    parameters = spec.parameters
    total: Gradients = [None] * len(parameters) if subtract_from is None else subtract_from
    sign = 1 if subtract_from is None else -1
    parts = []
    with state_on_copies(spec.modules) as state, conditions.context():
        inputs = cloned(conditions.samples.inputs)
        for start, stop in edges:
            outputs = call_model(spec.model, slice_samples(inputs, start, stop))
            check_output_rows(outputs, stop - start)
            leaves, rebuild = flatten(outputs)
            tensors = [leaf for _, leaf in leaves]
            # The gradients are added one by one, so that no third set of gradients is kept.
            for i, gradient in enumerate(_gradients(parameters, tensors, start, stop)):
                total[i] = added(total[i], gradient, sign)
            parts.append(rebuild(map(_detached, tensors)))
        leaves, rebuild = flatten(concatenate(parts))
        return PassResult([leaf for _, leaf in leaves], rebuild, total, state())


def _gradients(
    parameters: Sequence[torch.Tensor], outputs: Sequence[Any], start: int, stop: int
) -> Sequence[torch.Tensor | None]:
    """Return gradients of the parameters for random gradients of these rows of the outputs."""
    leaves = []
    output_gradients = []
    for i, leaf in enumerate(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaves.append(leaf)
            output_gradients.append(random_rows(i, leaf, start, stop))
    if not leaves or not parameters:
        return [None for _ in parameters]
    with gradients_set_aside(parameters):
        # backward() runs hooks as a training step does, and works for models that recompute parts.
        torch.autograd.backward(leaves, output_gradients)
        return [p.grad for p in parameters]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
