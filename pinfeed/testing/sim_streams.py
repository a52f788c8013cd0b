"""The parts of the simulated device: memory, arrays, events, streams and worker threads."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pinfeed.stores.store import Array
from pinfeed.threads.call import Call

if TYPE_CHECKING:
    from pinfeed.testing.sim import SimDevice


class SimMemory:
    """A piece of device memory, which is freed when nothing refers to it any more."""

    def __init__(self, block: npt.NDArray[np.uint8], nbytes: int, stream: SimStream) -> None:
        self.contents = block[:nbytes]
        self.stream = stream
        self.shared: set[SimStream] = set()
        weakref.finalize(
            self, stream.device._free_memory, block, nbytes, stream, self.shared
        ).atexit = False


class DeviceArray:
    """An array on the device, which work in a stream can read and the host cannot."""

    def __init__(self, memory: SimMemory, array: Array) -> None:
        self.memory = memory
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __getitem__(self, key: slice) -> DeviceArray:
        return DeviceArray(self.memory, self._array[key])


class SimEvent:
    """A point in a stream."""

    def __init__(self, stream: SimStream, timed: bool) -> None:
        self._stream = stream
        self._timed = timed
        self._at_s = 0.0
        self.passed = False

    def sync(self) -> None:
        if not self._stream.device._ignored():
            self._stream.device._force(self)

    def is_done(self) -> bool:
        return self.passed

    def at_s(self) -> float:
        assert self._timed, "the event is not timed"
        assert self.passed, "the stream has not reached the event"
        return self._at_s

    def _pass(self) -> None:
        self.passed = True
        self._at_s = self._stream.device.now()


class SimStream:
    """A queue of functions, each of which may have to wait for an event."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.handle = id(self)
        self._work: deque[tuple[Callable[[], object], SimEvent | None]] = deque()

    def record(self, *, timed: bool = False) -> SimEvent:
        event = SimEvent(self, timed)
        self._enqueue(event._pass)
        return event

    def wait(self, event: SimEvent) -> None:
        if not self.device._ignored():
            self._enqueue(lambda: None, after=event)

    def _enqueue(self, run: Callable[[], object], after: SimEvent | None = None) -> None:
        self._work.append((run, after))
        self.device._turn()

    def _reach(self, array: DeviceArray | Array) -> Callable[[], Array]:
        """Return a function by which work in this stream finds the array when it runs.

        Queued work holds no reference to host memory, as on a GPU.
        """
        if isinstance(array, DeviceArray):
            contents = array._array
            return lambda: contents
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        owner = weakref.ref(base)
        address = array.ctypes.data
        shape = array.shape
        dtype = array.dtype
        strides = array.strides
        del array, base

        def reach() -> Array:
            root = owner()
            assert root is not None, f"stream {self.name!r} uses freed host memory"
            return np.ndarray(shape, dtype, root, address - root.ctypes.data, strides)

        return reach

    @property
    def _ready(self) -> bool:
        return bool(self._work) and (self._work[0][1] is None or self._work[0][1].passed)

    def _advance(self) -> None:
        self._work.popleft()[0]()


class SimCall(Call[Any]):
    """A call that is made when the adversary decides, or when its result is asked for."""

    def __init__(self, worker: SimWorker, fn: Callable[..., Any], *args: Any) -> None:
        super().__init__(fn, *args)
        self._worker = worker
        # Calls among the arguments, which this one may wait for.
        self._awaited = list(_calls_in(args))

    @property
    def _is_possible(self) -> bool:
        """Whether this call waits for none that is being made further up in this thread."""
        return all(call._done or call._worker._n_idle for call in self._awaited)

    def done(self) -> bool:
        self._worker._device._turn()
        return super().done()

    def _wait(self) -> None:
        while not super().done():
            self._worker._advance()


class SimWorker:
    """Simulated threads; with several, a call may be made while another one calls the device."""

    def __init__(self, device: SimDevice, n_threads: int) -> None:
        self._device = device
        self._n_idle = n_threads
        self._calls: deque[SimCall] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> SimCall:
        call = SimCall(self, fn, *args)
        self._calls.append(call)
        self._device._turn()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self._calls:
            if cancel_futures:
                self._calls.popleft().fail(CancelledError())
            else:
                self._advance()

    @property
    def _ready(self) -> bool:
        return bool(self._calls) and self._n_idle > 0 and self._calls[0]._is_possible

    def _advance(self) -> None:
        call = self._calls.popleft()
        self._n_idle -= 1
        try:
            call.run()
        finally:
            self._n_idle += 1


def _calls_in(values: Iterable[Any]) -> Iterator[SimCall]:
    """Yield the calls among some values, and in tuples of them."""
    for value in values:
        if isinstance(value, SimCall):
            yield value
        elif isinstance(value, tuple):
            yield from _calls_in(value)
