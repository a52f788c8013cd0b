"""What a sample is: shapes and dtypes, in the structure in which the model takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.tensors.numpy_torch import TORCH
from pinfeed.tensors.pytree import Rebuild, flatten


@dataclass(frozen=True)
class SampleSpec:
    """Shapes without the dimension of the batch, and dtypes, of the tensors of a sample."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    rebuild: Rebuild

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for the same shapes and dtypes."""
        return self.shapes, self.dtypes

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each tensor of one sample."""
        return tuple(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def batch(self, n: int, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> Any:
        """A batch of ``n``, of tensors that ``make`` gives for a shape and a dtype."""
        return self.rebuild(
            make((n, *shape), dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def described(self, n: int) -> str:
        """A batch of ``n`` as people read it: ``(32, 3, 8, 8) float32``."""
        tensors = zip(self.shapes, self.dtypes, strict=True)
        return ", ".join(
            f"{(n, *shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors
        )


def samples_of(shape: Any, dtype: Any, name: str) -> SampleSpec:
    """Samples of a nested ``shape``: a tuple or list of integers is one tensor, everything else a structure of such.

    Args:
        shape: Without the dimension of the batch: ``(3, 224, 224)``, ``()``,
            ``{"ids": (128,), "mask": (128,)}``, ``((3, 8), (5,))``.
        dtype: One for all tensors, or the same structure: a torch or numpy dtype, ``"float32"``,
            ``"torch.float32"``, ``float``, ``int``.
        name: Of the argument, for errors.

    Raises:
        ArgumentError: Neither shapes nor a structure of them, a negative dimension, or no dtype of
            torch's.
    """
    leaves, rebuild = flatten(_marked(shape, f"{name}_shape"))
    shapes = tuple(leaf.shape for _, leaf in leaves)
    if isinstance(dtype, (Mapping, tuple, list)):
        found = [
            (path, _torch_dtype(leaf, f"{name}_dtype{path}")) for path, leaf in flatten(dtype)[0]
        ]
        if [path for path, _ in found] != [path for path, _ in leaves]:
            raise ArgumentError(
                f"{name}_dtype={dtype!r} has another structure than {name}_shape={shape!r}; expected the same, or one dtype"
            )
        dtypes = tuple(kind for _, kind in found)
    else:
        dtypes = (_torch_dtype(dtype, f"{name}_dtype"),) * len(shapes)
    return SampleSpec(shapes, dtypes, rebuild)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    leaves, rebuild = flatten(batch)
    return rebuild(
        leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves
    )


class _Shape:
    """A shape as a leaf."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _marked(shape: Any, name: str) -> Any:
    if isinstance(shape, (tuple, list)) and all(hasattr(n, "__index__") for n in shape):
        if any(int(n) < 0 for n in shape):
            raise ArgumentError(
                f"{name}={shape!r}: expected dimensions of 0 or more, without that of the batch"
            )
        return _Shape(tuple(int(n) for n in shape))
    if isinstance(shape, Mapping):
        return {key: _marked(value, f"{name}[{key!r}]") for key, value in shape.items()}
    if isinstance(shape, (tuple, list)):
        return tuple(_marked(value, f"{name}[{i}]") for i, value in enumerate(shape))
    raise ArgumentError(
        f"{name}={shape!r}: expected a shape, as (3, 224, 224), or a tuple, list or dict of shapes"
    )


def _torch_dtype(value: Any, name: str) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    try:
        return TORCH[
            dtype_of(
                value.removeprefix("torch.") if isinstance(value, str) else np.dtype(value), name
            )
        ]
    except (StoreError, TypeError) as error:
        raise ArgumentError(
            f"{name}={value!r}: {error}; expected a dtype of torch or numpy, or its name, as 'float32'"
        ) from None
