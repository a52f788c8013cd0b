"""HostDevice: the CPU as a device.

Work in a stream is done when it is queued; batches are gathered where they are lent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.devices.base import Array, HostArray
from pinfeed.memory.buffer_pool import BufferPool
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.mapping import Bytes
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import put_rows
from pinfeed.stores.base import Store
from pinfeed.tensors.numpy_torch import NUMPY, memory_of, to_numpy, to_torch
from pinfeed.threads.pool import ThreadPool


class HostEvent:
    """Past as soon as it is recorded.

    Args:
        at_s: When that was, if anybody wants to know.
    """

    def __init__(self, at_s: float | None = None) -> None:
        self._at_s = at_s

    def sync(self) -> None:
        """Nothing is under way."""

    def is_done(self) -> bool:
        return True

    def at_s(self) -> float:
        assert self._at_s is not None
        return self._at_s


class HostStream:
    """Work done at once by whoever queues it."""

    _event = HostEvent()

    def record(self, *, timed: bool = False) -> HostEvent:
        return HostEvent(time.perf_counter()) if timed else self._event

    def wait(self, event: Any) -> None:
        """Every event is past."""


class HostDevice:
    """The CPU.

    Args:
        n_spare: Free batch buffers kept for reuse.
    """

    name = "cpu"
    unified = True
    _stream = HostStream()

    def __init__(self, *, n_spare: int = 4) -> None:
        self._pool = BufferPool(n_spare)

    def stream(self, name: str) -> HostStream:
        return self._stream

    def current_stream(self) -> HostStream:
        return self._stream

    def worker(self, name: str, n_threads: int = 1) -> ThreadPool:
        return ThreadPool(n_threads, name)

    def empty(self, nbytes: int, stream: Any) -> Bytes:
        return self._pool.take(nbytes)

    def tensor(self, buffer: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        return to_torch(np.ndarray(shape, dtype, buffer))

    def cut(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        # Not a view of it: what the user does to one batch in place, autograd need not know of
        # another. And by numpy, which keeps the interpreter's lock over such a trifle: torch gives
        # it away, and waits for it.
        return to_torch(memory_of(tensor)[start:stop])

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._pool.take(nbytes)

    def copy(self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: Any) -> None:
        target, source = (
            x.detach() if isinstance(x, torch.Tensor) else to_torch(x) for x in (dst, src)
        )
        target.copy_(source)

    def copy_rows(
        self, src: torch.Tensor, src_pos: Rows, dst: torch.Tensor, dst_pos: Rows, stream: Any
    ) -> None:
        # By numpy, which has every dtype; torch does not index uint16.
        put_rows(
            to_numpy(dst, "batch"),
            dst_pos,
            np.take(to_numpy(src, "values"), src_pos, axis=0, mode="clip"),
        )

    def adopt(self, part: HostArray, stream: Any) -> Any:
        value = getattr(part, "host_value", None)
        # Itself, if it is there: a leaf of a loader's batch is the user's already.
        return None if value is None else value.to("cpu")

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        # A batch is gathered where it is lent.
        return ""

    def reaches(self, source: HostArray | Store) -> bool:
        return True

    def read(self, parts: Sequence[tuple[HostArray, torch.Tensor]], stream: Any) -> Iterator[None]:
        for part, dst in parts:
            yield from part.read(memory_of(dst))

    def write(self, values: Sequence[tuple[Store, torch.Tensor]], rows: Rows, stream: Any) -> None:
        for store, tensor in values:
            store.scatter(rows, to_numpy(tensor, "values"))

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        """There is one stream."""

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.is_nested
        ):
            return None
        return tuple(value.shape), NUMPY.get(value.dtype), value.device.type == "cpu"

    def named(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return free_host_bytes()

    def close(self) -> None:
        self._pool.close()
