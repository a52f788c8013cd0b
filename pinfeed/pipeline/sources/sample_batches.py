"""batch_of_samples: a HostBatch from the results of the user's functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.pipeline.sources.base import HostBatch
from pinfeed.pipeline.sources.dataloader import HostLeaf
from pinfeed.pipeline.sources.samples import StackedSamples
from pinfeed.stores.host_rows import CheckStop, HostArray, never
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import Rebuild, flatten


class CopiedArray:
    """An array from a user's function, as a part of a batch.

    It is copied, because the function may keep the array and fill it again.
    """

    def __init__(self, array: npt.NDArray[Any], name: str) -> None:
        self._array: npt.NDArray[Any] | None = array
        self.shape = array.shape
        self.dtype = check_dtype(array.dtype, name)

    def read(self, out: npt.NDArray[Any], check_stop: CheckStop = never) -> None:
        """Copy the array into ``out``, once."""
        assert self._array is not None
        np.copyto(out, self._array)
        # The array is not needed while the batch waits to be lent.
        self._array = None


def batch_of_samples(batches: Sequence[tuple[str, Any]], n_samples: int) -> HostBatch:
    """Join the batches of several functions in one HostBatch, which rebuilds to a tuple.

    Args:
        batches: For each function its name, for error messages, and its batch on the host.
        n_samples: Number of samples in each batch.
    """
    leaves: list[tuple[str, Any]] = []
    rebuilds: list[Rebuild] = []
    for name, batch in batches:
        found, rebuild = flatten(batch, name)
        leaves += found
        # A rebuild of the empty structure does not keep the leaves that are on the host.
        rebuilds.append(flatten(rebuild(itertools.repeat(None)))[1])
    parts = [_part(leaf, name) for name, leaf in leaves]
    kept = [leaf if part is None else None for (_, leaf), part in zip(leaves, parts, strict=True)]
    moves = [part is not None for part in parts]

    def make(tensors: Iterator[Any]) -> tuple[Any, ...]:
        made = iter(
            [next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)]
        )
        return tuple(rebuild(made) for rebuild in rebuilds)

    return HostBatch([part for part in parts if part is not None], make, [(n_samples, 0)])


def _part(leaf: Any, name: str) -> HostArray | None:
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
