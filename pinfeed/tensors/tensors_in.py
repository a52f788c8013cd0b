"""tensors_in() and others: the dense tensors of an object, and the memory that they are in."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Container, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_NEVER_SEARCHED = (
    *(str, bytes, bytearray, int, float, complex, type(None)),
    *(type, FunctionType, ModuleType, torch.nn.Module),
)


def tensors_in(value: Any) -> list[Any]:
    """Return the dense tensors that an object consists of, those of a simulated device, too.

    They are found in containers and in attributes of objects, at any depth. A sparse or nested
    tensor consists of several.
    """
    return list(_tensors_in(value, set()))


def memory_of(value: Any) -> frozenset[int]:
    """Return a number for each memory that the tensors of an object are in.

    No other memory has the number as long as the object exists.
    """
    return frozenset(memory for memory, _ in map(_memory_of, tensors_in(value)))


def nbytes_of(value: Any, known: Container[int]) -> tuple[int, int]:
    """Return the bytes of the tensors of an object, and those of the memory that they are in.

    Args:
        value: The object.
        known: Memory that is not counted, as ``memory_of`` numbers it.
    """
    tensors = tensors_in(value)
    memory = dict(map(_memory_of, tensors))
    new = [nbytes for number, nbytes in memory.items() if number not in known]
    return sum(map(_nbytes, tensors)), sum(new)


def _memory_of(tensor: Any) -> tuple[int, int]:
    # Some tensors have no storage.
    with contextlib.suppress(AttributeError, RuntimeError):
        storage = tensor.untyped_storage()
        # One without data, such as that of a simulated device, has no address.
        return storage.data_ptr() or storage._cdata, storage.nbytes()
    # An array of a simulated device has its memory as an attribute.
    return id(getattr(tensor, "memory", tensor)), _nbytes(tensor)


def _nbytes(tensor: Any) -> int:
    # Arrays of other libraries have dtypes of their own.
    return int(math.prod(tensor.shape) * getattr(tensor.dtype, "itemsize", 0))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, _NEVER_SEARCHED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        parts = _parts_of(value)
        if not parts:
            yield value
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        # An array of a simulated device, or of numpy.
        yield value
        return
    else:
        parts = _children(value)
    for part in parts:
        yield from _tensors_in(part, seen)


def _parts_of(tensor: torch.Tensor) -> list[Any]:
    """Return the tensors that a tensor consists of; an empty list for a dense one."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _children(value: Any) -> list[Any]:
    """Return the elements of a container, and the attributes of an object."""
    children: list[Any] = []
    if isinstance(value, Mapping):
        children += value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        children += value
    children += getattr(value, "__dict__", {}).values()
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    children += [getattr(value, name) for name in names if hasattr(value, name)]
    return children
