"""CudaDevice: the only file that knows CUDA streams. torch owns all device memory and all streams."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.devices.base import Array, HostArray
from pinfeed.devices.kernels import Move, RowKernels
from pinfeed.devices.route_benchmark import STAGED, Rates, Route, decide, measure, remembered
from pinfeed.errors import DeviceError, described
from pinfeed.memory.buffer_pool import BufferPool
from pinfeed.memory.demand import OVERLAP_CHUNK_BYTES
from pinfeed.memory.mapping import Bytes
from pinfeed.memory.page_locked import REGISTER, page_locked, unlock_freed
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Store, row_nbytes
from pinfeed.stores.pinned import PinnedStore
from pinfeed.tensors.numpy_torch import NUMPY, TORCH, to_torch
from pinfeed.threads.pool import ThreadPool

_TYPICAL_ROWS = 4096
_N_BLOCKS = 8
# The kernels count the words of a row in 32 bits.
_MAX_ROW_BYTES = 1 << 30
# torch gives the time between two events as a 32-bit float in milliseconds, which resolves a
# microsecond at 10 seconds.
_COMPARE_S = 10.0
_N_MARKS = 4
_MARK_S = 1e-3


class CudaEvent:
    """An event recorded once.

    The host sleeps, not spins, while it waits: a spinning reader would take a core from the loop.

    Args:
        stream: Where it is recorded.
        clock: Tells when it was passed; None for an event that is not timed.
    """

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock | None = None) -> None:
        self.raw = torch.cuda.Event(enable_timing=clock is not None, blocking=True)
        self._clock = clock
        self.raw.record(stream)

    def sync(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def at_s(self) -> float:
        assert self._clock is not None
        return self._clock.at_s(self.raw)


Mark = tuple[torch.cuda.Event, float]
"""A timed event that has been passed, and the time of ``time.perf_counter()`` then."""


@dataclass(frozen=True)
class _Comparison:
    """The clocks of a GPU and of the host, at one event.

    Attributes:
        event: Passed when they were compared.
        host_s: Time of the host's clock then.
        told_s: Time that ``CudaClock`` tells for the event.
        rate: Seconds of the host's clock per second of the GPU's.
    """

    event: torch.cuda.Event
    host_s: float
    told_s: float
    rate: float

    def at_s(self, event: torch.cuda.Event) -> float:
        """The time of another event: the error at this one is gone after ``_COMPARE_S``."""
        elapsed_s = _seconds(self.event, event)
        share = min(max(elapsed_s / _COMPARE_S, 0.0), 1.0)
        return self.told_s + elapsed_s * self.rate + share * (self.host_s - self.told_s)


class CudaClock:
    """Tells when events of one GPU were passed, by the host's clock.

    The two clocks drift apart by some ten microseconds per second, so they are compared again now
    and then. An error that a comparison finds is taken away over the time up to the next one: the
    time that is told never jumps, and spans do not overlap.

    Args:
        mark: Returns a mark, or None if the GPU does not give one at once.
        first: The first mark.
    """

    def __init__(self, mark: Callable[[], Mark | None], first: Mark) -> None:
        self._mark = mark
        event, now_s = first
        self._last = _Comparison(event, now_s, now_s, 1.0)

    def at_s(self, event: torch.cuda.Event) -> float:
        """Seconds of ``time.perf_counter()``; the event is timed and done. In any thread."""
        last = self._last
        if _seconds(last.event, event) > _COMPARE_S and (mark := self._mark()) is not None:
            now, host_s = mark
            rate = (host_s - last.host_s) / _seconds(last.event, now)
            self._last = last = _Comparison(now, host_s, last.at_s(now), rate)
        return last.at_s(event)


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


def _marked(stream: torch.cuda.Stream) -> Mark | None:
    """The mark that was taken in the shortest of some tries; a thread that was interrupted meanwhile reads the clock late.

    torch's streams are shared, so other work may be under way in this one: then it is not waited
    for.
    """
    tries = []
    for _ in range(_N_MARKS):
        event = torch.cuda.Event(enable_timing=True)
        begin_s = time.perf_counter()
        event.record(stream)
        while not event.query():
            if time.perf_counter() - begin_s > _MARK_S:
                return None
        now_s = time.perf_counter()
        tries.append((now_s - begin_s, event, now_s))
    _, event, now_s = min(tries, key=operator.itemgetter(0))
    return event, now_s


class CudaStream:
    """A torch stream.

    Args:
        raw: The stream.
        device: Whose clock times its events.
    """

    def __init__(self, raw: torch.cuda.Stream, device: CudaDevice) -> None:
        self.raw = raw
        self._device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def record(self, *, timed: bool = False) -> CudaEvent:
        return CudaEvent(self.raw, self._device.clock if timed else None)

    def wait(self, event: CudaEvent) -> None:
        self.raw.wait_event(event.raw)


def check_gpu(index: int | None) -> int:
    """The number of a GPU that exists; of torch's current one for None.

    Raises:
        DeviceError: There is no such GPU, or torch cannot use it.
    """
    if not torch.cuda.is_available():
        built = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        )
        raise DeviceError(
            f"device='cuda': torch {torch.__version__} ({built}) finds no usable GPU; expected one, or device='cpu'"
        )
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"device='cuda:{index}' does not exist; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return index


class CudaDevice:
    """One CUDA GPU.

    Args:
        index: Its number; None for torch's current one.
        n_spare: Free staging buffers kept for reuse.
        priority: Of the side streams; -1, high: small kernels that move rows begin before more
            blocks of the model's do. 0 is that of the model.

    Raises:
        DeviceError: There is no such GPU, or torch cannot use it.
    """

    unified = False

    def __init__(self, index: int | None = None, *, n_spare: int = 4, priority: int = -1) -> None:
        index = check_gpu(index)
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._index = index
        self._staging = BufferPool(n_spare, functools.partial(_staging_memory, self._device))
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

    def worker(self, name: str, n_threads: int = 1) -> ThreadPool:
        return ThreadPool(n_threads, name, functools.partial(torch.cuda.set_device, self._device))

    def empty(self, nbytes: int, stream: CudaStream) -> torch.Tensor:
        with torch.cuda.stream(stream.raw):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def tensor(
        self, buffer: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> torch.Tensor:
        # set_ and not view: the user's tensor is nobody's view, so autograd and in-place operations
        # treat it as his own.
        return torch.empty(0, dtype=TORCH[dtype], device=self._device).set_(
            buffer.untyped_storage(), 0, shape, _strides(shape)
        )

    def cut(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        # Not a view of it: what the user does to one batch in place, autograd need not know of
        # another.
        return tensor[start:stop].data

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._staging.take(nbytes)

    def copy(
        self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: CudaStream
    ) -> None:
        target, source = (
            x.detach() if isinstance(x, torch.Tensor) else to_torch(x) for x in (dst, src)
        )
        with torch.cuda.stream(stream.raw):
            target.copy_(source, non_blocking=True)

    def copy_rows(
        self, src: torch.Tensor, src_pos: Rows, dst: torch.Tensor, dst_pos: Rows, stream: CudaStream
    ) -> None:
        if dst.numel() == 0:
            return
        with torch.cuda.stream(stream.raw):
            positions = self._upload(np.stack((src_pos, dst_pos)))
            words, target = _words(src), _words(dst)
            # What is selected has memory of its own meanwhile.
            step = max(1, OVERLAP_CHUNK_BYTES * len(dst) // dst.nbytes)
            for start in range(0, len(src_pos), step):
                source, into = positions[:, start : start + step]
                target.index_copy_(0, into, words.index_select(0, source))

    def adopt(self, part: HostArray, stream: CudaStream) -> Any:
        value = getattr(part, "host_value", None)
        if value is None or _is_plain(value):
            return None
        with torch.cuda.stream(stream.raw):
            # A sparse, strided or subclassed tensor, or an object of the user's that moves itself.
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
            # What is wrong with them is known now, not in a reader.
            _ = self.kernels
        except Exception as error:
            # Of CuPy: it is not there, it has no compiler for this GPU, the driver is too old.
            if wanted == "direct":
                raise DeviceError(
                    f"route='direct': the kernels do not run on {self.name} ({described(error)}); leave route out"
                ) from error
            return f"page-locked rows are staged: the kernels do not run ({described(error)})"
        try:
            rates = self._rates(reached, n_rows or _TYPICAL_ROWS)
        except (DeviceError, RuntimeError) as error:
            # There is no memory to try it with.
            self.route = Route(_N_BLOCKS, True, "") if wanted == "direct" else STAGED
            how = "read by the GPU" if wanted else "staged"
            return f"page-locked rows are {how}: what is faster could not be measured ({described(error)})"
        self.route = decide(rates, wanted)
        return self.route.why

    def reaches(self, source: HostArray | Store) -> bool:
        value = getattr(source, "host_value", None)
        if value is not None:
            # A loader with pin_memory=True.
            return bool(value.is_pinned())
        return self.route.n_blocks > 0 and self.can_reach(getattr(source, "store", source))

    def can_reach(self, store: Any) -> TypeGuard[PinnedStore]:
        """Whether kernels could read and write the rows of a store: they are page-locked, and have bytes."""
        # A class derived from it may bring and take rows in its own way.
        return (
            type(store) is PinnedStore
            and store.page_locked
            and 0 < row_nbytes(store) < _MAX_ROW_BYTES
        )

    @functools.cached_property
    def kernels(self) -> RowKernels:
        """Compiled at the first use."""
        return RowKernels(self._index)

    def read(
        self, parts: Sequence[tuple[HostArray, torch.Tensor]], stream: CudaStream
    ) -> Iterator[None]:
        # By the array of row numbers, which several stores have in common.
        groups: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for part, dst in parts:
            if hasattr(part, "host_value"):
                # torch's pinned allocator keeps it until the copy is done.
                self.copy(part.host_value, dst, stream)
                yield
            elif dst.numel():
                groups.setdefault(id(part.rows), []).append((part, dst))  # type: ignore[attr-defined]  # rows of a store
        for group in groups.values():
            yield from self._move(
                self.kernels.gather,
                group[0][0].rows,
                [(part.store, dst) for part, dst in group],
                stream,
            )

    def write(
        self, values: Sequence[tuple[Store, torch.Tensor]], rows: Rows, stream: CudaStream
    ) -> None:
        if values and len(rows):
            for _ in self._move(self.kernels.scatter, rows, values, stream):
                pass

    def share(self, tensor: torch.Tensor, stream: CudaStream) -> None:
        if getattr(tensor, "layout", None) is torch.strided and not tensor.is_nested:
            tensor.record_stream(stream.raw)

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.is_nested
        ):
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
    def clock(self) -> CudaClock:
        """Of this GPU."""
        stream = torch.cuda.Stream(self._device)
        first = torch.cuda.Event(enable_timing=True)
        first.record(stream)
        first.synchronize()
        return CudaClock(functools.partial(_marked, stream), (first, time.perf_counter()))

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return int(torch.cuda.mem_get_info(self._device)[0]) + cached

    def close(self) -> None:
        self._staging.close()
        unlock_freed()

    def _move(
        self,
        launch: Callable[..., Iterator[None]],
        rows: Rows,
        tables: Sequence[tuple[Any, torch.Tensor]],
        stream: CudaStream,
    ) -> Iterator[None]:
        with torch.cuda.stream(stream.raw):
            # Freed in this stream, after the launches.
            numbers = self._upload(rows)
        moves = [
            Move(store.array.ctypes.data, tensor.data_ptr(), row_nbytes(store))
            for store, tensor in tables
        ]
        # Another feeder on this device may have decided otherwise since.
        n_blocks = self.route.n_blocks or _N_BLOCKS
        yield from launch(stream.raw.cuda_stream, numbers.data_ptr(), len(rows), moves, n_blocks)

    def _rates(self, stores: Sequence[PinnedStore], n_rows: int) -> Rates:
        # By powers of two, so that few are measured.
        batch, table = (
            (n - 1).bit_length() for n in (n_rows, max(store.array.nbytes for store in stores))
        )
        key = (
            f"{torch.cuda.get_device_name(self._device)}, {len(os.sched_getaffinity(0))} cores, "
            f"rows of {sorted(map(row_nbytes, stores))} B, 2^{batch} of them, tables up to 2^{table} B"
        )

        def measured() -> Rates:
            with contextlib.closing(CudaDevice(self._index, priority=self._priority)) as apart:
                # Others may use this one.
                return measure(apart, stores, 1 << batch)

        return remembered(key, measured)

    def _upload(self, rows: Rows) -> torch.Tensor:
        """Row numbers on the device, in the current stream, without blocking the host as a copy from pageable memory would."""
        # torch's allocator of page-locked memory keeps it until the copy is done.
        staged = torch.empty(rows.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        staged.numpy()[...] = rows
        return staged.to(self._device, non_blocking=True)


def _staging_memory(device: torch.device, nbytes: int) -> Bytes:
    # The unlock function must not keep the CudaDevice alive, because its pool keeps the memory.
    lock = functools.partial(_call_runtime, device, "cudaHostRegister")
    try:
        return page_locked(
            nbytes,
            lambda address, size: lock(address, size, REGISTER),
            functools.partial(unlock_on, device),
        )
    except DeviceError as error:
        raise DeviceError(
            f"{error}; take a smaller batch or depth, or raise `ulimit -l`"
        ) from error


def unlock_on(device: torch.device, address: int) -> None:
    """Unlock page-locked memory.

    Raises:
        RuntimeError: The driver refuses; the next call of the runtime does not report it again.
    """
    _call_runtime(device, "cudaHostUnregister", address)


def _call_runtime(device: torch.device, name: str, *args: int) -> None:
    # Without the guard, a thread that has not used this GPU makes a context on another one.
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        code = getattr(runtime, name)(*args)
    if code != runtime.cudaError.success:
        _forget_error()
        raise RuntimeError(f"{name} failed with CUDA error {int(code)}")


def _forget_error() -> None:
    """Clear the code of a failed call, which the runtime keeps and anybody's next kernel launch would report; torch cannot clear it."""
    with contextlib.suppress(OSError):
        # A build that has it under another name.
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
