"""HostLeaf: a leaf of a batch that is copied to the device; batches made of such leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.pipeline.sources.source import BRIEF_NBYTES, HostBatch, copy_array
from pinfeed.stores.host_rows import CheckStop, never
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import Rebuild, flatten

Leaves = list[tuple[str, Any]]
"""Leaves of a batch, each with its name in error messages."""


class HostLeaf:
    """A leaf of a loader's batch: a tensor on the host, or an object with a method ``to``.

    An object that is not a tensor has neither shape nor dtype; the device moves it with ``to``.
    """

    __slots__ = ("host_value",)

    def __init__(self, value: Any) -> None:
        self.host_value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.host_value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the tensor."""
        # The import is local, because the pipeline is loaded without torch.
        from pinfeed.tensors.numpy_torch import NUMPY

        return NUMPY[self.host_value.dtype]

    def read(self, out: npt.NDArray[Any], check_stop: CheckStop = never) -> None:
        """Copy the tensor into ``out``."""
        from pinfeed.tensors.numpy_torch import memory_of, plain, to_torch

        if out.nbytes <= BRIEF_NBYTES:
            copy_array(memory_of(plain(self.host_value)), out)
            return
        # torch copies in several threads.
        to_torch(out).copy_(self.host_value)


def host_batch_of(batch: Any) -> HostBatch:
    """Make a HostBatch from a loader's batch."""
    leaves, rebuild = flatten(batch)
    parts = [HostLeaf(leaf) for _, leaf in leaves if callable(getattr(leaf, "to", None))]
    if len(parts) < len(leaves):
        moves = [callable(getattr(leaf, "to", None)) for _, leaf in leaves]
        rebuild = _with_kept(leaves, moves, rebuild)
    return HostBatch(parts, rebuild, [(_n_samples(leaves), 0)])


def copied(batch: Any, name: str) -> Any:
    """Return a batch of a user's function with copies of its arrays and CPU tensors.

    The function may keep them, and fill them again. Arrays become tensors.

    Args:
        batch: The batch.
        name: Name of the function in error messages.

    Raises:
        StoreError: If torch does not have the dtype of an array.
    """
    leaves, rebuild = flatten(batch, name)
    return rebuild(iter([_copied(leaf, path) for path, leaf in leaves]))


def _with_kept(leaves: Leaves, moves: Sequence[bool], rebuild: Rebuild) -> Rebuild:
    """Return a ``rebuild`` that takes tensors for the leaves that move, and keeps the others."""
    kept = [None if moved else leaf for (_, leaf), moved in zip(leaves, moves, strict=True)]
    return lambda tensors: rebuild(
        iter([next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)])
    )


def _copied(leaf: Any, name: str) -> Any:
    import torch

    from pinfeed.tensors.numpy_torch import to_torch

    if isinstance(leaf, np.ndarray):
        return to_torch(np.array(leaf, check_dtype(leaf.dtype, name)))
    is_dense = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested
    if is_dense and leaf.is_cpu and not leaf.requires_grad:
        return leaf.clone()
    return leaf


def _n_samples(leaves: Leaves) -> int:
    """Return the length of the first leaf that has one: by convention, the number of samples."""
    for _, leaf in leaves:
        try:
            return int(leaf.shape[0])
        except (AttributeError, TypeError, IndexError, RuntimeError):
            # Reading the shape of a nested tensor of torch raises a RuntimeError.
            continue
    return 1
