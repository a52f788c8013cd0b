"""Gradients of a batch that is larger than the device: whole, in chunks, in two passes, computed again, or kept on the host."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.tensors.pytree import flatten
from pinfeed.training import rng_state
from pinfeed.training.large_batch.strategies.loss_reduction import Count, Reduction
from pinfeed.training.large_batch.strategies.micro_batches import (
    check_output_rows,
    concatenate,
    n_samples,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.recompute import buffers_of, replayed_buffers
from pinfeed.training.memory_model.estimate import call_model
from pinfeed.training.memory_model.probe import is_out_of_memory

Chunks = Generator[tuple[Any, Any, float], None, None]
"""Inputs and targets of some samples, on the device, and terms of their loss; one after the other."""


@dataclass(frozen=True)
class StepSpec:
    """What is computed of every batch.

    Attributes:
        model: The model.
        loss: Of outputs and targets.
        modules: All whose parameters want gradients.
        reduction: What the loss does with its terms.
        count: Of the terms of targets.
        context: What forward passes and losses run in.
        scale: Of the loss, before the backward pass.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    modules: Sequence[nn.Module]
    reduction: Reduction
    count: Count
    context: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[torch.Tensor], torch.Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that want gradients, each once."""
        found = {
            id(p): p for module in self.modules for p in module.parameters() if p.requires_grad
        }
        return list(found.values())

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple(module.training for root in self.modules for module in root.modules())

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """The loss."""
        with self.context():
            return self.loss(call_model(self.model, inputs), targets)

    def terms(self, inputs: Any, targets: Any) -> float:
        """Of the loss of these."""
        return float(n_samples(inputs) if targets is None else self.count(targets))


def plain(spec: StepSpec, inputs: Any, targets: Any) -> torch.Tensor:
    """The whole batch at once."""
    loss = spec.forward(inputs, targets)
    spec.scale(loss).backward()
    return loss.detach()


class AccumulationHook:
    """A hook that remembers parameters whose gradients have been added to."""

    def __init__(self) -> None:
        self.parameters: set[nn.Parameter] = set()

    def __call__(self, parameter: nn.Parameter) -> None:
        self.parameters.add(parameter)


class GradientAccumulator:
    """Gradients of a batch as the sum of those of its pieces.

    A piece that does not fit is computed in halves. Gradients that it has added to by then are left
    out of that: a backward pass adds all of a parameter's gradient at once, or nothing.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._parameters = spec.parameters
        self._touched = AccumulationHook()
        self.n_halved = 0

    def run(self, pieces: Chunks, total: float | None) -> torch.Tensor:
        """Gradients of all pieces together; none are there before.

        Args:
            pieces: Of the batch.
            total: Terms of the whole batch; None if that is known only at the end.

        Returns:
            The loss of the whole batch.
        """
        if self._spec.reduction == "sum" or total is not None:
            return self._sum(pieces, 1.0 if self._spec.reduction == "sum" else total or 1.0)
        # Gradients are of the size of a mean from the first piece on: what clips or overflows does
        # so as in the plain step.
        first = next((piece for piece in pieces if piece[2]), None)
        if first is None:
            raise ArgumentError(
                "every target of the batches is ignored; expected at least one that is not"
            )
        loss = self._sum(itertools.chain([first], pieces), first[2])
        ratio = self._n_terms / first[2]
        for p in self._parameters:
            if p.grad is not None:
                p.grad /= ratio
        return loss / ratio

    def _sum(self, pieces: Iterable[tuple[Any, Any, float]], total: float) -> torch.Tensor:
        self._n_terms = 0.0
        loss = None
        hooks = [p.register_post_accumulate_grad_hook(self._touched) for p in self._parameters]
        try:
            for inputs, targets, n_terms in pieces:
                found = self._piece(inputs, targets, n_terms, total, None)
                loss = found if loss is None else loss + found
                self._n_terms += n_terms
        finally:
            for hook in hooks:
                hook.remove()
        if loss is None:
            raise ArgumentError("the batch is empty; expected at least one sample")
        return loss

    def _piece(
        self,
        inputs: Any,
        targets: Any,
        n_terms: float,
        total: float,
        wanted: list[nn.Parameter] | None,
    ) -> torch.Tensor:
        """Gradients of a piece, of the parameters that are wanted; None for all."""
        if self._spec.reduction == "mean" and not n_terms:
            # A mean of nothing, which is not a number.
            return torch.zeros((), device=self._parameters[0].device)
        self._touched.parameters.clear()
        state = rng_state.capture()
        try:
            loss = self._spec.forward(inputs, targets)
            if self._spec.reduction == "mean":
                loss = loss * (n_terms / total)
            if wanted is None or wanted:
                self._spec.scale(loss).backward(inputs=wanted)
            return loss.detach()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or n_samples(inputs) == 1:
                raise
        # Out of the except block: until then the traceback keeps the tensors of the frames that
        # failed.
        release_cached_memory()
        rng_state.restore(state)
        self.n_halved += 1
        missing = [
            p
            for p in (self._parameters if wanted is None else wanted)
            if p not in self._touched.parameters
        ]
        n = n_samples(inputs)
        halves = [
            (slice_samples(inputs, a, b), slice_samples(targets, a, b))
            for a, b in ((0, n // 2), (n // 2, n))
        ]
        return torch.stack(
            [self._piece(*half, self._spec.terms(*half), total, missing) for half in halves]
        ).sum()


def two_pass(spec: StepSpec, pieces: Callable[[], Chunks], targets: Any) -> torch.Tensor:
    """Any loss of all outputs: outputs of each piece first; then their gradients; then each piece again, with the same random numbers.

    Args:
        spec: What is computed.
        pieces: Gives the pieces, the same ones each time.
        targets: Of the whole batch, on the device.
    """
    states = []
    parts = []
    buffers = buffers_of(spec.modules)
    with torch.no_grad(), contextlib.closing(pieces()) as first:
        for inputs, _, _ in first:
            states.append(rng_state.capture())
            with spec.context():
                parts.append(call_model(spec.model, inputs))
            check_output_rows(parts[-1], n_samples(inputs))
    if not parts:
        raise ArgumentError("the batch is empty; expected at least one sample")
    outputs = concatenate(parts)
    sizes = [n_samples(one) for one in parts]
    del parts
    leaves, rebuild = flatten(outputs)
    held = [leaf.detach().requires_grad_() if _wants(leaf) else leaf for _, leaf in leaves]
    with spec.context():
        loss = spec.loss(rebuild(iter(held)), targets)
    spec.scale(loss).backward()
    start = 0
    with replayed_buffers(buffers), contextlib.closing(pieces()) as second:
        for (inputs, _, _), state, n in zip(second, states, sizes, strict=True):
            rng_state.restore(state)
            with spec.context():
                again = [leaf for _, leaf in flatten(call_model(spec.model, inputs))[0]]
            both = [
                (new, old.grad)
                for new, old in zip(again, held, strict=True)
                if _wants(new) and new.requires_grad
            ]
            pairs = [
                (new, gradient[start : start + n]) for new, gradient in both if gradient is not None
            ]
            if pairs:
                torch.autograd.backward(
                    [new for new, _ in pairs], [gradient for _, gradient in pairs]
                )
            start += n
    return loss.detach()


@contextlib.contextmanager
def restore_gradients_on_error(spec: StepSpec) -> Iterator[None]:
    """Gradients as they were, if there is an error; else what came is added to them."""
    parameters = spec.parameters
    there = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    except BaseException:
        for p, before in zip(parameters, there, strict=True):
            p.grad = before
        raise
    for p, before in zip(parameters, there, strict=True):
        if before is not None:
            p.grad = before if p.grad is None else before.add_(p.grad)


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def release_cached_memory() -> None:
    """Let go of what died, down to the device."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
