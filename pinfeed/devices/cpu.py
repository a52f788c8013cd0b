"""HostDevice: the CPU as a device.

Work is done when it is queued, and rows are gathered straight into the batch.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.devices.batch_copies import SingleCalls
from pinfeed.devices.device import RowCopy, RowPairs, TensorRange
from pinfeed.devices.layout import RowLayout, tensors_in_blocks
from pinfeed.errors import ArgumentError, DeviceError, logger
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.pages import BufferPool, Bytes, huge
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import UnreadPart, put_rows
from pinfeed.stores.store import Array, Store
from pinfeed.tensors.numpy_torch import NUMPY, is_dense, memory_of, plain, to_torch
from pinfeed.threads.pool import ThreadPool

# torch uses several threads for copies of more bytes.
_SMALL_NBYTES = 64 << 10


class HostEvent:
    """Event that is done as soon as it is recorded.

    Args:
        at_s: Time of the event in ``time.perf_counter()`` seconds; None if it is not timed.
    """

    def __init__(self, at_s: float | None = None) -> None:
        self._at_s = at_s

    def sync(self) -> None:
        """Return at once, because all work is done."""

    def is_done(self) -> bool:
        return True

    def at_s(self) -> float:
        assert self._at_s is not None
        return self._at_s


class HostStream:
    """Stream that does all work at once, in the thread that queues it."""

    handle = 0
    _event = HostEvent()

    def record(self, *, timed: bool = False) -> HostEvent:
        return HostEvent(time.perf_counter()) if timed else self._event

    def wait(self, event: Any) -> None:
        """Do nothing, because every event is done."""


class HostDevice(SingleCalls):
    """The CPU.

    Args:
        n_spare: Free batch buffers that are kept for reuse.
    """

    name = "cpu"
    unified = True
    engine_driver = None
    _stream = HostStream()
    wrap = staticmethod(to_torch)
    """Returns a tensor on the memory of an array."""
    from_numpy = staticmethod(torch.from_numpy)
    """Does the same for an array of any dtype of numpy's own."""

    def __init__(self, *, n_spare: int = 4) -> None:
        self._pool = BufferPool(n_spare, huge)

    def stream(self, name: str) -> HostStream:
        return self._stream

    def current_stream(self) -> HostStream:
        return self._stream

    def in_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def worker(self, name: str, n_threads: int = 1) -> ThreadPool:
        return ThreadPool(n_threads, name)

    def empty(self, nbytes: int, stream: Any) -> Bytes:
        return self._pool.take(nbytes)

    def empty_parts(
        self, layout: RowLayout, stream: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return tensors_in_blocks(self, layout, stream)

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def tensor(
        self, buffer: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0
    ) -> torch.Tensor:
        return to_torch(np.ndarray(shape, dtype, buffer, offset))

    def cut(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        # The result is not a view, because in-place operations on one batch must not affect
        # autograd in another batch. numpy creates it, because numpy keeps the interpreter's lock
        # for such a short call, while torch releases the lock and waits to get it back.
        return to_torch(memory_of(tensor)[start:stop])

    def split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        ends = list(itertools.accumulate(sizes))
        return [self.cut(tensor, end - n, end) for n, end in zip(sizes, ends, strict=True)]

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._pool.take(nbytes)

    def copy(self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: Any) -> None:
        if dst.nbytes <= _SMALL_NBYTES:
            # numpy keeps the interpreter's lock for such a short copy; torch would release it.
            np.copyto(_array_of(dst), _array_of(src))
            return
        source = src.detach() if isinstance(src, torch.Tensor) else to_torch(src)
        target = dst.detach() if isinstance(dst, torch.Tensor) else to_torch(dst)
        target.copy_(source)

    def copy_rows(self, copies: Sequence[RowCopy], stream: Any) -> None:
        # numpy supports every dtype; torch does not index uint16.
        for source, target, taken, into in copies:
            values, out = _array_of(source), _array_of(target)
            if into is None and taken is not None:
                values.take(_numbers(taken), axis=0, out=out, mode="clip")
                continue
            if taken is not None:
                values = values.take(_numbers(taken), axis=0, mode="clip")
            if into is None:
                np.copyto(out, values)
            else:
                put_rows(out, _numbers(into), values)

    def adopts(self, part: UnreadPart) -> bool:
        # This is asked for every part of every batch.
        if getattr(part, "host_value", None) is not None:
            return True
        return getattr(part, "own_array", None) is not None

    def adopt(self, part: Any, stream: Any) -> Any:
        value = getattr(part, "host_value", None)
        if value is None:
            return to_torch(part.own_array)
        # The caller owns a tensor on the CPU, so it is not copied. Calling ``to`` would release
        # the interpreter's lock.
        return value if type(value) is torch.Tensor and value.is_cpu else value.to("cpu")

    def choose_route(self, stores: Sequence[Store], wanted: str | None, default: str) -> str:
        # Only one route is possible: rows are gathered straight into the batch.
        if wanted is None:
            return ""
        note = f"route={wanted!r} has no effect, because batches are on the CPU"
        logger.warning("%s", note)
        return note

    def reaches(self, source: UnreadPart | Store) -> bool:
        return True

    def index_dtype(self, stores: Sequence[Store], rows: Rows) -> np.dtype[Any] | None:
        return None

    def read(
        self,
        parts: Sequence[tuple[UnreadPart, torch.Tensor]],
        stream: Any,
        indices: torch.Tensor | RowPairs | None = None,
    ) -> None:
        for part, dst in parts:
            part.read(memory_of(dst))

    def write(
        self,
        values: Sequence[tuple[Store, torch.Tensor]],
        rows: Rows,
        stream: Any,
        indices: torch.Tensor | None = None,
    ) -> None:
        for store, tensor in values:
            store.scatter(rows, _array_of(tensor))

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing, because there is only one stream."""

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if not is_dense(value):
            return None
        return tuple(value.shape), NUMPY.get(value.dtype), value.device.type == "cpu"

    def named(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return free_host_bytes()

    def close(self) -> None:
        self._pool.close()


def _array_of(values: torch.Tensor | Array) -> Array:
    """Return an array with the values of a dense tensor or an array, on its memory if possible."""
    if isinstance(values, np.ndarray):
        return values
    return memory_of(plain(values))


def _numbers(positions: TensorRange) -> npt.NDArray[Any]:
    return memory_of(positions.tensor)[positions.begin : positions.begin + positions.n]


class PlannedGpu(HostDevice):
    """Device for plans only, with its own memory, so that plans use the staged route.

    ``Feeder(..., device=PlannedGpu()).plan`` is the plan of a feeder on a machine with a GPU,
    created on a machine without one. The batches of the feeder would stay on the host. The plan
    stages the rows of page-locked tables, because only a GPU can read them.
    """

    name = "cuda"
    unified = False

    def choose_route(self, stores: Sequence[Store], wanted: str | None, default: str) -> str:
        if wanted == "direct":
            raise DeviceError(
                "route='direct': this machine has no GPU that could read the rows; leave route out"
            )
        return ""

    def reaches(self, source: UnreadPart | Store) -> bool:
        return False

    def free_bytes(self) -> int:
        raise ArgumentError(
            "free GPU memory is unknown without a GPU; give gpu_memory_limit (--gpu-limit)"
        )
