"""Gradients in two passes: first the outputs of all chunks, then each chunk with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pinfeed.errors import ArgumentError
from pinfeed.tensors import rng_state
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.batches import (
    Chunks,
    check_output_rows,
    concatenate,
    is_differentiable,
    n_samples,
)
from pinfeed.training.large_batch.recompute import buffers_of, replayed_buffers
from pinfeed.training.large_batch.step_spec import StepSpec
from pinfeed.training.memory_model.models import call_model


def backward_two_pass(spec: StepSpec, chunks: Callable[[], Chunks], targets: Any) -> torch.Tensor:
    """Add the gradients of any loss of all outputs, with the graph of one chunk at a time.

    The first pass computes the outputs of each chunk without a graph. Then the loss of all outputs
    gives their gradients. The second pass computes each chunk again, with the same random numbers,
    and propagates these gradients to the parameters.

    Args:
        spec: The model and the loss.
        chunks: Returns the chunks; called once per pass, with the same chunks each time.
        targets: Targets of the whole batch, on the device.

    Returns:
        The loss of the whole batch, a tensor of shape ().
    """
    buffers = buffers_of(spec.modules)
    outputs, states = _outputs_without_graph(spec, chunks)
    leaves, rebuild = flatten(outputs)
    held = [
        leaf.detach().requires_grad_() if is_differentiable(leaf) else leaf for _, leaf in leaves
    ]
    with spec.context():
        loss = spec.loss(rebuild(iter(held)), targets)
    spec.scale(loss).backward()
    start = 0
    with replayed_buffers(buffers), contextlib.closing(chunks()) as source:
        for chunk, state in zip(source, states, strict=True):
            rng_state.restore(state)
            with spec.context():
                outputs = call_model(spec.model, chunk.inputs)
            stop = start + n_samples(chunk.inputs)
            backward_rows(outputs, [getattr(leaf, "grad", None) for leaf in held], start, stop)
            start = stop
    return loss.detach()


def _outputs_without_graph(
    spec: StepSpec, chunks: Callable[[], Chunks]
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the outputs of all chunks, and the state of the random generators before each."""
    states = []
    parts: list[Any] = []
    with torch.no_grad(), contextlib.closing(chunks()) as source:
        for chunk in source:
            states.append(rng_state.capture())
            with spec.context():
                parts.append(call_model(spec.model, chunk.inputs))
            check_output_rows(parts[-1], n_samples(chunk.inputs))
    if not parts:
        raise ArgumentError("the batch is empty; expected at least one sample")
    return concatenate(parts), states


def backward_rows(
    outputs: Any, gradients: Iterable[torch.Tensor | None], start: int, stop: int
) -> None:
    """Run the backward pass of a chunk that has rows [start, stop) of the batch.

    Args:
        outputs: Outputs of the chunk.
        gradients: Gradient of each leaf of the outputs of the whole batch, on any device.
        start: First row.
        stop: Row after the last one.
    """
    pairs = [
        (leaf, whole[start:stop].to(leaf.device))
        for (_, leaf), whole in zip(flatten(outputs)[0], gradients, strict=True)
        if whole is not None and is_differentiable(leaf) and leaf.requires_grad
    ]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [whole for _, whole in pairs])
