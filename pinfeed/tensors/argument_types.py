"""Types of arguments that many public functions take, for signatures and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

Source: TypeAlias = Any
"""Rows: a path, an array, a tensor on the CPU, a table of Arrow or pandas, or a ``Store``; or a
tuple, list, dict or named tuple of sources.
"""
Tensors: TypeAlias = Any
"""Tensors in the structure of a source: one for each array, text as it is; or any other structure
of tensors, if a function of the user made it.
"""
ArrowColumn: TypeAlias = Any
"""A ``pyarrow.ChunkedArray`` or a ``pyarrow.Array``."""
State: TypeAlias = dict[str, object]
"""Names and plain values, which ``torch.save`` and JSON can hold."""
BatchFunction: TypeAlias = Callable[..., Tensors]
"""A function of the tensors of a batch that returns those of another batch. A parameter named
``generator`` receives a ``torch.Generator``.
"""
SampleFunction: TypeAlias = Callable[..., Any]
"""A function of an item of a dataset that returns a sample. A parameter named ``generator``
receives a ``torch.Generator``, and one named ``rng`` a ``numpy.random.Generator``.
"""
Collate: TypeAlias = Callable[[list[Any]], Any]
"""A function of a list of samples that returns a batch."""
ReadSamples: TypeAlias = Callable[[Any], Iterable[Any]]
"""A function of an input that returns its samples."""
JoinSamples: TypeAlias = Callable[[Iterator[Any]], Any]
"""A function of the samples of a batch that returns the batch."""
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
    LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]
    """A function of outputs and targets that returns a scalar."""
else:
    # Programs may read signatures, and need not load torch for it.
    ArrayLike = DTypeLike = Numbers = Ids = LossFunction = Any


class MapDataset(Protocol):
    """A dataset with items by index: a ``torch.utils.data.Dataset``, a list or any sequence.

    It also has a length, which the types of torch do not say.

    Examples:
        >>> class Squares:
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return index**2
        >>> [batch.tolist() for batch in pinfeed.wrap_dataset(Squares(), batch_size=2)]
        [[0, 1], [4, 9]]
    """

    def __getitem__(self, index: int, /) -> Any:
        """Return an item."""
