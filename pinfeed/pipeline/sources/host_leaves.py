"""HostLeaf: a leaf of a batch that is copied to the device; batches made of such leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.pipeline.sources.sample_reader import StackedSamples
from pinfeed.pipeline.sources.source import ArrayPart, HostBatch
from pinfeed.stores.host_rows import CheckStop, UnreadPart, never
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
        from pinfeed.tensors.numpy_torch import to_torch

        to_torch(out).copy_(self.host_value)


class CopiedArray(ArrayPart):
    """An array from a user's function, as a part of a batch.

    It is copied, because the function may keep the array and fill it again.
    """

    def __init__(self, array: npt.NDArray[Any], name: str) -> None:
        super().__init__(array)
        self.dtype = check_dtype(array.dtype, name)

    def read(self, out: npt.NDArray[Any], check_stop: CheckStop = never) -> None:
        """Copy the array into ``out``, once."""
        super().read(out)
        # The array is not needed while the batch waits to be lent.
        del self._array


def host_batch_of(batch: Any) -> HostBatch:
    """Make a HostBatch from a loader's batch."""
    leaves, rebuild = flatten(batch)
    parts = [HostLeaf(leaf) for _, leaf in leaves if callable(getattr(leaf, "to", None))]
    if len(parts) < len(leaves):
        moves = [callable(getattr(leaf, "to", None)) for _, leaf in leaves]
        rebuild = _with_kept(leaves, moves, rebuild)
    return HostBatch(parts, rebuild, [(_n_samples(leaves), 0)])


def host_batch_of_samples(batches: Sequence[tuple[str, Any]], n_samples: int) -> HostBatch:
    """Join the batches of several functions in one HostBatch, which rebuilds to a tuple.

    Args:
        batches: For each function its name, for error messages, and its batch on the host.
        n_samples: Number of samples in each batch.
    """
    leaves: Leaves = []
    rebuilds: list[Rebuild] = []
    for name, batch in batches:
        named, rebuild = flatten(batch, name)
        leaves += named
        # A rebuild of the empty structure does not keep the leaves that are on the host.
        rebuilds.append(flatten(rebuild(itertools.repeat(None)))[1])

    def rebuild_all(tensors: Iterator[Any]) -> tuple[Any, ...]:
        return tuple(rebuild(tensors) for rebuild in rebuilds)

    found = [_part(leaf, name) for name, leaf in leaves]
    parts = [part for part in found if part is not None]
    make: Rebuild = rebuild_all
    if len(parts) < len(leaves):
        make = _with_kept(leaves, [part is not None for part in found], rebuild_all)
    return HostBatch(parts, make, [(n_samples, 0)])


def _with_kept(leaves: Leaves, moves: Sequence[bool], rebuild: Rebuild) -> Rebuild:
    """Return a ``rebuild`` that takes tensors for the leaves that move, and keeps the others."""
    kept = [None if moved else leaf for (_, leaf), moved in zip(leaves, moves, strict=True)]
    return lambda tensors: rebuild(
        iter([next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)])
    )


def _part(leaf: Any, name: str) -> UnreadPart | None:
    """Make the part that moves a leaf to the device; None for a leaf that stays on the host."""
    import torch

    from pinfeed.tensors.numpy_torch import NUMPY, memory_of

    if isinstance(leaf, StackedSamples):
        return leaf
    if isinstance(leaf, np.ndarray):
        return CopiedArray(leaf, name)
    is_dense = (
        type(leaf) is torch.Tensor
        and leaf.dtype in NUMPY
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )
    if is_dense and leaf.device.type == "cpu" and not leaf.requires_grad:
        return CopiedArray(memory_of(leaf.resolve_conj().resolve_neg()), name)
    return HostLeaf(leaf) if callable(getattr(leaf, "to", None)) else None


def _n_samples(leaves: Leaves) -> int:
    """Return the length of the first leaf that has one: by convention, the number of samples."""
    for _, leaf in leaves:
        try:
            return int(leaf.shape[0])
        except (AttributeError, TypeError, IndexError, RuntimeError):
            # Reading the shape of a nested tensor of torch raises a RuntimeError.
            continue
    return 1
