"""Gradients of a batch in chunks: accumulated chunk by chunk, or in two passes for any loss."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.feeders.loader_feeder import LoaderFeeder, wrap_loader
from pinfeed.tensors import rng_state
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch import batches
from pinfeed.training.large_batch.batches import Chunk, Chunks
from pinfeed.training.large_batch.restored_state import buffers_of, replayed_buffers
from pinfeed.training.large_batch.step_spec import StepSpec
from pinfeed.training.memory_model.real_steps import is_out_of_memory, release_cached_memory


class ChunkStream:
    """Copies the chunks of one batch after another to the device, one chunk ahead.

    It is the loader of its own feeder.

    Args:
        spec: The model and the loss, used to count the loss terms of a chunk.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._batch: Any = None
        self._size = 1
        self._feeder: LoaderFeeder[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return batches.split(self._batch, self._size)

    def chunks(self, inputs: Any, targets: Any, size: int) -> Chunks:
        """Yield the chunks of a batch, which may be on the host or on the device."""
        if self._feeder is None:
            self._feeder = wrap_loader(self, device=self._spec.device, depth=1)
        self._batch = (inputs, targets)
        self._size = size
        source: Any = iter(self._feeder)
        try:
            for own, (x, y) in zip(batches.split(self._batch, size), source, strict=True):
                # Terms are counted in the caller's targets, because reading a count from the
                # device would wait for it.
                yield Chunk(x, y, self._spec.count_terms(*own))
        finally:
            source.close()
            self._batch = None

    def close(self) -> None:
        """End the reader thread and free page-locked memory. Further calls do nothing."""
        if self._feeder is not None:
            self._feeder.close()


class GradientAccumulator:
    """Adds up the gradients of the chunks of one batch.

    A chunk that does not fit in memory is computed in halves. A backward pass adds the gradient of
    a parameter at once or not at all. The halves therefore skip the parameters that have received
    their gradient from the failed backward pass.

    Attributes:
        n_halved: Number of chunks that did not fit and were computed in halves.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._parameters = spec.parameters
        self.n_halved = 0

    def run(self, chunks: Chunks, total: float | None) -> torch.Tensor:
        """Compute the sum of the gradients of all chunks.

        No parameter may have a gradient before.

        Args:
            chunks: Chunks of the batch.
            total: Loss terms of the whole batch; None if they are known only after the last chunk.

        Returns:
            The loss of the whole batch, a tensor of shape ().
        """
        if self._spec.reduction != "mean" or total is not None:
            return self._add_up(chunks, total or 1.0)
        # Gradients have the magnitude of a mean from the first chunk on, so that clipping and
        # overflow happen as in the plain step.
        first = next((chunk for chunk in chunks if chunk.n_terms), None)
        if first is None:
            raise ArgumentError(
                "the loss ignores every target of the batches; expected at least one that it counts"
            )
        loss = self._add_up(itertools.chain([first], chunks), first.n_terms)
        ratio = self._n_terms / first.n_terms
        for p in self._parameters:
            if p.grad is not None:
                p.grad /= ratio
        return loss / ratio

    def _add_up(self, chunks: Iterable[Chunk], total: float) -> torch.Tensor:
        self._n_terms = 0.0
        loss = None
        for chunk in chunks:
            chunk_loss = self._backward(chunk, total, self._parameters)
            loss = chunk_loss if loss is None else loss + chunk_loss
            self._n_terms += chunk.n_terms
        if loss is None:
            raise ArgumentError("the batch is empty; expected at least one sample")
        return loss

    def _backward(self, chunk: Chunk, total: float, wanted: list[nn.Parameter]) -> torch.Tensor:
        """Add the gradients of a chunk to the wanted parameters."""
        if self._spec.reduction == "mean" and not chunk.n_terms:
            # The mean of no terms is NaN, so such a chunk is left out.
            return torch.zeros((), device=self._parameters[0].device)
        before = [(p.grad, _version_of(p.grad)) for p in wanted]
        state = rng_state.capture()
        try:
            loss = self._spec.forward(chunk.inputs, chunk.targets)
            if self._spec.reduction == "mean":
                loss = loss * (chunk.n_terms / total)
            if wanted:
                # Without ``inputs``, other leaves get gradients, too, such as tensors of the loss.
                inputs = None if wanted is self._parameters else wanted
                self._spec.scale(loss).backward(inputs=inputs)
            return loss.detach()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or batches.n_samples(chunk.inputs) == 1:
                raise
        release_cached_memory()
        rng_state.restore(state)
        self.n_halved += 1
        missing = [
            p
            for p, (gradient, version) in zip(wanted, before, strict=True)
            if p.grad is gradient and _version_of(gradient) == version
        ]
        half = -(-batches.n_samples(chunk.inputs) // 2)
        halves = (self._spec.chunk(*samples) for samples in batches.split(chunk[:2], half))
        return torch.stack([self._backward(one, total, missing) for one in halves]).sum()


@dataclass(eq=False)
class RecomputedChunks:
    """The chunks of a batch, each computed once without a graph, and once again with gradients.

    Args:
        chunks: Returns the chunks; called once per pass, with the same chunks each time.
        compute: Function that returns the outputs of a model for inputs.
        modules: Root modules, whose buffers are the same in both passes.
    """

    chunks: Callable[[], Chunks]
    compute: Callable[[Any], Any]
    modules: InitVar[Sequence[nn.Module]]

    def __post_init__(self, modules: Sequence[nn.Module]) -> None:
        self._buffers = buffers_of(modules)
        self._random: list[dict[str, Any]] = []
        """State of the random generators before each chunk."""

    def outputs(self) -> Any:
        """Return the outputs of all chunks, without a graph."""
        parts: list[Any] = []
        with torch.no_grad(), contextlib.closing(self.chunks()) as source:
            for chunk in source:
                self._random.append(rng_state.capture())
                parts.append(self.compute(chunk.inputs))
                batches.check_output_rows(parts[-1], batches.n_samples(chunk.inputs))
        return batches.concatenate(parts)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compute each chunk again, with the same random numbers, and run its backward pass.

        Args:
            gradients: Gradient of each leaf of the outputs, on any device.
        """
        start = 0
        with (
            torch.enable_grad(),
            rng_state.replayed(self._random[0]),
            replayed_buffers(self._buffers),
            contextlib.closing(self.chunks()) as source,
        ):
            for chunk, state in zip(source, self._random, strict=True):
                rng_state.restore(state)
                outputs = self.compute(chunk.inputs)
                stop = start + batches.n_samples(chunk.inputs)
                _backward_rows(outputs, gradients, start, stop)
                start = stop


def backward_two_pass(spec: StepSpec, chunks: Callable[[], Chunks], targets: Any) -> torch.Tensor:
    """Add the gradients of any loss of all outputs, with the graph of one chunk at a time.

    The loss of the outputs of all chunks gives their gradients, which the second pass propagates
    to the parameters.

    Args:
        spec: The model and the loss.
        chunks: Returns the chunks; called once per pass, with the same chunks each time.
        targets: Targets of the whole batch, on the device.

    Returns:
        The loss of the whole batch, a tensor of shape ().
    """
    recomputed = RecomputedChunks(chunks, spec.outputs, spec.modules)
    leaves, rebuild = flatten(recomputed.outputs())
    held = [
        leaf.detach().requires_grad_() if batches.is_differentiable(leaf) else leaf
        for _, leaf in leaves
    ]
    with spec.context():
        loss = spec.loss(rebuild(iter(held)), targets)
    spec.scale(loss).backward()
    recomputed.backward([getattr(leaf, "grad", None) for leaf in held])
    return loss.detach()


def _version_of(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else version_of(gradient)


def _backward_rows(
    outputs: Any, gradients: Iterable[torch.Tensor | None], start: int, stop: int
) -> None:
    """Run the backward pass of a chunk that has rows [start, stop) of the batch."""
    pairs = [
        (leaf, whole[start:stop].to(leaf.device))
        for (_, leaf), whole in zip(flatten(outputs)[0], gradients, strict=True)
        if whole is not None and batches.is_differentiable(leaf) and leaf.requires_grad
    ]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [whole for _, whole in pairs])
