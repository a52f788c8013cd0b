"""tensors_in(): the dense tensors that an object consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    elif isinstance(value, (tuple, list, set, frozenset)):
        children += value
    children += getattr(value, "__dict__", {}).values()
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    children += [getattr(value, name) for name in names if hasattr(value, name)]
    return children
