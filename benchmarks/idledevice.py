"""IdleDevice: a device that does no work, whose write-backs complete when the benchmark says so.

It fits the Device protocol of this and of earlier commits.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pinfeed.threads.pool import ThreadPool

_HELD = ("pinfeed-write", "pinfeed-scatter")
"""Names of the workers whose calls wait for ``IdleDevice.complete_writes``."""


class IdleDevice:
    """A device with its own memory, on which all work is done as soon as it is queued.

    No tensor has contents. The thread that makes the device is the training thread.

    Args:
        direct: Whether the device reads and writes the rows of stores itself.
    """

    name = "idle"
    unified = False

    def __init__(self, *, direct: bool = True) -> None:
        self._direct = direct
        self._stream = _Stream()
        self._training_thread = threading.get_ident()
        self._workers: list[_Workers] = []

    # ---- Device protocol -------------------------------------------------------------------------
    def stream(self, name: str) -> _Stream:
        return self._stream

    def current_stream(self) -> _Stream:
        return self._stream

    def worker(self, name: str, n_threads: int = 1) -> _Workers:
        held_from = self._training_thread if name in _HELD else None
        self._workers.append(_Workers(self, name, n_threads, held_from))
        return self._workers[-1]

    def empty(self, nbytes: int, stream: Any) -> int:
        return nbytes

    def tensor(
        self, buffer: int, shape: tuple[int, ...], dtype: np.dtype[Any], *offset: int, **_: int
    ) -> _Tensor:
        return _Tensor(shape, dtype)

    def cut(self, tensor: _Tensor, start: int, stop: int) -> _Tensor:
        return _Tensor((stop - start, *tensor.shape[1:]), tensor.dtype)

    def staging(self, nbytes: int) -> np.ndarray:
        # The kernel provides pages when they are touched, which a store without contents never
        # does. tracemalloc does not count a memory map.
        return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)

    def copy(self, *_: Any) -> None:
        pass

    def copy_rows(self, *_: Any) -> None:
        pass

    def adopt(self, part: Any, stream: Any) -> None:
        return None

    def choose_route(self, stores: Any, n_rows: int, wanted: str | None) -> str:
        return ""

    def reaches(self, source: Any) -> bool:
        return self._direct

    def index_dtype(self, stores: Any, rows: Any) -> np.dtype[Any] | None:
        return np.dtype(np.int32) if self._direct else None

    def read(self, *_: Any, **__: Any) -> Iterator[None]:
        return iter(())

    def write(self, *_: Any, **__: Any) -> None:
        pass

    def share(self, tensor: _Tensor, stream: Any) -> None:
        pass

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
        return value.shape, value.dtype, True

    def named(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return 1 << 40

    def close(self) -> None:
        self.complete_writes(0)

    # ---- for the benchmark -----------------------------------------------------------------------
    def complete_writes(self, n_pending: int) -> None:
        """Complete the oldest write-backs until ``n_pending`` remain, and fill all slots."""
        for workers in self._workers:
            workers.release(n_pending)
        # A call may submit calls to other workers.
        while busy := [workers for workers in self._workers if workers.is_busy]:
            for workers in busy:
                workers.wait_for_released()

    def complete_next_write(self) -> None:
        """Complete the oldest write-back (training thread)."""
        self.complete_writes(max(workers.n_held for workers in self._workers) - 1)


class _Stream:
    """A stream and its only event."""

    def record(self, *, timed: bool = False) -> _Stream:
        return self

    def wait(self, event: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


class _Tensor:
    """A tensor without contents."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype


class _Workers:
    """Threads that begin the training thread's calls when they are released.

    Calls of other threads begin at once: they are parts of calls that were released.

    Args:
        device: Device that releases the calls.
        name: Name of the worker.
        n_threads: Number of threads.
        held_from: Identifier of the thread whose calls are held; None holds no call.
    """

    def __init__(
        self, device: IdleDevice, name: str, n_threads: int, held_from: int | None
    ) -> None:
        self._device = device
        self._held_from = held_from
        self._pool = ThreadPool(n_threads, name)
        self._released = threading.Semaphore(0)
        self._held: deque[Any] = deque()
        self._begun: deque[Any] = deque()

    @property
    def n_held(self) -> int:
        return len(self._held)

    @property
    def is_busy(self) -> bool:
        return bool(self._begun)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        if threading.get_ident() != self._held_from:
            call = self._pool.submit(fn, *args)
            self._begun.append(call)
            return call
        held = _HeldCall(self, self._pool.submit(self._call, fn, *args))
        self._held.append(held)
        return held

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._released.acquire()
        return fn(*args)

    def release(self, n_held: int) -> None:
        """Let calls begin, in order, until ``n_held`` are held."""
        while len(self._held) > n_held:
            self._begun.append(self._held.popleft().call)
            self._released.release()

    def release_until(self, call: Any) -> None:
        """Release calls of all workers until ``call`` can end, for the thread that waits for it."""
        if threading.get_ident() == self._held_from:
            while any(held.call is call for held in self._held):
                self._device.complete_next_write()

    def wait_for_released(self) -> None:
        """Wait until all calls that could begin have ended."""
        while self._begun:
            self._begun.popleft().exception()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._device.complete_writes(0)
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


class _HeldCall:
    """A call that may be held. The training thread can wait for it, which releases it.

    Args:
        workers: Threads that make the call.
        call: The call.
    """

    def __init__(self, workers: _Workers, call: Any) -> None:
        self._workers = workers
        self.call = call

    def done(self) -> bool:
        return self.call.done()

    def exception(self) -> BaseException | None:
        self._workers.release_until(self.call)
        return self.call.exception()

    def result(self) -> Any:
        self._workers.release_until(self.call)
        return self.call.result()
