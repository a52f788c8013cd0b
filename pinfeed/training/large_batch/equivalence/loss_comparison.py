"""Comparison of a batch's loss with the losses of its chunks, and of the gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.equivalence.conditions import (
    Conditions,
    StepSamples,
    first_line,
)
from pinfeed.training.large_batch.equivalence.model_pass import PassResult
from pinfeed.training.large_batch.equivalence.model_state import state_on_copies
from pinfeed.training.large_batch.equivalence.rounding import DifferenceFound
from pinfeed.training.large_batch.strategies.micro_batches import select_samples, slice_samples
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory

_OUTPUT_BYTES = 16 << 20
"""Bytes of outputs for which losses are compared."""


def compare_losses(
    conditions: Conditions, plain: PassResult, more: Callable[[int], StepSamples]
) -> None:
    """Compare the loss of all samples, and its gradients, with the losses of their chunks.

    Losses are cheap, so the comparison of losses uses more samples than the comparison of models.
    It repeats the outputs of the few samples that the model has computed.

    Args:
        conditions: The loss and the samples.
        plain: Outputs of the model for the samples.
        more: Function that returns at most the given number of samples, with their targets.

    Raises:
        DifferenceFound: If the losses of the chunks do not add up to the loss of the batch.
    """
    n_computed = conditions.samples.n
    nbytes = sum(leaf.nbytes for leaf in plain.outputs if isinstance(leaf, torch.Tensor))
    batch = more(max(2 * n_computed, _OUTPUT_BYTES // max(1, nbytes // n_computed)))
    losses = _Losses(conditions, plain, batch)
    with state_on_copies(conditions.spec.modules), conditions.context():
        try:
            whole = losses.of_rows(0, batch.n)
            chunked = losses.of_chunks()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise DifferenceFound(
                f"the loss fails on some of the samples ({first_line(error)})"
            ) from None
        if chunked is None:
            return
        problem = "the losses of the chunks do not add up to the loss of the batch: "
        rounding = conditions.rounding
        rounding.check(whole.detach(), chunked.detach(), f"{problem}the loss differs")
        gradients = zip(losses.gradients(whole), losses.gradients(chunked), strict=True)
        for one, another in gradients:
            rounding.check(one, another, f"{problem}the gradients differ")


class _Losses:
    """Losses of repeated outputs of a model, against the targets of a larger batch.

    Attributes:
        variables: Outputs and loss parameters that require gradients.
    """

    def __init__(self, conditions: Conditions, plain: PassResult, batch: StepSamples) -> None:
        self._spec = conditions.spec
        self._rebuild = plain.rebuild
        self._batch = batch
        repeated = torch.arange(batch.n) % conditions.samples.n
        outputs = select_samples(plain.rebuild(iter(plain.outputs)), repeated)
        self._outputs = [_as_variable(leaf) for _, leaf in flatten(outputs)[0]]
        others = [module for module in self._spec.modules if module is not self._spec.model]
        parameters = [p for module in others for p in module.parameters()]
        candidates = (*self._outputs, *parameters)
        self.variables = [one for one in candidates if getattr(one, "requires_grad", False)]

    def of_rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the loss of rows [start, stop)."""
        outputs = slice_samples(self._rebuild(iter(self._outputs)), start, stop)
        return self._spec.loss(outputs, slice_samples(self._batch.targets, start, stop))

    def of_chunks(self) -> torch.Tensor | None:
        """Return the loss of the batch, added up from the losses of its chunks.

        It is None if no chunk has terms, or if nothing requires gradients.
        """
        terms = [self._count_terms(*edge) for edge in self._batch.edges]
        is_mean = self._spec.reduction == "mean"
        total = sum(terms) if is_mean else 1.0
        weights = terms if is_mean else [1.0] * len(terms)
        # The mean of no terms is NaN, so chunks without terms are left out.
        chunks = [
            self.of_rows(*edge) * (weight / total)
            for edge, weight in zip(self._batch.edges, weights, strict=True)
            if weight
        ]
        return torch.stack(chunks).sum() if chunks and self.variables else None

    def gradients(self, loss: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the variables."""
        return torch.autograd.grad(loss, self.variables, allow_unused=True, retain_graph=True)

    def _count_terms(self, start: int, stop: int) -> float:
        inputs = slice_samples(self._batch.inputs, start, stop)
        return self._spec.count_terms(inputs, slice_samples(self._batch.targets, start, stop))


def _as_variable(value: Any) -> Any:
    """Return an output as a leaf of a new graph."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value
