"""Conversions between numpy arrays and torch tensors, without copies; simple batches of tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.errors import StoreError
from pinfeed.tensors.dtypes import BFLOAT16, DTYPES
from pinfeed.validation import suggestions

TORCH: dict[np.dtype[Any], torch.dtype] = {
    dtype: getattr(torch, name) for name, dtype in DTYPES.items()
}
NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    of_torch: of_numpy for of_numpy, of_torch in TORCH.items()
}
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes for operations that torch does not have for these unsigned ones."""


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a CPU tensor on the array's memory."""
    if array.dtype == BFLOAT16:
        # torch does not accept arrays of this dtype, but it accepts their bits.
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(value: Any, name: str) -> npt.NDArray[Any]:
    """Return an array on the memory of a dense CPU tensor.

    Args:
        value: The tensor.
        name: Name of the source in error messages.

    Raises:
        StoreError: If ``value`` is not a dense CPU tensor of a dtype that numpy has.
    """
    if not isinstance(value, torch.Tensor):
        raise StoreError(
            f"{name}: got {type(value).__name__}; expected a path, a numpy array, a CPU tensor, "
            f"an Arrow table, a DataFrame or a Store; {suggestions.of_object(value)}"
        )
    if value.is_nested:
        raise StoreError(
            f"{name}: got a nested tensor with rows of different lengths; give "
            "pinfeed.RaggedStore(tensor.values(), tensor.offsets()), or pad the rows with "
            "tensor.to_padded_tensor(0)"
        )
    if value.device.type != "cpu":
        raise StoreError(
            f"{name}: the tensor is on {value.device}; expected a tensor with data on the CPU; "
            "index it directly, or give .cpu()"
        )
    if value.layout is not torch.strided or value.dtype not in NUMPY:
        is_sparse = value.layout is not torch.strided
        todo = "; give pinfeed.SparseStore(tensor.to_sparse_csr()), or tensor.to_dense()"
        raise StoreError(
            f"{name}: got a {value.layout} tensor of {value.dtype}; expected a dense tensor of "
            f"{', '.join(sorted(DTYPES))}{todo * is_sparse}"
        )
    if value.is_conj() or value.is_neg():
        raise StoreError(
            f"{name}: got a lazily conjugated or negated tensor; give .resolve_conj().resolve_neg()"
        )
    return memory_of(plain(value))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without a gradient, whose numbers are in memory as they are.

    Most tensors are such, and each call of torch would let another thread take the interpreter's
    lock.
    """
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor, neither sparse nor nested."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def passed_on(batch: Any) -> tuple[Any, int, int] | None:
    """Return a batch of dense CPU tensors with these tensors, its samples and its bytes.

    The batch is a tensor, or a new list, tuple or dict of tensors. The number of samples is the
    length of the first tensor that has one, or 1. The result is None for any other batch, such as
    one of sparse tensors, of subclasses of tensors, or of nested structures.
    """
    kind = type(batch)
    values = (batch,)
    if kind is dict:
        batch = dict(batch)
        values = batch.values()
    elif kind is list or kind is tuple:
        batch = values = kind(batch)
    n_samples = None
    nbytes = 0
    try:
        for value in values:
            if type(value) is not torch.Tensor or not value.is_cpu:
                return None
            nbytes += value.nbytes
            if n_samples is None and (shape := value.shape):
                n_samples = shape[0]
    except RuntimeError:
        # Sparse and nested tensors raise it.
        return None
    return batch, 1 if n_samples is None else n_samples, nbytes


def plain_tensors(batch: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a batch that is a tensor, or a list, tuple or dict of tensors.

    Returns:
        The tensors in order; None for other structures, or if a tensor is not dense, contiguous and
        on the CPU, has a gradient or a dtype that numpy does not have.
    """
    kind = type(batch)
    tensors: Sequence[Any] = (batch,)
    if kind is dict:
        tensors = list(batch.values())
    elif kind is list or kind is tuple:
        tensors = batch
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.requires_grad
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.dtype not in NUMPY
        ):
            return None
    return tensors or None


def same_structure(batch: Any, tensors: Sequence[Any]) -> Any:
    """Return other tensors in the structure of a batch that ``plain_tensors`` takes."""
    kind = type(batch)
    if kind is dict:
        return dict(zip(batch, tensors, strict=True))
    return kind(tensors) if kind is list or kind is tuple else tensors[0]


def memory_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return an array on the memory of a dense CPU tensor without a gradient, unchecked."""
    if tensor.dtype is torch.bfloat16:
        bits: npt.NDArray[Any] = tensor.view(torch.uint16).numpy()
        return bits.view(BFLOAT16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def bytes_by_row(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of each row of an array, shape (n_rows, bytes of a row).

    Rows have equal bytes if they are equal bit for bit.
    """
    if not array.size:
        return np.empty((len(array), 0), np.uint8)
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place.

    It is 0 for an inference tensor, whose changes torch does not count.
    """
    return 0 if tensor.is_inference() else tensor._version


@functools.cache
def load_jagged() -> None:
    """Load torch's modules for nested tensors before a loop needs them; it takes about 2 s."""
    jagged(torch.zeros(1), torch.tensor([0, 1]))


def jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of layout ``torch.jagged`` on the memory of values and offsets.

    Args:
        values: Elements of all rows, shape (total, *).
        offsets: Offsets of the rows, shape (n + 1,), int64.
    """
    return torch.nested.nested_tensor_from_jagged(values, offsets)
