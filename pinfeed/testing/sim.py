"""SimDevice: a simulated asynchronous device that runs work in the worst order allowed.

The device needs no hardware. It runs work as late, or in as bad an order, as streams and events
allow. A function, the adversary, decides which stream advances, and when a worker thread does its
next task. Everything runs in the caller's thread, so a run is a function of the adversary, and a
failing run can be replayed.

As on a GPU, work in a stream reads and writes memory when it runs, and holds no reference to it.
Freed device memory returns to the stream that it was allocated for. As in torch's caching
allocator, it is reused at once, for as many bytes or fewer, even before queued work has run. A
program that orders its streams wrongly finds its data overwritten. Host memory that is freed while
queued work needs it is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.batch_copies import SingleCalls
from pinfeed.devices.device import RowCopy, RowPairs, TensorRange
from pinfeed.devices.layout import RowLayout, tensors_in_blocks
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.store import Array, Store, run_of
from pinfeed.testing.sim_streams import DeviceArray, SimEvent, SimMemory, SimStream, SimWorker

Choose = Callable[[Sequence[str]], "str | None"]
"""Returns the next of the named streams and workers that can advance; None for none of them."""
Site = tuple[str, int]
"""File and line of a call."""

_POISON = 0x5B


def lazy(ready: Sequence[str]) -> str | None:
    """Advance nothing, so that everything happens as late as possible."""
    return None


def favour(*names: str) -> Choose:
    """Return an adversary that advances the named streams and workers at once, others late."""
    return lambda ready: next((name for name in ready if name in names), None)


class SimDevice(SingleCalls):
    """A simulated asynchronous device; a function chooses the order of its work.

    Args:
        choose: The adversary. Whenever the host calls the device, the device calls it with the
            names of the streams and workers that can advance; it returns one name, or None.
        direct: Whether the device itself reads and writes the rows of stores, when its streams
            reach that work.
        deaf_to: File and line of a call of ``wait`` or ``sync`` to ignore, to prove that a test
            notices a missing wait. None ignores no call.
        now: Function that returns the time in seconds.

    Attributes:
        names: The names under which work was done, in order.
        sites: File and line of each call of ``wait`` and ``sync`` so far, as in ``deaf_to``.
        allocated_bytes: Allocated device memory.
        peak_bytes: Peak of the allocated device memory.

    Examples:
        >>> from pinfeed.testing.sim import SimDevice
        >>> device = SimDevice()
        >>> totals = []
        >>> with pinfeed.Feeder(np.arange(6), batch_size=2, device=device) as feeder:
        ...     for batch in feeder:  # the training step below runs late, as on a GPU
        ...         device.launch(lambda values: totals.append(int(values.sum())), batch)
        >>> device.drain()
        >>> totals
        [1, 5, 9]
    """

    # It is one class because it implements the whole protocol of a device.

    name = "sim"
    unified = False
    engine_driver: Any = None

    def __init__(
        self,
        choose: Choose = lazy,
        *,
        direct: bool = False,
        deaf_to: Site | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.now = now
        self.names = list[str]()
        self._choose = choose
        self._direct = direct
        self._deaf_to = deaf_to
        self._actors: dict[str, Any] = {}
        self._turning = False
        # Whether workers wait for an operation of the host to end.
        self._are_workers_late = False
        self._free: dict[str, list[npt.NDArray[np.uint8]]] = {}
        # Page-locked arrays by their addresses and identities.
        self._pinned: weakref.WeakValueDictionary[tuple[int, int], Array] = (
            weakref.WeakValueDictionary()
        )
        self._compute = self.stream("compute")
        self._current = self._compute
        self.sites: set[Site] = set()
        self.allocated_bytes = 0
        self.peak_bytes = 0

    # ---- the Device protocol ---------------------------------------------------------------------
    def stream(self, name: str) -> SimStream:
        stream = self._actors.setdefault(name, SimStream(self, name))
        assert isinstance(stream, SimStream)
        return stream

    def current_stream(self) -> SimStream:
        return self._current

    @contextlib.contextmanager
    def in_stream(self, stream: SimStream) -> Iterator[None]:
        before = self._current
        self._current = stream
        try:
            yield
        finally:
            self._current = before

    def worker(self, name: str, n_threads: int = 1) -> Any:
        worker = SimWorker(self, n_threads)
        self._actors[name] = worker
        return worker

    def empty(self, nbytes: int, stream: SimStream) -> SimMemory:
        spare = self._free.setdefault(stream.name, [])
        # The smallest block that is large enough, and of these the one that was freed last.
        fitting = [i for i, block in enumerate(spare) if len(block) >= nbytes]
        best = min(fitting, key=lambda i: (len(spare[i]), -i), default=None)
        block = np.full(nbytes, _POISON, np.uint8) if best is None else spare.pop(best)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return SimMemory(block, nbytes, stream)

    def empty_parts(
        self, layout: RowLayout, stream: Any
    ) -> tuple[list[DeviceArray], list[DeviceArray]]:
        return tensors_in_blocks(self, layout, stream)

    def address(self, tensor: DeviceArray) -> int:
        address: int = tensor._array.ctypes.data
        return address

    def tensor(
        self, buffer: SimMemory, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0
    ) -> DeviceArray:
        return DeviceArray(buffer, np.ndarray(shape, dtype, buffer.contents, offset))

    def cut(self, tensor: DeviceArray, start: int, stop: int) -> DeviceArray:
        return DeviceArray(tensor.memory, tensor._array[start:stop])

    def split(self, tensor: DeviceArray, sizes: Sequence[int]) -> list[DeviceArray]:
        ends = list(itertools.accumulate(sizes))
        return [self.cut(tensor, end - n, end) for n, end in zip(sizes, ends, strict=True)]

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        array = np.full(nbytes, _POISON, np.uint8)
        self._pin(array)
        return array

    def copy(self, src: Any, dst: Any, stream: SimStream) -> None:
        for host in (x for x in (src, dst) if isinstance(x, np.ndarray) and x.size):
            assert any(np.shares_memory(host, p) for p in self._pinned.values()), (
                "asynchronous copy of pageable memory"
            )
        source = stream._reach(src)
        target = stream._reach(dst)
        stream._enqueue(lambda: np.copyto(target(), source()))

    def copy_rows(self, copies: Sequence[RowCopy], stream: SimStream) -> None:
        reached = [
            [None if one is None else _reached(stream, one) for one in copy] for copy in copies
        ]

        def launch() -> None:
            found = [[None if at is None else at() for at in copy] for copy in reached]
            # All rows are read before any is written, and copies of a launch run in the reverse
            # order, so a copy that depends on another one gives wrong rows.
            values = [_rows_of(source, taken) for source, _, taken, _ in found]
            for (_, target, _, into), rows in reversed(list(zip(found, values, strict=True))):
                _put_rows(target, into, rows)

        stream._enqueue(launch)

    def adopts(self, part: UnreadPart) -> bool:
        return False

    def adopt(self, part: UnreadPart, stream: Any) -> Any:
        raise AssertionError("no value is adopted")

    def choose_route(self, stores: Sequence[Store], wanted: str | None, default: str) -> str:
        return ""

    def reaches(self, source: UnreadPart | Store) -> bool:
        return self._direct

    def index_dtype(self, stores: Sequence[Store], rows: Rows) -> np.dtype[Any] | None:
        # As on a GPU, consecutive rows need none, nor do no rows.
        return None if not len(rows) or run_of(rows) is not None else np.dtype(np.int32)

    def read(
        self,
        parts: Sequence[tuple[UnreadPart, DeviceArray]],
        stream: SimStream,
        indices: DeviceArray | RowPairs | None = None,
    ) -> None:
        numbers = None if indices is None else _reached(stream, indices)
        is_paired = isinstance(indices, RowPairs)
        for part, dst in parts:
            stream._enqueue(_reading(part, stream._reach(dst), numbers, is_paired=is_paired))

    def write(
        self,
        values: Sequence[tuple[Store, DeviceArray]],
        rows: Rows,
        stream: SimStream,
        indices: DeviceArray | None = None,
    ) -> None:
        numbers = (lambda: rows) if indices is None else stream._reach(indices)
        for store, array in values:
            stream._enqueue(_writing(store, numbers, stream._reach(array)))

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
        """Do nothing: the device keeps no resources."""

    # ---- for tests -------------------------------------------------------------------------------
    def switch(self, name: str) -> None:
        """Queue the training step's later work in another stream, unordered with earlier work."""
        self._current = self.stream(name)

    def launch(self, kernel: Callable[..., object], *arrays: DeviceArray) -> None:
        """Queue ``kernel(*arrays)`` in the current stream, as a user's model does."""
        reach = [self._current._reach(array) for array in arrays]
        self._current._enqueue(lambda: kernel(*(r() for r in reach)))

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Allocate an array, as a user's model does."""
        wanted = np.dtype(dtype)
        return self.tensor(
            self.empty(math.prod(shape) * wanted.itemsize, self._current), shape, wanted
        )

    def drain(self) -> None:
        """Run all queued work and calls."""
        while ready := [actor for actor in self._actors.values() if actor._ready]:
            ready[0]._advance()

    # ---- scheduling ------------------------------------------------------------------------------
    def _turn(self) -> None:
        """Let the adversary advance streams and workers, because the host called the device."""
        if self._turning:
            return
        self._turning = True
        try:
            while name := self._choose(self._ready_names()):
                self._actors[name]._advance()
        finally:
            self._turning = False

    def _ready_names(self) -> list[str]:
        """Return the names of the streams and workers that can advance."""
        return [
            name
            for name, actor in self._actors.items()
            if actor._ready and not (self._are_workers_late and isinstance(actor, SimWorker))
        ]

    def _force(self, event: SimEvent) -> None:
        """Run the work that ``event`` depends on and no other, because the host waits for it."""
        self._turn()
        while not event.passed:
            after = event._stream._work[0][1]
            if after is not None and not after.passed:
                # This lets the adversary advance the event's stream too, so look at it again.
                self._force(after)
            else:
                event._stream._advance()

    def _ignored(self) -> bool:
        """Return whether to ignore the ``wait`` or ``sync`` that calls this, by its call site."""
        frame = sys._getframe(2)
        site = (frame.f_code.co_filename, frame.f_lineno)
        self.sites.add(site)
        return site == self._deaf_to

    def _pin(self, array: Array) -> int:
        """Count an array as page-locked; return its address."""
        address: int = array.ctypes.data
        self._pinned[address, id(array)] = array
        return address

    def _free_memory(
        self, block: npt.NDArray[np.uint8], nbytes: int, stream: SimStream, shared: set[SimStream]
    ) -> None:
        """Reuse memory once the other streams that use it have done their work queued so far."""
        if shared:
            other = shared.pop()
            other._work.append((lambda: self._free_memory(block, nbytes, stream, shared), None))
            return
        self.allocated_bytes -= nbytes
        self._free[stream.name].append(block)


def _reached(stream: SimStream, numbers: Any) -> Callable[[], Array]:
    """Return a function that returns a tensor, or a range of one, when the stream runs."""
    if not isinstance(numbers, (TensorRange, RowPairs)):
        return stream._reach(numbers)
    tensor, begin, n = numbers
    reached = stream._reach(tensor)
    end = begin + (2 * n if isinstance(numbers, RowPairs) else n)
    return lambda: reached()[begin:end]


def _reading(
    part: Any, target: Callable[[], Array], numbers: Callable[[], Array] | None, *, is_paired: bool
) -> Callable[[], object]:
    """Return work that reads a part, or rows of its store by row indices on the device."""
    if numbers is None:
        return lambda: part.read(target())

    def read() -> None:
        rows, places = numbers(), None
        if is_paired:
            rows, places = rows[::2], rows[1::2]
        out = target()
        found = np.empty((len(rows), *out.shape[1:]), out.dtype)
        part.store.gather(_in_range(rows, part.store), found)
        _put_rows(out, places, found)

    return read


def _writing(
    store: Store, numbers: Callable[[], Array], source: Callable[[], Array]
) -> Callable[[], object]:
    return lambda: store.scatter(_in_range(numbers(), store), source())


def _in_range(numbers: Array, store: Any) -> Rows:
    """Return row indices in range; a GPU would not check indices that were overwritten."""
    found: Rows = numbers.astype(np.int64) % store.n_rows
    return found


def _rows_of(source: Any, taken: Any) -> Array:
    """Return a copy of rows; positions that were overwritten become others."""
    values: Array = source if taken is None else source[taken % max(1, len(source))]
    return values.copy()


def _put_rows(target: Any, into: Any, rows: Array) -> None:
    if into is None:
        target[:] = rows
    else:
        target[into % max(1, len(target))] = rows
