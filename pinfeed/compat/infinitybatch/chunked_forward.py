"""Forward pass in chunks, with a backward pass that computes each chunk again.

``large_batch.two_pass`` does the same for a known loss. In this module the user computes
the loss, so the outputs of all chunks are one node of the autograd graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pinfeed.tensors import rng_state
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.batches import (
    check_output_rows,
    concatenate,
    n_samples,
    slice_samples,
)
from pinfeed.training.large_batch.recompute import buffers_of, replayed_buffers
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.tensor_specs import to_device


def outputs_in_chunks(
    model: nn.Module, inputs: Any, size: int, device: torch.device, back: torch.device
) -> Any:
    """Return the outputs of a batch; the backward pass computes them again from the inputs.

    Args:
        model: The model, on ``device``.
        inputs: The inputs of the batch, on any device.
        size: Samples of a chunk.
        device: Device of the model.
        back: Device of the outputs.
    """
    # Autograd adds a node for the outputs only if an input requires a gradient.
    trigger = torch.zeros((), requires_grad=any(p.requires_grad for p in model.parameters()))
    chunks = _Chunks(model, inputs, size, device, back)
    leaves = _ChunkedForward.apply(chunks, trigger)  # type: ignore[no-untyped-call]
    return chunks.rebuild(iter(leaves))


class _Chunks:
    """The chunks of a batch, each computed once without gradients and once with them."""

    def __init__(
        self, model: nn.Module, inputs: Any, size: int, device: torch.device, back: torch.device
    ) -> None:
        self._model = model
        self._device = device
        self._back = back
        # The chunks are views of the inputs.
        self._chunks = [
            slice_samples(inputs, start, start + size)
            for start in range(0, n_samples(inputs), size)
        ]
        self._rng_states: list[dict[str, Any]] = []
        self._versions = _versions(model)
        self._buffers = buffers_of([model])
        # The backward pass may run outside the context of autocast, or within another one.
        kind = device.type
        self._autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )

    def forward(self) -> list[Any]:
        """Return the leaves of the outputs of all chunks, without gradients."""
        parts = []
        for chunk in self._chunks:
            self._rng_states.append(rng_state.capture())
            outputs = call_model(self._model, to_device(chunk, self._device))
            check_output_rows(outputs, n_samples(chunk))
            parts.append(to_device(outputs, self._back))
        leaves, rebuild = flatten(concatenate(parts))
        self.rebuild = rebuild
        return [leaf for _, leaf in leaves]

    def backward(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Add to the gradients of the parameters, given the gradients of the outputs.

        Raises:
            RuntimeError: If a parameter has changed since the forward pass.
        """
        now = _versions(self._model)
        changed = [name for name, version in self._versions.items() if now.get(name) != version]
        if changed:
            raise RuntimeError(
                f"parameters ({', '.join(changed[:3])}) have changed since the forward pass of "
                "this batch, whose chunks the backward pass computes again; expected unchanged "
                "parameters; call backward before the step of the optimizer"
            )
        start = 0
        with replayed_buffers(self._buffers):
            for chunk, state in zip(self._chunks, self._rng_states, strict=True):
                with torch.enable_grad(), rng_state.replayed(state), self._autocast:
                    outputs = call_model(self._model, to_device(chunk, self._device))
                stop = start + n_samples(outputs)
                _backward(outputs, gradients, start, stop)
                start = stop


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity of each parameter, and how often it was changed in place."""
    return {name: (id(one), version_of(one)) for name, one in model.named_parameters()}


def _backward(
    outputs: Any, gradients: tuple[torch.Tensor | None, ...], start: int, stop: int
) -> None:
    """Run the backward pass of a chunk that has rows ``start`` to ``stop`` of the batch."""
    leaves = [leaf for _, leaf in flatten(outputs)[0]]
    pairs = [
        (leaf, gradient[start:stop].to(leaf.device))
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])


class _ChunkedForward(torch.autograd.Function):
    """Autograd node of the outputs of all chunks.

    Its backward pass runs the backward pass of each chunk, which adds to the parameters' gradients.
    """

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, trigger: torch.Tensor) -> tuple[Any, ...]:
        """Return the outputs' leaves; ``trigger`` requires a gradient if a parameter does."""
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        return tuple(chunks.forward())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        """Compute each chunk again, and run its backward pass."""
        ctx.chunks.backward(gradients)
        return None, None
