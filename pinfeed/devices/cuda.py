"""CudaDevice: the only file that knows CUDA streams. torch owns all device memory and all streams."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from ..blocks import REGISTER, Bytes, Pool, page_locked, unlock_freed
from ..config import ON_THEIR_WAY_BYTES
from ..errors import DeviceError
from ..rows import Rows
from ..stores.base import Store, row_nbytes
from ..stores.pinned import PinnedStore
from ..tensors import NUMPY, TORCH, to_torch
from .base import Array, Part
from .host import started
from .kernels import Move, RowKernels
from .tuning import STAGED, Rates, Route, decide, measure, remembered

_TYPICAL_ROWS = 4096
_N_BLOCKS = 8
_MAX_ROW_BYTES = 1 << 30  # the kernels count the words of a row in 32 bits
_COMPARE_S = 10.0  # the time between two events is 24 bits of milliseconds: of 10 seconds, a microsecond


class CudaEvent:
    """An event recorded once. The host sleeps, not spins, while it waits: a spinning reader would take a core from the loop.

    Args:
        stream: Where it is recorded.
        clock: Tells when it was passed; None for an event that is not timed.
    """

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock | None = None) -> None:
        self.raw, self._clock = torch.cuda.Event(enable_timing=clock is not None, blocking=True), clock
        self.raw.record(stream)

    def sync(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def at_s(self) -> float:
        assert self._clock is not None
        return self._clock.at_s(self.raw)


@dataclass(frozen=True)
class _Comparison:
    """The clocks of a GPU and of the host, at one event.

    Attributes:
        event: Passed when they were compared.
        host_s: Time of the host's clock then.
        told_s: Time that ``CudaClock`` tells for the event.
        rate: Seconds that ``CudaClock`` tells per second of the GPU's clock from there on.
    """

    event: torch.cuda.Event
    host_s: float
    told_s: float
    rate: float


class CudaClock:
    """Tells when events of one GPU were passed, by the host's clock.

    The two clocks drift apart by some ten microseconds per second, so they are compared again now and then. An error that a comparison
    finds is taken away over the time up to the next one: the time that is told never jumps, and spans do not overlap.

    Args:
        mark: Returns a timed event that has just been passed, and the time of ``time.perf_counter()`` then.
    """

    def __init__(self, mark: Callable[[], tuple[torch.cuda.Event, float]]) -> None:
        self._mark = mark
        event, now_s = mark()
        self._last = _Comparison(event, now_s, now_s, 1.0)

    def at_s(self, event: torch.cuda.Event) -> float:
        """Seconds of ``time.perf_counter()``; the event is timed and done. In any thread."""
        last = self._last
        if _seconds(last.event, event) > _COMPARE_S:
            self._last = last = self._compare(last)
        return last.told_s + _seconds(last.event, event) * last.rate

    def _compare(self, last: _Comparison) -> _Comparison:
        event, host_s = self._mark()
        elapsed_s = _seconds(last.event, event)
        told_s = last.told_s + elapsed_s * last.rate
        rate = (host_s - last.host_s) / elapsed_s + (host_s - told_s) / _COMPARE_S
        return _Comparison(event, host_s, told_s, rate)


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


class Segments:
    """The segments of memory that torch's allocator has reserved, and the stream that each belongs to.

    torch gives freed memory back to the stream that it was allocated for, and tells which one that is in its snapshot alone. A snapshot
    takes milliseconds, so one is taken only when an address is unknown, or segments have been given back to the driver since the last one.

    Args:
        snapshot: ``torch.cuda.memory_snapshot``.
        n_freed: Returns the number of segments that were given back to the driver so far.
    """

    def __init__(self, snapshot: Callable[[], Sequence[Mapping[str, Any]]], n_freed: Callable[[], int]) -> None:
        self._snapshot = snapshot
        self._n_freed = n_freed
        self._known: list[tuple[int, int, int]] = []
        self._n_freed_then = -1

    def stream_of(self, address: int) -> int | None:
        """The handle of the stream that the memory at an address belongs to; None if torch's allocator has no such memory."""
        n_freed = self._n_freed()
        if n_freed == self._n_freed_then and (found := self._find(address)) is not None:
            return found
        self._n_freed_then = n_freed
        segments = self._snapshot()
        self._known = sorted((segment["address"], segment["total_size"], segment["stream"]) for segment in segments)
        return self._find(address)

    def _find(self, address: int) -> int | None:
        i = bisect.bisect_right(self._known, address, key=operator.itemgetter(0)) - 1
        if i < 0:
            return None
        start, nbytes, stream = self._known[i]
        return stream if address < start + nbytes else None


class CudaStream:
    """A torch stream.

    Args:
        raw: The stream.
        device: Whose clock times its events.
    """

    def __init__(self, raw: torch.cuda.Stream, device: CudaDevice) -> None:
        self.raw, self._device = raw, device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def record(self, *, timed: bool = False) -> CudaEvent:
        return CudaEvent(self.raw, self._device.clock if timed else None)

    def wait(self, event: CudaEvent) -> None:
        self.raw.wait_event(event.raw)


class CudaDevice:
    """One CUDA GPU.

    Args:
        index: Its number; None for torch's current one.
        n_spare: Free staging buffers kept for reuse.
        priority: Of the side streams; -1, high: small kernels that move rows begin before more blocks of the model's do. 0 is that of the
            model.

    Raises:
        DeviceError: There is no such GPU, or torch cannot use it.
    """

    unified = False

    def __init__(self, index: int | None = None, *, n_spare: int = 4, priority: int = -1) -> None:
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
            raise DeviceError(f"device='cuda': torch {torch.__version__} ({built}) finds no usable GPU; expected one, or device='cpu'")
        index = torch.cuda.current_device() if index is None else index
        if index >= torch.cuda.device_count():
            raise DeviceError(f"device='cuda:{index}' does not exist; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
        self.name = f"cuda:{index}"
        self._device, self._index = torch.device("cuda", index), index
        self._staging = Pool(n_spare, self._page_locked)
        self.route = STAGED
        """How the rows of page-locked stores go: of all feeders on this device as the last one decided."""
        self._priority = priority
        self._side: torch.cuda.Stream | None = None

    def stream(self, name: str) -> CudaStream:
        if self.route.duplex or self._side is None:
            self._side = torch.cuda.Stream(self._device, self._priority)
        return CudaStream(self._side, self)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device), self)

    def worker(self, name: str, n_threads: int = 1) -> Executor:
        pool = ThreadPoolExecutor(n_threads, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(self._device,))
        return started(pool, n_threads)

    def empty(self, nbytes: int, stream: CudaStream) -> torch.Tensor:
        with torch.cuda.stream(stream.raw):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def tensor(self, buffer: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        # set_ and not view: the user's tensor is nobody's view, so autograd and in-place operations treat it as his own.
        return torch.empty(0, dtype=TORCH[dtype], device=self._device).set_(buffer.untyped_storage(), 0, shape, _strides(shape))

    def cut(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return tensor[start:stop].data  # not a view of it: what the user does to one batch in place, autograd need not know of another

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._staging.take(nbytes)

    def copy(self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: CudaStream) -> None:
        target, source = (x.detach() if isinstance(x, torch.Tensor) else to_torch(x) for x in (dst, src))
        with torch.cuda.stream(stream.raw):
            target.copy_(source, non_blocking=True)

    def copy_rows(self, src: torch.Tensor, src_pos: Rows, dst: torch.Tensor, dst_pos: Rows, stream: CudaStream) -> None:
        if dst.numel() == 0:
            return
        with torch.cuda.stream(stream.raw):
            positions = self._upload(np.stack((src_pos, dst_pos)))
            words, target = _words(src), _words(dst)
            step = max(1, ON_THEIR_WAY_BYTES * len(dst) // dst.nbytes)  # what is selected has memory of its own meanwhile
            for start in range(0, len(src_pos), step):
                source, into = positions[:, start : start + step]
                target.index_copy_(0, into, words.index_select(0, source))

    def adopt(self, part: Part, stream: CudaStream) -> Any:
        value = getattr(part, "host_value", None)
        if value is None or _is_plain(value):
            return None
        with torch.cuda.stream(stream.raw):  # a sparse, strided or subclassed tensor, or an object of the user's that moves itself
            return value.to(self._device)

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        reached = [store for store in stores if self.can_reach(store)]
        if wanted == "direct" and len(reached) < len(stores):
            other = next(store for store in stores if store not in reached)
            raise DeviceError(
                f"route='direct': the rows of a {type(other).__name__} are not in page-locked memory that a GPU can read; "
                "put them into a PinnedStore, or leave route out"
            )
        self.route = STAGED
        if not reached or wanted == "staged":
            return ""
        try:
            _ = self.kernels  # what is wrong with them is known now, not in a reader
        except Exception as error:  # of CuPy: it is not there, it has no compiler for this GPU, the driver is too old
            if wanted == "direct":
                raise DeviceError(f"route='direct': the kernels do not run on {self.name} ({error}); leave route out") from error
            return f"page-locked rows are staged: the kernels do not run ({error})"
        try:
            rates = self._rates(reached, n_rows or _TYPICAL_ROWS)
        except (DeviceError, RuntimeError) as error:  # there is no memory to try it with
            self.route = Route(_N_BLOCKS, True, "") if wanted == "direct" else STAGED
            return f"page-locked rows are {'read by the GPU' if wanted else 'staged'}: what is faster could not be measured ({error})"
        self.route = decide(rates, wanted)
        return self.route.why

    def reaches(self, source: Part | Store) -> bool:
        value = getattr(source, "host_value", None)
        if value is not None:
            return bool(value.is_pinned())  # a loader with pin_memory=True
        return self.route.n_blocks > 0 and self.can_reach(getattr(source, "store", source))

    def can_reach(self, store: Any) -> TypeGuard[PinnedStore]:
        """Whether kernels could read and write the rows of a store: they are page-locked, and have bytes."""
        # A class derived from it may bring and take rows in its own way.
        return type(store) is PinnedStore and store.page_locked and 0 < row_nbytes(store) < _MAX_ROW_BYTES

    @functools.cached_property
    def kernels(self) -> RowKernels:
        """Compiled at the first use."""
        return RowKernels(self._index)

    def read(self, parts: Sequence[tuple[Part, torch.Tensor]], stream: CudaStream) -> Iterator[None]:
        groups: dict[int, list[tuple[Any, torch.Tensor]]] = {}  # by the array of row numbers, which several stores have in common
        for part, dst in parts:
            if hasattr(part, "host_value"):
                self.copy(part.host_value, dst, stream)  # torch's pinned allocator keeps it until the copy is done
                yield
            elif dst.numel():
                groups.setdefault(id(part.rows), []).append((part, dst))  # type: ignore[attr-defined]  # rows of a store
        for group in groups.values():
            yield from self._move(self.kernels.gather, group[0][0].rows, [(part.store, dst) for part, dst in group], stream)

    def write(self, values: Sequence[tuple[Store, torch.Tensor]], rows: Rows, stream: CudaStream) -> None:
        if values and len(rows):
            for _ in self._move(self.kernels.scatter, rows, values, stream):
                pass

    def share(self, tensor: torch.Tensor, stream: CudaStream) -> None:
        if getattr(tensor, "layout", None) is torch.strided and not tensor.is_nested:
            tensor.record_stream(stream.raw)

    def allocated_for(self, tensor: torch.Tensor, stream: CudaStream) -> bool:
        if self._segments is None:
            return False
        return self._segments.stream_of(tensor.data_ptr()) == stream.raw.cuda_stream

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return tuple(value.shape), NUMPY.get(value.dtype), value.device == self._device

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    @functools.cached_property
    def _segments(self) -> Segments | None:
        """None where another allocator than torch's own is in use, which has no segments."""
        if torch.cuda.get_allocator_backend() != "native":
            return None
        stats = functools.partial(torch.cuda.memory_stats_as_nested_dict, self._device)
        return Segments(torch.cuda.memory_snapshot, lambda: int(stats()["num_device_free"]))

    @functools.cached_property
    def clock(self) -> CudaClock:
        """Of this GPU."""
        stream = torch.cuda.Stream(self._device)

        def mark() -> tuple[torch.cuda.Event, float]:
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            event.synchronize()  # nothing else is in this stream, so it takes microseconds; spinning, for a thread that sleeps wakes late
            return event, time.perf_counter()

        return CudaClock(mark)

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + cached

    def close(self) -> None:
        self._staging.close()
        unlock_freed()

    def _move(
        self, launch: Callable[..., Iterator[None]], rows: Rows, tables: Sequence[tuple[Any, torch.Tensor]], stream: CudaStream
    ) -> Iterator[None]:
        with torch.cuda.stream(stream.raw):
            numbers = self._upload(rows)  # freed in this stream, after the launches
        moves = [Move(store.array.ctypes.data, tensor.data_ptr(), row_nbytes(store)) for store, tensor in tables]
        n_blocks = self.route.n_blocks or _N_BLOCKS  # another feeder on this device may have decided otherwise since
        yield from launch(stream.raw.cuda_stream, numbers.data_ptr(), len(rows), moves, n_blocks)

    def _rates(self, stores: Sequence[PinnedStore], n_rows: int) -> Rates:
        # By powers of two, so that few are measured.
        batch, table = ((n - 1).bit_length() for n in (n_rows, max(store.array.nbytes for store in stores)))
        key = (
            f"{torch.cuda.get_device_name(self._device)}, {len(os.sched_getaffinity(0))} cores, "
            f"rows of {sorted(map(row_nbytes, stores))} B, 2^{batch} of them, tables up to 2^{table} B"
        )

        def measured() -> Rates:
            with contextlib.closing(CudaDevice(self._index, priority=self._priority)) as apart:  # others may use this one
                return measure(apart, stores, 1 << batch)

        return remembered(key, measured)

    def _upload(self, rows: Rows) -> torch.Tensor:
        """Row numbers on the device, in the current stream, without blocking the host as a copy from pageable memory would."""
        # torch's allocator of page-locked memory keeps it until the copy is done.
        staged = torch.empty(rows.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        staged.numpy()[...] = rows
        return staged.to(self._device, non_blocking=True)

    def _page_locked(self, nbytes: int) -> Bytes:
        try:
            return page_locked(nbytes, self._lock, self._unlock)
        except DeviceError as error:
            raise DeviceError(f"{error}; take a smaller batch or depth, or raise `ulimit -l`") from error

    def _lock(self, address: int, nbytes: int) -> None:
        self._call("cudaHostRegister", address, nbytes, REGISTER)

    def _unlock(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *args: int) -> None:
        """Call the CUDA runtime that torch has loaded, for this GPU.

        Raises:
            RuntimeError: The call failed.
        """
        # Without the guard, a thread that has not used this GPU makes a context on another one.
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            code = getattr(runtime, name)(*args)
        if code != runtime.cudaError.success:
            self._forget_error()
            raise RuntimeError(f"{name} failed with CUDA error {int(code)}")

    @staticmethod
    def _forget_error() -> None:
        """The runtime keeps the code of a failed call, and anybody's next kernel launch would report it; torch cannot clear it."""
        with contextlib.suppress(OSError):  # a build that has it under another name
            ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGetLastError()


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and value.is_contiguous()
        and value.device.type == "cpu"
        and value.dtype in NUMPY
        and not value.requires_grad
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1] if shape else ()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Rows as the widest integers that fit them, shape (n, words): row copies then work for every dtype and move 8 bytes at a time."""
    rows = tensor.detach().reshape(len(tensor), -1).view(torch.uint8)
    nbytes = rows.shape[1]
    for width, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if nbytes % width == 0:
            return rows.view(dtype)
    return rows
