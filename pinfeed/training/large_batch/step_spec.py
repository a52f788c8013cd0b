"""StepSpec: the model, the loss and its reduction; and the gradients of a training step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from pinfeed.errors import ArgumentError
from pinfeed.training.large_batch.batches import Chunk, n_samples
from pinfeed.training.memory_model.tensor_specs import tensor_leaves
from pinfeed.training.memory_model.training_step import call_model

Reduction = Literal["mean", "sum"]
Count = Callable[[Any], Any]
"""Function that returns the number of terms of a mean for given targets, a number or a tensor."""

_IGNORED = -100
"""Target that torch's losses and language model losses leave out by default."""
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss)
_ELEMENT_LOSSES: dict[Any, Any] = {
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.PoissonNLLLoss: functional.poisson_nll_loss,
    nn.KLDivLoss: functional.kl_div,
}
"""Losses that compare numbers one by one: module and function."""


def reduction_of(loss: Any) -> Reduction | None:
    """Return how one of torch's losses reduces its terms; None for another loss."""
    loss, options = _without_partial(loss)
    found: Any = None
    if isinstance(loss, nn.Module):
        if type(loss).__module__ == nn.modules.loss.__name__:
            found = getattr(loss, "reduction", None)
    elif getattr(functional, getattr(loss, "__name__", ""), None) is loss:
        found = _reduction_among(options)
    reductions: dict[Any, Reduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
    return reductions.get(found)


def _reduction_among(options: Mapping[str, Any]) -> str:
    """Return ``reduction``, or the meaning of its deprecated forms ``size_average``, ``reduce``."""
    if options.get("reduce") is None and options.get("size_average") is None:
        return str(options.get("reduction", "mean"))
    if options.get("reduce") is False:
        return "none"
    return "sum" if options.get("size_average") is False else "mean"


def check_targets(loss: Any, inputs: Any, targets: Any) -> None:
    """Check that a batch has targets if the loss is one of torch's, which all need targets.

    Raises:
        ArgumentError: If ``targets`` is None and the loss is one of torch's.
    """
    if targets is not None:
        return
    known, _ = _without_partial(loss)
    is_listed = known in (*_CLASS_LOSSES, *_ELEMENT_LOSSES.values())
    if not is_listed and type(known).__module__ != nn.modules.loss.__name__:
        return
    name = getattr(known, "__name__", type(known).__name__)
    is_pair = isinstance(inputs, (tuple, list)) and len(inputs) == 2
    hint = "; the inputs are a pair, so give backward(*batch)" if is_pair else ""
    raise ArgumentError(
        f"the batch has no targets, but {name} compares outputs with targets; expected "
        f"backward(inputs, targets), or a loader of pairs of inputs and targets{hint}"
    )


def count_of(loss: Any) -> Count:
    """Return the function that counts the terms of a loss.

    For losses of classes it counts the targets that are not ignored, each with the weight of its
    class. For losses that compare numbers it counts these numbers. For other losses it counts
    samples. If the loss is unknown, int64 targets count as classes, except for -100.
    """
    known, options = _without_partial(loss)
    ignored = options.get("ignore_index", getattr(known, "ignore_index", _IGNORED))
    has_classes = known in _CLASS_LOSSES or isinstance(known, _CLASS_LOSSES[:2])
    reduction = getattr(known, "reduction", None) or _reduction_among(options)
    is_listed = known in _ELEMENT_LOSSES.values() or type(known) in _ELEMENT_LOSSES
    has_elements = reduction == "mean" and is_listed
    is_unknown = reduction_of(loss) is None
    weight = options.get("weight", getattr(known, "weight", None)) if has_classes else None

    def count(targets: Any) -> Any:
        first = next(tensor_leaves(targets), None)
        if first is None:
            return 0
        if has_elements:
            return first.numel()
        # torch's other losses, neither of classes nor of elements, count samples.
        are_classes = is_unknown and first.dtype is torch.int64
        if has_classes:
            are_classes = not first.is_floating_point()
        if not are_classes:
            return n_samples(targets)
        is_counted = first != ignored
        if weight is None:
            return is_counted.sum()
        weights = weight.to(first.device)[first.where(is_counted, 0).long()]
        return (weights * is_counted).sum()

    return count


def _without_partial(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function, and the keyword arguments that ``functools.partial`` fixes."""
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, loss.keywords
    return loss, {}


@dataclass(frozen=True)
class StepSpec:
    """Model, loss and settings of a training step, without the batch.

    Attributes:
        model: The model.
        loss: Function of outputs and targets.
        modules: Every module whose parameters receive gradients, the model first.
        reduction: Whether the loss is the mean or the sum of its terms; None if this is unknown.
        count: Function that returns the number of terms for a batch of targets.
        context: Function that makes the context for forward passes and losses, such as autocast.
        scale: Function applied to the loss before the backward pass, such as a loss scaler.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    modules: Sequence[nn.Module]
    reduction: Reduction | None
    count: Count
    context: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[torch.Tensor], torch.Tensor]

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of the model."""
        return device_of(self.model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that require gradients, each once."""
        every = {id(p): p for module in self.modules for p in module.parameters()}
        return [p for p in every.values() if p.requires_grad]

    @property
    def training_modes(self) -> tuple[bool, ...]:
        """Training mode of each module, in the order of ``modules()``."""
        return tuple(module.training for root in self.modules for module in root.modules())

    def outputs(self, inputs: Any) -> Any:
        """Compute the outputs of some samples."""
        with self.context():
            return call_model(self.model, inputs)

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Compute the loss of some samples."""
        with self.context():
            return self.loss(call_model(self.model, inputs), targets)

    def count_terms(self, inputs: Any, targets: Any) -> float:
        """Return the number of terms in the loss of some samples."""
        return float(n_samples(inputs) if targets is None else self.count(targets))

    def chunk(self, inputs: Any, targets: Any) -> Chunk:
        """Return some samples with the number of terms in their loss."""
        return Chunk(inputs, targets, self.count_terms(inputs, targets))

    def backward_whole(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Add the gradients of the whole batch in one backward pass, and return its loss."""
        loss = self.forward(inputs, targets)
        self.scale(loss).backward()
        return loss.detach()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters of a model; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def batch_norms(model: nn.Module) -> list[str]:
    """Return the modules that normalize over the batch, such as ``module '1' (BatchNorm1d)``.

    Their output for a sample depends on the other samples of its chunk.
    """
    return [
        f"module {name!r} ({type(norm).__name__})" if name else f"the model ({type(norm).__name__})"
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)
    ]
