"""Calls of the user's transforms: torch's modes and generators, trials, and memory of results."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pinfeed.tensors import rng_state

_NEVER_SEARCHED = (
    *(str, bytes, bytearray, int, float, complex, type(None)),
    *(type, FunctionType, ModuleType, torch.nn.Module),
)
# Tensors of the simulated devices are computed on the CPU.
_SIMULATED = ("meta", "sim")


@contextlib.contextmanager
def modes_of_a_new_thread() -> Iterator[None]:
    """Run code as in a new thread, outside of the caller's modes.

    These are ``no_grad``, ``inference_mode``, autocast and the default device.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def no_grad() -> contextlib.AbstractContextManager[None]:
    """Return a context without gradients."""
    return torch.no_grad()


def seeded_generator(device: str, entropy: Sequence[int]) -> torch.Generator:
    """Return a generator whose seed is a function of some numbers.

    Args:
        device: Name of the device that the generator draws on.
        entropy: The numbers, none of them negative.
    """
    seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
    generator = torch.Generator("cpu" if device in _SIMULATED else device)
    return generator.manual_seed(int(seed))


@contextlib.contextmanager
def trial(device: str) -> Iterator[Callable[[], int]]:
    """Run code as a trial, and restore the global random generators afterwards.

    On a GPU, this resets torch's peak statistics.

    Args:
        device: Name of the device that the code uses.

    Yields:
        A function that returns the peak GPU memory of the code so far, in bytes; 0 for other
        devices.
    """
    with rng_state.replayed(rng_state.capture()):
        if not device.startswith("cuda"):
            yield lambda: 0
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before


def tensors_in(value: Any) -> list[Any]:
    """Return the dense tensors in an object, including tensors of a simulated device.

    The search covers containers and attributes of objects, at any depth. A sparse or nested tensor
    consists of several dense tensors.
    """
    found = []
    # The objects are kept, because a new object could get the id of a freed one.
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, _NEVER_SEARCHED) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            parts = _parts_of(one)
            found += [] if parts else [one]
            todo += reversed(parts)
        elif _is_array(one):
            found.append(one)
        else:
            todo += reversed(_children(one))
    return found


def memory_blocks_of(value: Any) -> frozenset[int]:
    """Return a number for each memory block that holds tensors of an object.

    The numbers are unique as long as the object exists.
    """
    return frozenset(memory for memory, _ in map(_memory_of, tensors_in(value)))


def nbytes_of(value: Any, known: Container[int]) -> tuple[int, int]:
    """Return the bytes of the tensors of an object, and the bytes of their memory blocks.

    Args:
        value: The object.
        known: Memory blocks that do not count, as ``memory_blocks_of`` numbers them.
    """
    tensors = tensors_in(value)
    memory = dict(map(_memory_of, tensors))
    new = [nbytes for number, nbytes in memory.items() if number not in known]
    return sum(map(_nbytes, tensors)), sum(new)


def _memory_of(tensor: Any) -> tuple[int, int]:
    # Some tensors have no storage.
    with contextlib.suppress(AttributeError, RuntimeError):
        storage = tensor.untyped_storage()
        # Memory without data, such as that of a simulated device, has no address.
        return storage.data_ptr() or storage._cdata, storage.nbytes()
    # An array of a simulated device has its memory as an attribute.
    return id(getattr(tensor, "memory", tensor)), _nbytes(tensor)


def _nbytes(tensor: Any) -> int:
    # Arrays of other libraries have dtypes and shapes of their own.
    try:
        return int(math.prod(tensor.shape) * getattr(tensor.dtype, "itemsize", 0))
    except Exception:
        return 0


def _is_array(value: Any) -> bool:
    """Return whether an object is an array of a simulated device, of numpy, or similar."""
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape")
    except Exception:
        # The attributes of the user's own objects may raise any error.
        return False


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
    for name in names:
        # A slot may be empty, or hidden by a user's property that raises an error.
        with contextlib.suppress(Exception):
            children.append(getattr(value, name))
    return children
