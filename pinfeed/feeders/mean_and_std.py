"""mean_and_std(): statistics of all rows of a source, to normalize batches with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from pinfeed.errors import ArgumentError
from pinfeed.feeders.feeder import Feeder
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.tensors.argument_types import Source
from pinfeed.validation.arguments import explain_arguments, whole_number

# Bytes of the rows of a batch, and the same again for each of the steps in float64.
_BATCH_BYTES = 4 << 20


class MeanAndStd(NamedTuple):
    """Mean and standard deviation, float64 tensors of the same shape."""

    mean: torch.Tensor
    std: torch.Tensor


@explain_arguments({"dim axis": "the axis that keeps its own statistics is channel_axis="})
def mean_and_std(source: Source, *, channel_axis: int | None = None) -> Any:
    """Return mean and standard deviation of all rows of a source.

    The rows are read once, in order, in batches of a few MiB, and added up in float64. The standard
    deviation is that of the whole population, as ``numpy.std``. It is infinite if the squares of
    differences from the mean are.

    Give the arrays themselves, not overlapping windows of them, which would count rows repeatedly.

    Args:
        source: A source as ``Feeder`` takes it, without ragged rows.
        channel_axis: Axis of a batch, from 1, whose indices have statistics of their own. None
            returns two numbers for all channels together.

    Returns:
        A ``MeanAndStd`` of shape ``(n_channels,)``, or ``()`` without a ``channel_axis``; for a
        structure of sources, the same structure of these.

    Raises:
        StoreError: If the source cannot be read.
        ArgumentError: If a part has ragged rows or complex numbers, or has no such axis.

    Examples:
        >>> images = np.arange(24, dtype="float32").reshape(2, 3, 4)
        >>> found = pinfeed.mean_and_std(images, channel_axis=1)
        >>> found.mean.tolist()
        [7.5, 11.5, 15.5]
        >>> mean, std = (part.float()[:, None] for part in found)
        >>> with pinfeed.Feeder(
        ...     images, batch_size=2, device_transform=lambda x: (x - mean) / std, device="cpu"
        ... ) as feeder:
        ...     x = next(iter(feeder))
    """
    axis = None if channel_axis is None else whole_number(channel_axis, "channel_axis")
    tree = StoreTree(source)
    try:
        _check(tree, axis)
        batch_size = max(1, min(tree.n_rows, _BATCH_BYTES // max(1, tree.row_nbytes)))
    finally:
        tree.close()
    with Feeder(source, batch_size=batch_size, device="cpu") as feeder:
        sums: list[_Sums] = []
        for batch in feeder:
            parts, structure = pytree.tree_flatten(batch)
            sums = sums or [_Sums(axis) for _ in parts]
            for one, part in zip(sums, parts, strict=True):
                one.add(part)
    return pytree.tree_unflatten([one.result() for one in sums], structure)


class _Sums:
    """Mean and sum of squared differences from it, which further values update.

    Args:
        axis: Axis with statistics of their own; None for none.
    """

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self._n = 0
        self._mean = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: torch.Tensor) -> None:
        """Add the values of a batch, by the formula of Chan, Golub and LeVeque."""
        values = values.double()
        channels = values.reshape(1, -1) if self._axis is None else values.movedim(self._axis, 0)
        channels = channels.flatten(1)
        mean = channels.mean(1)
        squares = (channels - mean[:, None]).square().sum(1)
        n = channels.shape[1]
        total = self._n + n
        # The square of a first mean, as the distance from 0, may be infinite.
        if self._n:
            change = mean - self._mean
            squares = self._squares + squares + change.square() * (self._n * n / total)
            mean = self._mean + change * (n / total)
        self._mean = mean
        self._squares = squares
        self._n = total

    def result(self) -> MeanAndStd:
        """Return the statistics of all values."""
        std = (self._squares / self._n).sqrt()
        if self._axis is None:
            return MeanAndStd(self._mean.reshape(()), std.reshape(()))
        return MeanAndStd(self._mean, std)


def _check(tree: StoreTree, axis: int | None) -> None:
    """Raise ArgumentError if a part has no such statistics."""
    if tree.texts:
        raise ArgumentError(
            "mean_and_std(source): the source has text; expected numbers; leave the text out"
        )
    if tree.ragged:
        raise ArgumentError(
            "mean_and_std(source): the source has ragged rows; give the values of the RaggedStore, "
            "an array or a store with one item per row"
        )
    for store in tree.stores:
        if store.dtype.kind == "c":
            raise ArgumentError(
                f"mean_and_std(source): {store!r} has complex numbers; expected real ones; give "
                "their real and imaginary parts"
            )
        if axis is not None and axis > len(store.row_shape):
            raise ArgumentError(
                f"channel_axis={axis}: batches of {store!r} have {1 + len(store.row_shape)} axes; "
                f"expected 1 to {len(store.row_shape)}, or None"
            )
