"""SimDevice: an asynchronous device without hardware, that runs work as late, or in as bad an order, as streams and events allow.

One adversary decides all that may happen at the same time on a real machine: which stream advances,
and when a worker does its next task. Everything runs in the caller's thread, so a run is a function
of the adversary, and a failing one can be replayed.

As on a GPU, work in a stream reads and writes memory when it runs, and holds no reference to it.
Freed device memory goes back to the stream that it was allocated for and is handed out again at
once, queued work or not, as torch's caching allocator does; who ordered his streams wrongly finds
his data overwritten. Host memory that is freed while queued work needs it is an error.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows
from pinfeed.stores.base import HostArray, Store
from pinfeed.threads.call import Call

Array = npt.NDArray[Any]
Choose = Callable[[Sequence[str]], "str | None"]
"""Of the actors that can advance, the one that does; None for nobody."""
Site = tuple[str, int]
"""File and line of a call."""

_POISON = 0x5B


def lazy(ready: Sequence[str]) -> str | None:
    """Everything as late as possible."""
    return None


def favour(*names: str) -> Choose:
    """The named actors at once, all others as late as possible."""
    return lambda ready: next((name for name in ready if name in names), None)


class SimMemory:
    """A piece of device memory; free when nobody holds it any more."""

    def __init__(self, contents: npt.NDArray[np.uint8], stream: SimStream) -> None:
        self.contents = contents
        self.stream = stream
        self.shared: set[SimStream] = set()
        weakref.finalize(
            self, stream.device._free_memory, contents, stream, self.shared
        ).atexit = False


class DeviceArray:
    """An array on the device. The host cannot read it; work in a stream can."""

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
        assert self.passed, "the stream has not come to the event"
        return self._at_s

    def _pass(self) -> None:
        self.passed, self._at_s = True, self._stream.device.now()


class SimStream:
    """A queue of closures."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self.device = device
        self.name = name
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
        """How work in this stream finds the array when it runs."""
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
    """A call that is made when the adversary says so, or when its result is asked for."""

    def __init__(self, worker: SimWorker, fn: Callable[..., Any], *args: Any) -> None:
        super().__init__(fn, *args)
        self._worker = worker

    def done(self) -> bool:
        self._worker._device._turn()
        return super().done()

    def _wait(self) -> None:
        while not super().done():
            self._worker._advance()


class SimWorker:
    """Threads, simulated: with several of them, a call may be made while another one calls the device."""

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
        return bool(self._calls) and self._n_idle > 0

    def _advance(self) -> None:
        call = self._calls.popleft()
        self._n_idle -= 1
        try:
            call.run()
        finally:
            self._n_idle += 1


class SimDevice:
    """A device whose schedule is ``choose``.

    Args:
        choose: The adversary; asked whenever the host calls the device.
        direct: Whether the device reads and writes the rows of stores itself, when its streams come
            to it.
        duplex: Whether rows come and go in two streams.
        deaf_to: A call site of ``wait`` or ``sync`` that is ignored.
        now: The clock.

    Attributes:
        names: What was done under a name, in order.
        sites: Call sites of ``wait`` and ``sync`` so far.
        peak_bytes: Most device memory that was allocated at a time.
    """

    name = "sim"
    unified = False

    def __init__(
        self,
        choose: Choose = lazy,
        *,
        direct: bool = False,
        duplex: bool = True,
        deaf_to: Site | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.now = now
        self.names = list[str]()
        self._choose = choose
        self._direct = direct
        self._duplex = duplex
        self._deaf_to = deaf_to
        self._actors: dict[str, SimStream | SimWorker] = {}
        self._turning = False
        self._free: dict[tuple[str, int], list[npt.NDArray[np.uint8]]] = {}
        self._pinned: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
        self._compute = self.stream("compute")
        self._current = self._compute
        self.sites: set[Site] = set()
        self.allocated_bytes = self.peak_bytes = 0

    # ---- Device ----------------------------------------------------------------------------------
    def stream(self, name: str) -> SimStream:
        if name == "write" and not self._duplex:
            name = "read"
        stream = self._actors.setdefault(name, SimStream(self, name))
        assert isinstance(stream, SimStream)
        return stream

    def current_stream(self) -> SimStream:
        return self._current

    def worker(self, name: str, n_threads: int = 1) -> Any:
        self._actors[name] = worker = SimWorker(self, n_threads)
        return worker

    def empty(self, nbytes: int, stream: SimStream) -> SimMemory:
        spare = self._free.get((stream.name, nbytes))
        contents = spare.pop() if spare else np.full(nbytes, _POISON, np.uint8)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return SimMemory(contents, stream)

    def tensor(
        self, buffer: SimMemory, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> DeviceArray:
        return DeviceArray(buffer, np.ndarray(shape, dtype, buffer.contents))

    def cut(self, tensor: DeviceArray, start: int, stop: int) -> DeviceArray:
        return DeviceArray(tensor.memory, tensor._array[start:stop])

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        array = np.full(nbytes, _POISON, np.uint8)
        self._pinned[id(array)] = array
        return array

    def copy(self, src: Any, dst: Any, stream: SimStream) -> None:
        for host in (x for x in (src, dst) if isinstance(x, np.ndarray)):
            assert any(np.shares_memory(host, p) for p in self._pinned.values()), (
                "asynchronous copy of pageable memory"
            )
        source, target = stream._reach(src), stream._reach(dst)
        stream._enqueue(lambda: np.copyto(target(), source()))

    def copy_rows(
        self, src: DeviceArray, src_pos: Rows, dst: DeviceArray, dst_pos: Rows, stream: SimStream
    ) -> None:
        source, target = stream._reach(src), stream._reach(dst)
        stream._enqueue(lambda: target().__setitem__(dst_pos, source()[src_pos]))

    def adopt(self, part: HostArray, stream: Any) -> Any:
        return None

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        return ""

    def reaches(self, source: HostArray | Store) -> bool:
        return self._direct

    def read(
        self, parts: Sequence[tuple[HostArray, DeviceArray]], stream: SimStream
    ) -> Iterator[None]:
        for part, dst in parts:
            stream._enqueue(_reading(part, stream._reach(dst)))
            yield

    def write(
        self, values: Sequence[tuple[Store, DeviceArray]], rows: Rows, stream: SimStream
    ) -> None:
        for store, array in values:
            stream._enqueue(_writing(store, rows, stream._reach(array)))

    def share(self, tensor: DeviceArray, stream: SimStream) -> None:
        if stream is not tensor.memory.stream:
            tensor.memory.shared.add(stream)

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        return (value.shape, value.dtype, True) if isinstance(value, DeviceArray) else None

    def named(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.names.append(name)
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return 1 << 30

    def close(self) -> None:
        """Nothing is spare."""

    # ---- for tests -------------------------------------------------------------------------------
    def switch(self, name: str) -> None:
        """The consumer's work goes to another stream from now on, in no order with what it has queued so far."""
        self._current = self.stream(name)

    def launch(self, kernel: Callable[..., object], *arrays: DeviceArray) -> None:
        """What a user's model does: run ``kernel`` on the arrays in the current stream."""
        reach = [self._current._reach(array) for array in arrays]
        self._current._enqueue(lambda: kernel(*(r() for r in reach)))

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """A new array of the user's."""
        wanted = np.dtype(dtype)
        return self.tensor(
            self.empty(int(np.prod(shape)) * wanted.itemsize, self._current), shape, wanted
        )

    def drain(self) -> None:
        """Run all that is left, as the end of the program does."""
        while ready := [actor for actor in self._actors.values() if actor._ready]:
            ready[0]._advance()

    # ---- scheduling ------------------------------------------------------------------------------
    def _turn(self) -> None:
        """The host called the device: the adversary advances whom it likes."""
        if self._turning:
            return
        self._turning = True
        try:
            while name := self._choose(
                [name for name, actor in self._actors.items() if actor._ready]
            ):
                self._actors[name]._advance()
        finally:
            self._turning = False

    def _force(self, event: SimEvent) -> None:
        """The host waits for ``event``: run what it depends on and nothing more."""
        self._turn()
        while not event.passed:
            after = event._stream._work[0][1]
            if after is not None and not after.passed:
                # The adversary may have advanced this stream too, meanwhile.
                self._force(after)
            else:
                event._stream._advance()

    def _ignored(self) -> bool:
        frame = sys._getframe(2)
        site = (frame.f_code.co_filename, frame.f_lineno)
        self.sites.add(site)
        return site == self._deaf_to

    def _free_memory(
        self, contents: npt.NDArray[np.uint8], stream: SimStream, shared: set[SimStream]
    ) -> None:
        """Hand the memory out again, once the other streams that use it have done what they were given so far."""
        self.allocated_bytes -= len(contents)
        if not shared:
            self._free.setdefault((stream.name, len(contents)), []).append(contents)
        else:
            other = shared.pop()
            other._work.append((lambda: self._free_memory(contents, stream, shared), None))
            self.allocated_bytes += len(contents)


def _reading(part: HostArray, target: Callable[[], Array]) -> Callable[[], object]:
    return lambda: [None for _ in part.read(target())]


def _writing(store: Store, rows: Rows, source: Callable[[], Array]) -> Callable[[], object]:
    return lambda: store.scatter(rows, source())
