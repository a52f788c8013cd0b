"""CudaDevice: the only file that knows CUDA streams. torch owns all device memory and all streams."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..blocks import PORTABLE, Pool, page_locked
from ..errors import DeviceError
from ..rows import Rows
from ..stores.base import Store
from ..tensors import NUMPY, TORCH, to_torch
from .base import Array, Part


class CudaEvent:
    """An event recorded once. The host sleeps, not spins, while it waits: a spinning reader would take a core from the loop."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = torch.cuda.Event(blocking=True)
        self.raw.record(stream)

    def sync(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())


class CudaStream:
    """A torch stream."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def record(self) -> CudaEvent:
        return CudaEvent(self.raw)

    def wait(self, event: CudaEvent) -> None:
        self.raw.wait_event(event.raw)


class CudaDevice:
    """One CUDA GPU.

    Args:
        index: Its number; None for torch's current one.
        n_spare: Free staging buffers kept for reuse.

    Raises:
        DeviceError: There is no such GPU, or torch cannot use it.
    """

    unified = False

    def __init__(self, index: int | None = None, *, n_spare: int = 4) -> None:
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
            raise DeviceError(f"device='cuda': torch {torch.__version__} ({built}) finds no usable GPU; expected one, or device='cpu'")
        index = torch.cuda.current_device() if index is None else index
        if index >= torch.cuda.device_count():
            raise DeviceError(f"device='cuda:{index}' does not exist; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._staging = Pool(n_spare, lambda nbytes: page_locked(nbytes, self._lock, self._unlock))
        self._uploads: deque[tuple[CudaEvent, Array]] = deque()  # row positions on their way, until the copy is done

    def stream(self, name: str) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def worker(self, name: str, n_threads: int = 1) -> Executor:
        return ThreadPoolExecutor(n_threads, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(self._device,))

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
            positions = self._upload(np.stack((src_pos, dst_pos)), stream)
            words, target = _words(src), _words(dst)
            target.index_copy_(0, positions[1], words.index_select(0, positions[0]))

    def adopt(self, part: Part, stream: CudaStream) -> Any:
        value = getattr(part, "host_value", None)
        if value is None or _is_plain(value):
            return None
        with torch.cuda.stream(stream.raw):  # a sparse, strided or subclassed tensor, or an object of the user's that moves itself
            return value.to(self._device)

    def reaches(self, source: Part | Store) -> bool:
        value = getattr(source, "host_value", None)
        return value is not None and bool(value.is_pinned())  # a loader with pin_memory=True

    def read(self, part: Part, dst: torch.Tensor, stream: CudaStream) -> Iterator[None]:
        self.copy(part.host_value, dst, stream)  # type: ignore[attr-defined]  # torch's pinned allocator keeps it until the copy is done
        yield

    def write(self, store: Store, rows: Rows, values: torch.Tensor, stream: CudaStream) -> None:
        raise DeviceError(f"{self.name} writes no {type(store).__name__} itself")

    def share(self, tensor: torch.Tensor, stream: CudaStream) -> None:
        if getattr(tensor, "layout", None) is torch.strided and not tensor.is_nested:
            tensor.record_stream(stream.raw)

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return tuple(value.shape), NUMPY.get(value.dtype), value.device == self._device

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + cached

    def close(self) -> None:
        while self._uploads:
            self._uploads.popleft()[0].sync()
        self._staging.close()

    def _upload(self, rows: Rows, stream: CudaStream) -> torch.Tensor:
        """Row positions on the device, without blocking the host as a copy from pageable memory would."""
        while self._uploads and self._uploads[0][0].is_done():
            self._uploads.popleft()
        size = 1 << max(12, (rows.nbytes - 1).bit_length())  # few different sizes: a new one has to be page-locked first
        staged = self._staging.take(size)[: rows.nbytes].view(np.int64).reshape(rows.shape)
        staged[...] = rows
        there = torch.empty(rows.shape, dtype=torch.int64, device=self._device)
        self.copy(staged, there, stream)
        self._uploads.append((stream.record(), staged))
        return there

    def _lock(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if code != runtime.cudaError.success:
            self._forget_error()
            raise DeviceError(
                f"the driver refused to page-lock {nbytes} bytes for staging (CUDA error {int(code)}); "
                "take a smaller batch or depth, or raise `ulimit -l`"
            )

    def _unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):  # else a thread that never used this GPU would make a context on another one
            torch.cuda.cudart().cudaHostUnregister(address)

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
