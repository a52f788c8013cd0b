"""SampleLayout: how the samples of a batch are stacked, as torch's ``default_collate`` does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate

from pinfeed.errors import ArgumentError
from pinfeed.tensors.numpy_torch import NUMPY, to_torch
from pinfeed.tensors.pytree import flatten

Array = npt.NDArray[Any]

# numpy keeps the interpreter's lock while it copies a smaller value. torch would release it, and
# the thread would have to wait for it again.
_SMALL_NBYTES = 64 << 10


def collated(samples: list[Any]) -> Any:
    """Return a batch of samples, as ``default_collate`` makes it."""
    return default_collate(samples)


class Column(NamedTuple):
    """One leaf of all samples, stacked in an array of shape (n, *shape)."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    of_torch: torch.dtype
    is_small: bool
    """Whether numpy copies a value, and keeps the interpreter's lock while it does."""


class _Marker:
    """Stands for leaf ``i`` of a sample."""

    def __init__(self, i: int) -> None:
        self.i = i
        self.kind: type = list


class SampleLayout:
    """The structure of a batch, given by one sample; all other samples must be like it.

    Args:
        sample: The sample.

    Attributes:
        columns: The leaves of a sample; None for a leaf of which a batch has a list, as of strings.
        stacks: Whether each leaf of a batch is a column or a list, and there is a column.
            Otherwise, ``default_collate`` must make the batch.

    Raises:
        TypeError: If ``default_collate`` refuses the sample.
    """

    def __init__(self, sample: Any) -> None:
        leaves, self._rebuild_sample = flatten(sample)
        self._names = [name for name, _ in leaves]
        self._types = [type(leaf) for _, leaf in leaves]
        self._type = type(sample)
        self._is_flat = self._type in (tuple, list) and self._names == [
            f"[{i}]" for i in range(len(sample))
        ]
        self.columns = [_column(leaf) for _, leaf in leaves]
        self.stacks = any(column is not None for column in self.columns) and all(
            column is not None or kind in (str, bytes)
            for column, kind in zip(self.columns, self._types, strict=True)
        )
        # The structure of a batch may differ from that of a sample: tuples become lists.
        marked = self._rebuild_sample(iter([_Marker(i) for i in range(len(leaves))]))
        markers, self._rebuild = flatten(collate([marked], collate_fn_map={_Marker: _only}))
        self._order = [marker.i for _, marker in markers]
        # The strings of a batch are a list, or a tuple if they are in a tuple or list.
        self._lists = [marker.kind for _, marker in markers]

    def leaves(self, sample: Any) -> list[Any]:
        """Return the leaves of another sample.

        Raises:
            ArgumentError: If its structure or the types of its leaves differ.
        """
        if self._names == [""]:
            leaves = [sample]
        elif self._is_flat and type(sample) is self._type:
            leaves = list(sample)
        else:
            named, _ = flatten(sample)
            leaves = [leaf for _, leaf in named]
            if [name for name, _ in named] != self._names:
                raise _unlike(f"the leaves {[name for name, _ in named]}", f"{self._names}")
        types = [type(leaf) for leaf in leaves]
        if types != self._types:
            raise _unlike(_names_of(types), _names_of(self._types))
        return leaves

    def write(self, leaves: Sequence[Any], position: int, places: Sequence[Any]) -> None:
        """Write the leaves of a sample to its position in a batch.

        Args:
            leaves: The leaves.
            position: The position.
            places: For each leaf, the array or the list of the batch.

        Raises:
            ArgumentError: If the shape or the dtype of a leaf differs from that of its column.
        """
        for leaf, place, column in zip(leaves, places, self.columns, strict=True):
            if column is None:
                place[position] = leaf
            elif isinstance(leaf, torch.Tensor):
                if leaf.shape != column.shape or leaf.dtype is not column.of_torch:
                    raise _unlike_column(leaf, column)
                _write_tensor(leaf, place, position, is_small=column.is_small)
            elif isinstance(leaf, np.ndarray) and (leaf.shape, leaf.dtype) != column[:2]:
                raise _unlike_column(leaf, column)
            else:
                place[position] = leaf

    def sample(self, position: int, places: Sequence[Any]) -> Any:
        """Return the sample at a position of a batch, as it was written.

        Args:
            position: The position.
            places: For each leaf, the array or the list of the batch.
        """
        leaves = []
        for place, column, kind in zip(places, self.columns, self._types, strict=True):
            if column is None:
                leaves.append(place[position])
            elif issubclass(kind, torch.Tensor):
                leaves.append(to_torch(place[position : position + 1])[0])
            elif issubclass(kind, np.ndarray):
                leaves.append(np.asarray(place[position]))
            else:
                # The type of a number decides the dtype of a batch.
                leaves.append(kind(place[position]))
        return self._rebuild_sample(iter(leaves))

    def converts(self, sample: Any) -> bool:
        """Return whether ``default_collate`` takes a sample that differs from those of the layout.

        It converts numbers and dtypes, and leaves out other keys than those of the first sample.
        """
        places = [
            [kind()] if column is None else np.zeros((1, *column.shape), column.dtype)
            for column, kind in zip(self.columns, self._types, strict=True)
        ]
        try:
            default_collate([self.sample(0, places), sample])
        except Exception:
            return False
        return True

    def rebuild(self, columns: Sequence[Any]) -> Any:
        """Return a batch in the structure that ``default_collate`` gives it.

        Args:
            columns: The stacked tensor or the list of each leaf.
        """
        leaves = []
        for i, kind in zip(self._order, self._lists, strict=True):
            leaves.append(kind(columns[i]) if self.columns[i] is None else columns[i])
        return self._rebuild(iter(leaves))


def _column(leaf: Any) -> Column | None:
    """Return the column of a leaf that ``default_collate`` stacks; None for others."""
    is_dense = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested
    # A stack of one tensor is like a view of it, which copies nothing.
    collated = leaf[None] if is_dense else default_collate([leaf])
    if type(collated) is not torch.Tensor or collated.layout is not torch.strided:
        return None
    if not collated.is_cpu or collated.requires_grad or collated.dtype not in NUMPY:
        return None
    is_small = collated.nbytes <= _SMALL_NBYTES and collated.dtype is not torch.bfloat16
    return Column(tuple(collated.shape[1:]), NUMPY[collated.dtype], collated.dtype, is_small)


def _only(batch: Sequence[Any], *, collate_fn_map: Any) -> Any:
    batch[0].kind = type(batch)
    return batch[0]


def _write_tensor(leaf: torch.Tensor, place: Array, position: int, *, is_small: bool) -> None:
    if leaf.requires_grad:
        raise _unlike("a tensor that requires a gradient", "a tensor without a gradient")
    # numpy has no lazily conjugated or negated arrays.
    if is_small and not leaf.is_conj() and not leaf.is_neg():
        place[position] = leaf.numpy()
    else:
        to_torch(place[position : position + 1])[0].copy_(leaf)


def _names_of(types: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in types)


def _unlike_column(leaf: Any, column: Column) -> ArgumentError:
    found = f"a leaf of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return _unlike(found, f"shape {column.shape} and {column.dtype}")


def _unlike(found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"got {found}; expected {expected}, as of another sample of the batch; give collate_fn=, "
        "which makes a batch from a list of samples"
    )
