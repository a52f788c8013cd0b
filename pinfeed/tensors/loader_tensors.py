"""plain_tensors: the tensors of a loader's batch, if a GPU takes them without conversion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pinfeed.tensors.numpy_torch import NUMPY


def plain_tensors(batch: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a batch that is a tensor, or a list, tuple or dict of tensors.

    Returns:
        The tensors in order; None for other structures, or if a tensor is not dense, contiguous and
        on the CPU, has a gradient or a dtype that numpy does not have.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        tensors: Sequence[Any] = (batch,)
    elif kind is dict:
        tensors = list(batch.values())
    elif kind is list or kind is tuple:
        tensors = batch
    else:
        return None
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.requires_grad
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.dtype not in NUMPY
        ):
            return None
    return tensors or None


def same_structure(batch: Any, tensors: Sequence[Any]) -> Any:
    """Return other tensors in the structure of a batch that ``plain_tensors`` takes."""
    kind = type(batch)
    if kind is dict:
        return dict(zip(batch, tensors, strict=True))
    return kind(tensors) if kind is list or kind is tuple else tensors[0]
