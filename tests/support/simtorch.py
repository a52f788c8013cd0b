"""SimTorchDevice: the simulated device for torch.

A training loop runs on it unchanged, each operation as late as the adversary decides.

A tensor of the device reports the device ``meta``, because its values cannot be read at once. Views
are created at once. Other operations are queued in the current stream, and compute on the tensor's
memory when the stream reaches them. An operation waits for the stream first, as on a GPU, if it
needs a value (``item()``, ``cpu()``, a mask) or if the shape of its result depends on values.
Numbers on the host (the ``step`` of an optimizer) are read when work with them is queued.

Sparse tensors are not simulated. Operations that draw random numbers wait for the stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from support.sim_engine import SimEngineDevice
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from pinfeed.tensors.numpy_torch import NUMPY, is_dense, memory_of, to_torch
from pinfeed.testing.sim_streams import DeviceArray, SimMemory

META = torch.device("meta")
_CPU = torch.device("cpu")


class SimTensor(torch.Tensor, DeviceArray):  # type: ignore[misc]  # both have shape and dtype
    """A tensor on the simulated device.

    Args:
        device: The simulated device.
        memory: Its memory, which lives as long as the tensor.
        raw: A dense CPU tensor on that memory, which work in a stream reads and writes.
    """

    sim: SimTorchDevice
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, device: SimTorchDevice, memory: SimMemory, raw: torch.Tensor) -> SimTensor:
        made: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=META,
        )
        made.sim = device
        made.memory = memory
        made.raw = raw
        made._array = memory_of(raw)
        return made

    def __init__(self, device: SimTorchDevice, memory: SimMemory, raw: torch.Tensor) -> None:
        """Do nothing: ``__new__`` has made the tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        device = next(leaf.sim for leaf in tree_iter((args, kwargs)) if isinstance(leaf, SimTensor))
        return device._do(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """A torch mode that makes tensors on ``meta``, or moved there, tensors of the device."""

    def __init__(self, device: SimTorchDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == META or SimTensor in types:
            return self._device._do(func, args, kwargs)
        return func(*args, **kwargs)


class _Literals(TorchFunctionMode):
    """A torch mode that keeps the values of ``torch.tensor(..., device="meta")``.

    torch itself would drop them. They are made on the CPU and moved.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META:
            return func(*args, **{**kwargs, "device": None}).to(META)
        return func(*args, **kwargs)


class SimTorchDevice(SimEngineDevice):
    """A simulated device whose arrays are torch tensors."""

    name = "meta"

    def tensor(
        self, buffer: SimMemory, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0
    ) -> SimTensor:
        return SimTensor(self, buffer, to_torch(np.ndarray(shape, dtype, buffer.contents, offset)))

    def cut(self, tensor: DeviceArray, start: int, stop: int) -> SimTensor:
        return SimTensor(self, tensor.memory, to_torch(tensor._array[start:stop]))

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if not isinstance(value, SimTensor):
            return None
        return tuple(value.shape), NUMPY[value.dtype], True

    # ---- for tests -------------------------------------------------------------------------------
    @contextlib.contextmanager
    def factories(self) -> Iterator[None]:
        """Create tensors of this device for tensors that are created on ``meta`` or moved there."""
        with _Factories(self), _Literals():
            yield

    def host(self, value: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor once the current stream has done its work so far."""
        if not isinstance(value, SimTensor):
            return value.detach().clone()
        self._finish()
        return value.raw.clone()

    # ---- torch -----------------------------------------------------------------------------------
    def _do(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an operation of torch, or queue it in the current stream.

        Streams may advance during the operation. Workers may not, because a function that they call
        would run inside the operation, where torch's modes are off.
        """
        was_inside = self._are_workers_late
        self._are_workers_late = True
        try:
            return self._done_or_queued(func, args, kwargs)
        finally:
            self._are_workers_late = was_inside

    def _done_or_queued(self, func: Any, args: Any, kwargs: Any) -> Any:
        operation = _Operation(func, args, kwargs)
        if operation.schema.is_view:
            leaves = tree_iter((args, kwargs))
            memory = next(leaf.memory for leaf in leaves if isinstance(leaf, SimTensor))
            return tree_map(lambda raw: SimTensor(self, memory, raw), operation.call()())
        if operation.is_in_place:
            self._current._enqueue(operation.call())
            return operation.aliased()
        if (expected := operation.result_shapes()) is not None:
            return self._later(operation.call(), *expected)
        self._finish()
        result = operation.call(snapshot=False)()
        if operation.written:
            return operation.aliased()
        return result if kwargs.get("device") == _CPU else tree_map(self._moved, result)

    def _later(
        self, call: Callable[[], Any], expected: Sequence[torch.Tensor], spec: TreeSpec
    ) -> Any:
        """Queue an operation that makes new tensors; return these tensors."""
        made = [self._made(tensor) for tensor in expected]
        # Queued work does not keep the memory, which may be reused before the stream reaches it.
        targets = [tensor.raw for tensor in made]

        def run() -> None:
            for target, value in zip(targets, tree_leaves(call()), strict=True):
                assert target.shape == value.shape
                target.copy_(value)

        self._current._enqueue(run)
        return tree_unflatten(made, spec)

    def _made(self, like: torch.Tensor) -> SimTensor:
        return self.tensor(
            self.empty(like.numel() * like.element_size(), self._current),
            tuple(like.shape),
            NUMPY[like.dtype],
        )

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise NotImplementedError(f"a {value.layout} tensor on a simulated device")
        made = self._made(value)
        made.raw.copy_(value)
        return made

    def _finish(self) -> None:
        # This calls no ``sync`` that may be ignored, because the program waits and not pinfeed.
        self._force(self._current.record())


class _Schema:
    """The facts that the schema of an operation states."""

    def __init__(self, func: Any) -> None:
        slots = func._schema.arguments
        results = [result.alias_info for result in func._schema.returns]
        self.written = [
            (i, slot.name)
            for i, slot in enumerate(slots)
            if slot.alias_info is not None and slot.alias_info.is_write
        ]
        """Numbers and names of the arguments that it changes."""
        names = [alias.before_set for alias in results if alias is not None]
        self.returned = [
            (i, slot.name)
            for name in names
            for i, slot in enumerate(slots)
            if slot.alias_info is not None and slot.alias_info.before_set == name
        ]
        """Numbers and names of the arguments that it returns."""
        self.is_view = not self.written and bool(names)
        """Whether it returns views of its arguments and changes none."""
        self.makes_none = len(names) == len(results)
        """Whether all that it returns are arguments."""
        self.returns_nothing = not results
        self.draws = torch.Tag.nondeterministic_seeded in func.tags


_schema_of = functools.cache(_Schema)


class _Operation:
    """An operation of torch with its arguments."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.schema = _schema_of(func)
        self.written = [self._argument(*place) for place in self.schema.written]

    @property
    def is_in_place(self) -> bool:
        """Whether it changes or checks tensors of the device and makes none."""
        schema = self.schema
        if schema.draws or not schema.makes_none:
            return False
        tensors = [leaf for leaf in tree_leaves(self.written) if isinstance(leaf, torch.Tensor)]
        on_device = all(isinstance(leaf, SimTensor) for leaf in tensors)
        return on_device and bool(tensors or schema.returns_nothing)

    def call(self, *, snapshot: bool = True) -> Callable[[], Any]:
        """Return a function that executes the operation.

        The function does not keep the memory of the device's tensors.

        Args:
            snapshot: Copy host tensors, so that later changes of them do not matter.
        """
        args = _raw(self.args, snapshot)
        kwargs = {name: _raw(value, snapshot) for name, value in self.kwargs.items()}
        return functools.partial(self.func, *args, **kwargs)

    def aliased(self) -> Any:
        """Return the arguments that the operation returns."""
        found = [self._argument(*place) for place in self.schema.returned]
        return found[0] if len(found) == 1 else tuple(found) or None

    def result_shapes(self) -> tuple[list[torch.Tensor], TreeSpec] | None:
        """Return tensors without values that have the shapes and dtypes of the results.

        Returns:
            None if the shapes depend on values.
        """
        if self.written or self.schema.draws or self.kwargs.get("device") == _CPU:
            return None
        if self.func._overloadpacket is torch.ops.aten._embedding_bag:
            # Without values, torch gives other shapes than those on the CPU.
            return None
        kwargs = tuple((name, _described(value)) for name, value in self.kwargs.items())
        return _result_shapes(self.func, _described(self.args), kwargs, torch.get_default_dtype())

    def _argument(self, i: int, name: str) -> Any:
        return self.args[i] if i < len(self.args) else self.kwargs.get(name)


class _Described(NamedTuple):
    """An argument that is a tensor, without its values; or another argument, with its type.

    Equal numbers of two types, such as 1 and 1.0, give results of two dtypes.
    """

    kind: type
    value: Any


# torch computes shapes in Python, and a training loop repeats its operations.
@functools.lru_cache(maxsize=10_000)
def _result_shapes(
    func: Any, args: _Described, kwargs: tuple[tuple[str, _Described], ...], _: torch.dtype
) -> tuple[list[torch.Tensor], TreeSpec] | None:
    try:
        found, spec = tree_flatten(
            func(*_shaped(args), **{name: _shaped(value) for name, value in kwargs})
        )
    except (NotImplementedError, RuntimeError, TypeError):
        # torch raises any of these if it needs values. A real mistake is raised again with values.
        return None
    plain = all(map(is_dense, found))
    return (found, spec) if found and plain else None


def _raw(value: Any, snapshot: bool) -> Any:
    if isinstance(value, SimTensor):
        return value.raw
    if isinstance(value, torch.Tensor):
        return value.clone() if snapshot else value
    if isinstance(value, list | tuple):
        return [_raw(one, snapshot) for one in value]
    return _CPU if value == META else value


def _described(value: Any) -> _Described:
    if isinstance(value, torch.Tensor):
        return _Described(torch.Tensor, (value.shape, value.stride(), value.dtype))
    if isinstance(value, list | tuple):
        return _Described(list, tuple(map(_described, value)))
    return _Described(type(value), value)


def _shaped(described: _Described) -> Any:
    """Return an argument with tensors without values in place of tensors."""
    kind, value = described
    if kind is torch.Tensor:
        shape, stride, dtype = value
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)
    return list(map(_shaped, value)) if kind is list else value
