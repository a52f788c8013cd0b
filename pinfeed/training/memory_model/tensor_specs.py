"""SampleSpec: shapes and dtypes of a sample, in the structure that the model takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.tensors.dtypes import DTYPES, dtype_of
from pinfeed.tensors.numpy_torch import TORCH
from pinfeed.tensors.pytree import Rebuild, flatten


@dataclass(frozen=True)
class SampleSpec:
    """Shapes, without the batch dimension, and dtypes of the tensors of a sample.

    Attributes:
        shapes: Shape of each tensor.
        dtypes: Dtype of each tensor.
        rebuild: Function that makes the structure of a sample from such tensors.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    rebuild: Rebuild

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each tensor of one sample."""
        return tuple(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def batch(self, n: int, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> Any:
        """Return a batch of ``n`` samples; ``make`` returns a tensor for a shape and a dtype."""
        return self.rebuild(
            make((n, *shape), dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def described(self, n: int) -> str:
        """Describe a batch of ``n`` samples for messages: ``(32, 3, 8, 8) float32``."""
        tensors = zip(self.shapes, self.dtypes, strict=True)
        return ", ".join(
            f"{(n, *shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors
        )


def samples_of(shape: Any, dtype: Any, name: str) -> SampleSpec:
    """Return the spec of a nested shape and its dtypes.

    A tuple or list of integers is the shape of one tensor; any other value is a structure of
    shapes.

    Args:
        shape: Shapes without the batch dimension: ``(3, 224, 224)``, ``()``,
            ``{"ids": (128,), "mask": (128,)}``, ``((3, 8), (5,))``.
        dtype: One dtype for all tensors, or the same structure: a torch or numpy dtype,
            ``"float32"``, ``"torch.float32"``, ``float``, ``int``.
        name: Name of the argument, for errors.

    Raises:
        ArgumentError: If ``shape`` is not a structure of shapes, a dimension is negative, or torch
            lacks a dtype.
    """
    leaves, rebuild = flatten(_with_shape_leaves(shape, f"{name}_shape"))
    shapes = tuple(leaf.shape for _, leaf in leaves)
    if isinstance(dtype, (Mapping, tuple, list)):
        found = [
            (path, _torch_dtype(leaf, f"{name}_dtype{path}")) for path, leaf in flatten(dtype)[0]
        ]
        if [path for path, _ in found] != [path for path, _ in leaves]:
            raise ArgumentError(
                f"{name}_dtype={dtype!r} has another structure than {name}_shape={shape!r}; "
                "expected the same structure, or one dtype"
            )
        dtypes = tuple(kind for _, kind in found)
    else:
        dtypes = (_torch_dtype(dtype, f"{name}_dtype"),) * len(shapes)
    return SampleSpec(shapes, dtypes, rebuild)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    return map_tensors(lambda tensor: tensor.to(device), batch)


def tensor_leaves(batch: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over the tensors of a nested structure."""
    return (leaf for _, leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor))


def map_tensors(change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Return a batch with ``change(tensor)`` for each tensor; other leaves stay as they are."""
    leaves, rebuild = flatten(batch)
    return rebuild(change(leaf) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves)


class _Shape:
    """A shape that is a leaf of a nested structure."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _with_shape_leaves(shape: Any, name: str) -> Any:
    if isinstance(shape, (tuple, list)) and all(hasattr(n, "__index__") for n in shape):
        if any(int(n) < 0 for n in shape):
            raise ArgumentError(
                f"{name}={shape!r}: expected dimensions of at least 0, without the batch dimension"
            )
        return _Shape(tuple(int(n) for n in shape))
    if isinstance(shape, Mapping):
        return {key: _with_shape_leaves(value, f"{name}[{key!r}]") for key, value in shape.items()}
    if isinstance(shape, (tuple, list)):
        return tuple(_with_shape_leaves(value, f"{name}[{i}]") for i, value in enumerate(shape))
    raise ArgumentError(
        f"{name}={shape!r}: expected a shape, such as (3, 224, 224), or a tuple, list or dict of "
        "shapes"
    )


def _torch_dtype(value: Any, name: str) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    try:
        given = value.removeprefix("torch.") if isinstance(value, str) else np.dtype(value)
        return TORCH[dtype_of(given, name)]
    except (StoreError, TypeError):
        raise ArgumentError(
            f"{name}={value!r}: expected a dtype of torch or numpy, or its name, one of "
            f"{', '.join(sorted(DTYPES))}"
        ) from None
