"""Tensors that autograd saves, told apart by the storage they are on, and made again on another one.

Tensors that share a version counter are the same values for as long as the counter stands still, so
they may share a copy. The same storage alone is not enough: ``unsafe_chunk`` gives tensors on one
storage that count their changes apart (the gates of an LSTM cell on the CPU are such, each changed
in place in its turn). Torch does not show whose a counter is. A view has that of its base, and
there it is seen; a ``detach()`` and a view as another dtype have no base, so they go on their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# As torch's allocators align at most: what is cut out here is aligned there as it was, and runs in
# the same kernels.
_ALIGNED = 512
# A view of less than this part of its base goes alone: it may be a batch, cut from all of the data.
_ALONE = 8


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a storage."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def has(self, other: Range) -> bool:
        """Whether the other is within it."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies on a range of bytes; ``offset`` is in elements, from the beginning of the range."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


class Storages:
    """The storages of torch's own tensors on one device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def can_move(self, tensor: torch.Tensor) -> bool:
        """Whether it is a dense tensor on the device, whose memory would be free without it."""
        if (
            isinstance(tensor, nn.Parameter)
            or not self.is_dense(tensor)
            or tensor.device != self._device
        ):
            return False
        # autograd itself keeps a leaf.
        return not any(
            known.is_leaf and known.requires_grad for known in (tensor, self.base(tensor))
        )

    def is_dense(self, tensor: torch.Tensor) -> bool:
        """Whether strides on a storage say all about it."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return False
        return tensor.layout is torch.strided and not (
            tensor.is_nested or tensor.is_quantized or tensor.is_inference()
        )

    @staticmethod
    def base(tensor: torch.Tensor) -> torch.Tensor:
        """Whose version counter it has; the tensor itself, where it is no view."""
        return tensor if tensor._base is None else tensor._base

    def owner(self, tensor: torch.Tensor) -> Any:
        """What the memory lives as long as; the same object for all tensors on it."""
        return tensor.untyped_storage()

    def nbytes(self, owner: Any) -> int:
        """Bytes of a storage."""
        return int(owner.nbytes())

    def ranges(self, tensor: torch.Tensor) -> list[Range]:
        """Of its storage, the bytes with which it may be moved, the ones preferred first; none if it has no elements."""
        if not tensor.numel():
            return []
        base = self.base(tensor)
        own, whole = _extent(tensor), _extent(base) if base.numel() else Range(0, 0)
        if own == whole or not whole.has(own):
            return [own]
        return [own, whole] if own.nbytes * _ALONE < whole.nbytes else [whole]

    def piece(self, tensor: torch.Tensor, cut: Range) -> torch.Tensor:
        """Those bytes of its storage, as a tensor on the same memory."""
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(
            tensor.untyped_storage(), cut.start, (cut.nbytes,), (1,)
        )

    def remade(self, piece: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The tensor of that geometry on the bytes of ``piece``."""
        made = torch.empty(0, dtype=geometry.dtype, device=self._device)
        first = piece.storage_offset() // geometry.dtype.itemsize
        made.set_(
            piece.untyped_storage(), first + geometry.offset, geometry.shape, geometry.strides
        )
        return lazily(made, geometry)

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that counts the changes of this one."""
        probe = tensor.detach()
        # The counter stays
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return probe


def lazily(made: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The tensor, conjugated and negated as it was: torch notes it, the memory does not know."""
    made = made.conj() if geometry.is_conj else made
    return torch._neg_view(made) if geometry.is_neg else made


def geometry_of(tensor: torch.Tensor, cut: Range) -> Geometry:
    """How the tensor lies on those bytes of its storage."""
    offset = int(tensor.storage_offset()) - cut.start // tensor.dtype.itemsize
    return Geometry(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        offset,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def tensors_of(models: Iterable[nn.Module | torch.Tensor]) -> Iterable[torch.Tensor]:
    """Parameters and buffers of modules, and tensors."""
    for model in models:
        if isinstance(model, nn.Module):
            yield from model.parameters()
            yield from model.buffers()
        else:
            yield model


class Same:
    """Tells whether a tensor has the values that another one had: it is on the same storage, counts with it, and nothing was counted since.

    What torch does not count (a change through ``.data``) is not seen.
    """

    __slots__ = ("_base", "_owner", "version")

    def __init__(self, owner: Any, base: torch.Tensor, version: int) -> None:
        self._owner = weakref.ref(owner)
        self._base = weakref.ref(base)
        self.version = version

    def has(self, owner: Any, base: torch.Tensor, version: int) -> bool:
        """Whether it is so for a tensor with this storage and base, at this version."""
        return self._owner() is owner and self._base() is base and self.version == version


def _extent(tensor: torch.Tensor) -> Range:
    """From the first to the last byte that it reaches, the beginning rounded down; it must have elements."""
    size, first = tensor.dtype.itemsize, int(tensor.storage_offset())
    last = first + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Range(first * size // _ALIGNED * _ALIGNED, (last + 1) * size)
