"""Handles that an autograd graph holds instead of saved tensors."""

from __future__ import annotations

import weakref

import torch

from pinfeed.devices.device import Event
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.training.offload.offload_transfer import StoragePiece
from pinfeed.training.offload.saved_tensors import (
    Geometry,
    SavedVersion,
    StorageRange,
)


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


class SavedPiece(StoragePiece):
    """A piece of a storage, and the identity of its values.

    Attributes:
        range: Range of the storage.
        version: Storage and version of the values.
        probe: Tensor without memory that shares the version counter of the saved tensor.
        handles: Handles of the saved tensors on the piece.
    """

    __slots__ = ("handles", "probe", "range", "version")

    version: SavedVersion
    probe: torch.Tensor
    range: StorageRange
    handles: list[weakref.ref[SavedHandle]]

    @property
    def is_served(self) -> bool:
        """Whether every tensor on the piece was unpacked since the piece was restored."""
        handles = (ref() for ref in self.handles)
        return all(handle is None or handle.back is self.back for handle in handles)


class SavedHandle:
    """Handle of a saved tensor on a piece; the piece lives as long as any of its handles.

    Attributes:
        piece: The piece.
        geometry: Layout of the tensor on the piece.
        back: The piece's ``back`` when the tensor was last unpacked.
    """

    __slots__ = ("__weakref__", "back", "geometry", "piece")

    def __init__(self, piece: SavedPiece, geometry: Geometry) -> None:
        self.piece = piece
        self.geometry = geometry
        self.back: Event | None = None
        piece.handles.append(weakref.ref(self))


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
