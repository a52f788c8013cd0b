"""Types of arguments that many public functions take, for signatures and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

Source: TypeAlias = Any
"""Rows: a path, an array, a tensor on the CPU, a table of Arrow or pandas, or a ``Store``; or a
tuple, list, dict or named tuple of sources.
"""
IdsOfBatch: TypeAlias = Callable[[Any], Any] | Hashable
"""A function of the batch that returns the ids to look up, or the key of the ids in the batch."""
Shape: TypeAlias = Sequence[int]
Shapes: TypeAlias = Shape | Sequence[Shape] | Mapping[str, Shape]
"""The shape of a sample, or those of several inputs or outputs."""

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    ArrayLike: TypeAlias = npt.NDArray[Any] | torch.Tensor
    """An array, or a tensor on the CPU."""
    DTypeLike: TypeAlias = npt.DTypeLike | torch.dtype
    """A dtype of torch, or what numpy takes for one, such as ``"float32"``."""
    Numbers: TypeAlias = torch.Tensor | npt.ArrayLike
    """Numbers in a tensor, an array or a list."""
    Ids: TypeAlias = Numbers
    """Integers, of any shape."""
else:
    # Programs may read signatures, and need not load torch for it.
    ArrayLike = DTypeLike = Numbers = Ids = Any
