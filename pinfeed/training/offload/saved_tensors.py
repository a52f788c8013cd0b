"""Tensors that autograd saves: their place on a storage, and how to rebuild them on another one.

Tensors that share a version counter have the same values while the counter does not change, so
they may share a copy. Sharing a storage is not enough. ``unsafe_chunk`` returns tensors on one
storage that count their changes separately. The gates of an LSTM cell on the CPU are such tensors,
and each one is changed in place separately. torch does not expose which counter a tensor has. A
view has the counter of its base, and refers to the base. A ``detach()`` and a view as another
dtype have no base, so they are copied separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.tensors.numpy_torch import version_of

_ALIGNMENT = 512
"""Largest alignment of torch's allocators.

A piece begins at a multiple of this, so that its tensors keep their alignment and run in the same
kernels.
"""
_SMALL_VIEW = 8
"""A view smaller than 1/8 of its base is copied alone, because the base may be a whole data set."""


@dataclass(frozen=True)
class Geometry:
    """Layout of a tensor on a range of bytes; ``offset`` counts elements from its beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


class Storages:
    """Access to the storages of torch's own tensors on one device.

    Args:
        device: Name of the device.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def can_move(self, tensor: torch.Tensor) -> bool:
        """Return whether moving a tensor frees memory that the model does not need anyway.

        A parameter stays on the device, and so does its cast: autocast uses it again.
        """
        if isinstance(tensor, nn.Parameter) or not self.is_dense(tensor):
            return False
        if tensor.device != self._device:
            return False
        base = self.base(tensor)
        # autograd itself keeps a leaf that requires grad.
        if any(one.is_leaf and one.requires_grad for one in (tensor, base)):
            return False
        return not _is_cast_of_parameter(base)

    def is_dense(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is fully described by strides on a storage."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return False
        is_special = tensor.is_nested or tensor.is_quantized or tensor.is_inference()
        return tensor.layout is torch.strided and not is_special

    @staticmethod
    def base(tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that owns the version counter of ``tensor``: its base, or itself."""
        return tensor if tensor._base is None else tensor._base

    def owner(self, tensor: torch.Tensor) -> Any:
        """Return the object that owns the memory; tensors on the same memory share an owner."""
        return tensor.untyped_storage()

    def nbytes(self, owner: Any) -> int:
        """Return the bytes of a storage."""
        return int(owner.nbytes())

    def ranges(self, tensor: torch.Tensor) -> list[range]:
        """Return the bytes of the storage that a copy of a tensor may cover, preferred ones first.

        The list is empty if the tensor has no elements.
        """
        if not tensor.numel():
            return []
        base = self.base(tensor)
        own = _extent(tensor)
        whole = _extent(base) if base.numel() else range(0)
        is_inside = whole.start <= own.start and own.stop <= whole.stop
        if own == whole or not is_inside:
            return [own]
        return [own, whole] if len(own) * _SMALL_VIEW < len(whole) else [whole]

    def bytes_in(self, tensor: torch.Tensor, cut: range) -> torch.Tensor:
        """Return a range of the tensor's storage, as a tensor of bytes on the same memory."""
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(
            tensor.untyped_storage(), cut.start, (len(cut),), (1,)
        )

    def rebuild(self, memory: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Return the tensor with this geometry on the bytes of ``memory``."""
        made = torch.empty(0, dtype=geometry.dtype, device=self._device)
        first = memory.storage_offset() // geometry.dtype.itemsize
        made.set_(
            memory.untyped_storage(), first + geometry.offset, geometry.shape, geometry.strides
        )
        return with_lazy_flags(made, geometry)

    def version_probe(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory that shares the version counter of this one."""
        probe = tensor.detach()
        # Assigning data replaces the memory and keeps the counter.
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return probe


def with_lazy_flags(made: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return the tensor with the conjugate and negative flags, which are not in its memory."""
    made = made.conj() if geometry.is_conj else made
    return torch._neg_view(made) if geometry.is_neg else made


def geometry_of(tensor: torch.Tensor, cut: range) -> Geometry:
    """Return the layout of a tensor on a range of its storage."""
    offset = int(tensor.storage_offset()) - cut.start // tensor.dtype.itemsize
    return Geometry(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        offset,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tensors_in(models: Iterable[nn.Module | torch.Tensor]) -> Iterable[torch.Tensor]:
    """Yield the parameters and buffers of modules, and tensors as they are."""
    for model in models:
        if isinstance(model, nn.Module):
            yield from model.parameters()
            yield from model.buffers()
        else:
            yield model


class KeptTensor:
    """A saved tensor that stays on the device.

    Attributes:
        tensor: The tensor.
        version: Its version when it was saved.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output refers to its graph node, and the node to this handle. Keeping the output itself
        # would be a cycle that is never freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)


class SavedVersion:
    """Identity of the values of a saved tensor: its storage, its base and its version.

    Another tensor has the same values if all three are the same, except after changes that torch
    does not count, such as changes through ``.data``.
    """

    __slots__ = ("_base", "_owner", "number")

    def __init__(self, owner: Any, base: torch.Tensor, number: int) -> None:
        self._owner = weakref.ref(owner)
        self._base = weakref.ref(base)
        self.number = number

    def matches(self, owner: Any, base: torch.Tensor, number: int) -> bool:
        """Return whether a tensor with this storage and base, at this version, has the values."""
        return self._owner() is owner and self._base() is base and self.number == number


def check_version(tensor: torch.Tensor, expected: int) -> None:
    """Check that a saved tensor has not changed, with the error that torch raises without hooks.

    Raises:
        RuntimeError: If the tensor was changed in place since it was saved.
    """
    if version_of(tensor) != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a saved {tensor.dtype} tensor is at version {version_of(tensor)}; "
            f"expected version {expected} instead"
        )


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter in another dtype, as autocast makes it."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    leaf = node.next_functions[0][0]
    return isinstance(getattr(leaf, "variable", None), nn.Parameter)


def _extent(tensor: torch.Tensor) -> range:
    """Return the bytes of its storage that a tensor with elements spans.

    The beginning is rounded down to the alignment.
    """
    size = tensor.dtype.itemsize
    first = int(tensor.storage_offset())
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((n - 1) * stride for n, stride in spans)
    return range(first * size // _ALIGNMENT * _ALIGNMENT, (last + 1) * size)
