"""How the loss of a batch is made of the losses of its chunks, as far as it is one of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from pinfeed.errors import ArgumentError
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.strategies.micro_batches import n_samples

Reduction = Literal["mean", "sum"]
Count = Callable[[Any], Any]
"""How many terms a mean over targets has: a number, or a tensor of one."""

# What torch's losses and those of language models leave out, by default.
_IGNORED = -100
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss)
_OF_ELEMENTS = (
    *(
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
        nn.PoissonNLLLoss,
        nn.KLDivLoss,
    ),
    *(
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.kl_div,
    ),
    *(
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.poisson_nll_loss,
    ),
)


def reduction_of(loss: Any) -> Reduction | None:
    """What a loss of torch's does with its terms; None if it is not one, for then nobody knows without being told."""
    loss, options = _unwrapped(loss)
    if isinstance(loss, nn.Module):
        found = (
            getattr(loss, "reduction", None)
            if type(loss).__module__ == nn.modules.loss.__name__
            else None
        )
    else:
        is_torchs = getattr(functional, getattr(loss, "__name__", ""), None) is loss
        found = _reduction_among(options) if is_torchs else None
    return {"mean": "mean", "batchmean": "mean", "sum": "sum"}.get(found)  # type: ignore[arg-type, return-value]


def _reduction_among(options: Mapping[str, Any]) -> str:
    """``reduction``, or what ``size_average`` and ``reduce`` say, as torch took it before there was that."""
    if options.get("reduce") is None and options.get("size_average") is None:
        return str(options.get("reduction", "mean"))
    if options.get("reduce") is False:
        return "none"
    return "sum" if options.get("size_average") is False else "mean"


def check_targets(loss: Any, inputs: Any, targets: Any) -> None:
    """Refuse a batch without targets where the loss is one of torch's, which compare outputs with targets.

    Raises:
        ArgumentError: There are none.
    """
    known, _ = _unwrapped(loss)
    is_torchs = type(known).__module__ == nn.modules.loss.__name__ or known in (
        *_OF_CLASSES,
        *_OF_ELEMENTS,
    )
    if targets is None and is_torchs:
        name = getattr(known, "__name__", type(known).__name__)
        pair = (
            "; the inputs are a pair: give backward(*batch)"
            if isinstance(inputs, (tuple, list)) and len(inputs) == 2
            else ""
        )
        raise ArgumentError(
            f"the batch has no targets, and {name} compares outputs with targets; expected inputs and targets, as backward(inputs, "
            f"targets), or a loader whose batches are such pairs{pair}"
        )


def count_of(loss: Any) -> Count:
    """What counts the terms of a loss.

    Of classes, targets that are not ignored, each with the weight of its class; of a loss that
    compares numbers, these; else samples. Of a loss that is not known, integers are classes, and
    -100 is ignored.
    """
    known, options = _unwrapped(loss)
    ignored = options.get("ignore_index", getattr(known, "ignore_index", _IGNORED))
    of_classes = known in _OF_CLASSES or isinstance(known, _OF_CLASSES[:2])
    how = getattr(known, "reduction", None) or _reduction_among(options)
    of_elements = how == "mean" and (known in _OF_ELEMENTS or type(known) in _OF_ELEMENTS)
    weight = options.get("weight", getattr(known, "weight", None)) if of_classes else None

    def count(targets: Any) -> Any:
        leaves = [leaf for _, leaf in flatten(targets)[0] if isinstance(leaf, torch.Tensor)]
        first = leaves[0] if leaves else None
        if first is not None and of_elements:
            return first.numel()
        if (
            first is None
            or not _are_classes(first, of_classes)
            or (reduction_of(loss) is not None and not of_classes)
        ):
            return n_samples(targets) if leaves else 0
        taken = first != ignored
        return (
            taken.sum()
            if weight is None
            else (weight.to(first.device)[first.where(taken, 0).long()] * taken).sum()
        )

    return count


def _are_classes(targets: torch.Tensor, of_classes: bool) -> bool:
    """A loss of classes takes integers of any dtype; of a loss that is not known, int64 are taken for classes."""
    return not targets.is_floating_point() if of_classes else targets.dtype is torch.int64


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """A function, and what it is given besides outputs and targets."""
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, loss.keywords
    return loss, {}
