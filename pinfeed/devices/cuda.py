"""CudaDevice: one CUDA GPU. torch owns all memory of the device and all streams."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.devices.batch_copies import BatchCopies, RowWrites, SingleCalls
from pinfeed.devices.cuda_direct_access import DirectAccess, is_aligned, is_in_order
from pinfeed.devices.cuda_driver import cuda_driver
from pinfeed.devices.cuda_streams import CudaClock, CudaStream, current_handle, queued_in, take_mark
from pinfeed.devices.device import OVERLAP_CHUNK_BYTES, RowCopy, TensorRange
from pinfeed.devices.layout import RowLayout
from pinfeed.devices.row_copies import RowCopyKernel, row_copy_kernel
from pinfeed.errors import DeviceError
from pinfeed.memory.page_locked import REGISTER, page_locked, unlock_freed
from pinfeed.memory.pages import BufferPool, Bytes
from pinfeed.native.library import address_of
from pinfeed.native.row_moves import RowMove
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.store import Array, Store
from pinfeed.tensors.numpy_torch import NUMPY, TORCH, is_dense, plain, to_torch
from pinfeed.threads.pool import ThreadPool

# Priority of the side streams. It is higher than that of the model, so that small kernels that move
# rows start before further blocks of the model's kernels.
_PRIORITY = -1


def check_gpu(index: int | None) -> int:
    """Return the number of a GPU that exists.

    Args:
        index: Its number; None for torch's current GPU.

    Raises:
        DeviceError: If the GPU does not exist, or torch cannot use it.
    """
    if not torch.cuda.is_available():
        built = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        )
        asked = "cuda" if index is None else f"cuda:{index}"
        raise DeviceError(
            f"device={asked!r}: torch {torch.__version__} ({built}) finds no usable GPU; expected "
            "a GPU, or device='cpu'"
        )
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"device='cuda:{index}' does not exist; expected one of cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}"
        )
    return index


class CudaDevice(DirectAccess, SingleCalls):
    """One CUDA GPU.

    Args:
        index: Number of the GPU; None for torch's current one.
        n_spare: Free staging buffers that are kept for reuse.

    Raises:
        DeviceError: If the GPU does not exist, or torch cannot use it.
    """

    # It is one class because it implements the whole protocol of a device.

    unified = False

    def __init__(self, index: int | None = None, *, n_spare: int = 4) -> None:
        index = check_gpu(index)
        super().__init__(index)
        self.name = f"cuda:{index}"
        # Slots keep their staging memory, so spare blocks are those that were outgrown.
        self._staging = BufferPool(min(n_spare, 1), functools.partial(staging_memory, self._device))
        # Streams by their handles.
        self._streams: dict[int, CudaStream] = {}
        self.engine_driver = cuda_driver(self._device)

    def choose_route(self, stores: Sequence[Store], wanted: str | None, default: str) -> str:
        why = super().choose_route(stores, wanted, default)
        if "kernels" in vars(self):
            # Compiled together with the others. Otherwise, the training thread would compile it.
            _ = self._row_copy_kernel
        return why

    def stream(self, name: str) -> CudaStream:
        return self._known(torch.cuda.Stream(self._device, _PRIORITY))

    def current_stream(self) -> CudaStream:
        handle = current_handle(self._index)
        found = self._streams.get(handle)
        if found is None:
            found = self._known(torch.cuda.current_stream(self._device))
        return found

    def _known(self, raw: torch.cuda.Stream) -> CudaStream:
        """Return the only object for a stream, which can be compared by its identity."""
        return self._streams.setdefault(raw.cuda_stream, CudaStream(raw, self))

    def in_stream(self, stream: CudaStream) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(stream.raw)

    def worker(self, name: str, n_threads: int = 1) -> ThreadPool:
        return ThreadPool(n_threads, name, functools.partial(torch.cuda.set_device, self._device))

    def empty(self, nbytes: int, stream: CudaStream) -> torch.Tensor:
        with queued_in(stream.raw):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def empty_parts(
        self, layout: RowLayout, stream: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        # Each call of torch takes 1 to 2 us, so they are few.
        tensors: list[torch.Tensor] = []
        wholes: list[torch.Tensor] = []
        for parts, (row_shape, whole), sizes, _ in layout.blocks:
            if len(parts) == 1:
                ((shape, dtype, _),) = parts
                tensors.append(torch.empty(shape, dtype=TORCH[dtype], device=self._device))
                wholes.append(tensors[-1])
                continue
            shape = (sum(sizes), *row_shape)
            wholes.append(torch.empty(shape, dtype=TORCH[whole], device=self._device))
            # As in ``split``, these are no views for autograd.
            pieces = torch.unsafe_split_with_sizes(wholes[-1], sizes)[::2]
            for piece, (shape, dtype, _) in zip(pieces, parts, strict=True):
                tensor = piece if dtype == whole else piece.view(TORCH[dtype])
                has_shape = bool(shape) and shape[1:] == row_shape
                tensors.append(tensor if has_shape else tensor.view(shape))
        return tensors, wholes

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def dense_address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() if is_in_order(tensor) else 0

    def tensor(
        self, buffer: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0
    ) -> torch.Tensor:
        # set_ instead of view, because autograd and in-place operations must treat the user's
        # tensor as an independent tensor.
        return torch.empty(0, dtype=TORCH[dtype], device=self._device).set_(
            buffer.untyped_storage(), offset // dtype.itemsize, shape, _strides(shape)
        )

    def cut(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        # Not a view: in-place operations of the user on one batch must not concern autograd in
        # another batch.
        return tensor[start:stop].data

    def split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        # For the same reason as in ``cut``, these are no views for autograd.
        return torch.unsafe_split_with_sizes(tensor, sizes)

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._staging.take(nbytes)

    def copy(
        self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: CudaStream
    ) -> None:
        if self.engine_driver is not None:
            source_at, nbytes, target_at = _addresses(src, dst)
            if nbytes:
                self.engine_driver.copy(target_at, source_at, nbytes, stream.handle)
                return
        target, source = (
            x.detach() if isinstance(x, torch.Tensor) else to_torch(x) for x in (dst, src)
        )
        with queued_in(stream.raw):
            target.copy_(source, non_blocking=True)

    def copy_batch(
        self, batch: BatchCopies, streams: tuple[CudaStream, CudaStream], *, timed: bool
    ) -> tuple[Any, Any]:
        if self.engine_driver is None or timed:
            return super().copy_batch(batch, streams, timed=timed)
        compute, side = streams
        staged, layout, wholes, reads, written = batch
        at = address_of(staged)
        copies: list[int] = []
        moves: list[RowMove] = []
        for whole, (begin, end) in zip(wholes, layout.staged_blocks(len(staged)), strict=False):
            copies += (whole.data_ptr(), at + begin, end - begin)
        for parts, indices in reads:
            values, tables = self.sorted_parts(parts)
            for value, tensor in values:
                # The slot keeps the value until the copy is done.
                copies += (tensor.data_ptr(), value.data_ptr(), value.nbytes)
            moves += [self.move("gather", *rows, side, indices) for rows in tables]
        handles = compute.handle, side.handle
        after = 0 if written is None else written.handle
        return None, self.engine_driver.queue(*handles, copies, moves, after)

    def write_batch(
        self, writes: Sequence[RowWrites], streams: tuple[CudaStream, CudaStream], *, timed: bool
    ) -> tuple[Any, Any]:
        # Values that no kernel can read are copied first, in the stream of the writes.
        can_read = all(is_aligned(value) for write in writes for _, value in write.values)
        if self.engine_driver is None or timed or not can_read:
            return super().write_batch(writes, streams, timed=timed)
        compute, side = streams
        moves = [
            self.move("scatter", rows, values, side, indices) for values, rows, indices in writes
        ]
        return None, self.engine_driver.queue(compute.handle, side.handle, (), moves)

    def copy_rows(self, copies: Sequence[RowCopy], stream: CudaStream) -> None:
        kernel = self._row_copy_kernel
        if kernel is not None and all(is_in_order(copy.source) for copy in copies):
            kernel.copy(copies, stream.handle)
            return
        with queued_in(stream.raw):
            # Values of the user may have any layout.
            dense = [copy._replace(source=_dense(copy.source)) for copy in copies]
            if kernel is not None:
                kernel.copy(dense, stream.handle)
                return
            for copy in dense:
                if copy.source.numel() and copy.target.numel():
                    _copy_rows(copy)

    @functools.cached_property
    def _row_copy_kernel(self) -> RowCopyKernel | None:
        """Kernel that copies rows; None if torch copies them."""
        return row_copy_kernel(self._index)

    def adopts(self, part: UnreadPart) -> bool:
        value = getattr(part, "host_value", None)
        return value is not None and not _is_plain(value)

    def adopt(self, part: Any, stream: CudaStream) -> Any:
        with queued_in(stream.raw):
            # A sparse, strided or subclassed tensor, or a user's object that moves itself.
            return part.host_value.to(self._device)

    def share(self, tensor: torch.Tensor, stream: CudaStream) -> None:
        if getattr(tensor, "layout", None) is torch.strided and not tensor.is_nested:
            tensor.record_stream(stream.raw)

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        if not is_dense(value):
            return None
        return tuple(value.shape), NUMPY.get(value.dtype), value.device == self._device

    def named(self, name: str) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name)

    @functools.cached_property
    def clock(self) -> CudaClock:
        """Clock of this GPU."""
        stream = torch.cuda.Stream(self._device)
        first = torch.cuda.Event(enable_timing=True)
        first.record(stream)
        first.synchronize()
        return CudaClock(functools.partial(take_mark, stream), (first, time.perf_counter()))

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return int(torch.cuda.mem_get_info(self._device)[0]) + cached

    def close(self) -> None:
        self._staging.close()
        self._movers.clear()
        unlock_freed()


def _addresses(src: torch.Tensor | Array, dst: torch.Tensor | Array) -> tuple[int, int, int]:
    """Return the addresses of both sides of a copy, and its bytes between them.

    Returns:
        Address of ``src``, number of bytes, and address of ``dst``; 0 bytes if torch must copy,
        because neither side is an array, or the memory of one side is not that of the other.
    """
    array, tensor = (src, dst) if isinstance(src, np.ndarray) else (dst, src)
    if (
        not isinstance(array, np.ndarray)
        or not isinstance(tensor, torch.Tensor)
        or TORCH.get(array.dtype) != tensor.dtype
        or not array.flags.c_contiguous
        or not is_in_order(tensor)
        or array.nbytes != tensor.nbytes
    ):
        return 0, 0, 0
    there, here = address_of(array), tensor.data_ptr()
    return (there, array.nbytes, here) if array is src else (here, array.nbytes, there)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and is_dense(value)
        and is_in_order(value)
        and value.device.type == "cpu"
        and value.dtype in NUMPY
        and not value.requires_grad
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1] if shape else ()


def _dense(values: torch.Tensor) -> torch.Tensor:
    """Return values whose rows are contiguous in memory, as they are or copied."""
    if is_in_order(values):
        return values
    return plain(values).contiguous()


def _copy_rows(copy: RowCopy) -> None:
    """Copy rows with torch's functions."""
    source, target = _words(_aligned(copy.source)), _words(copy.target)
    if copy.into is None:
        if copy.taken is None:
            target.copy_(source)
        else:
            torch.index_select(source, 0, _numbers(copy.taken), out=target)
        return
    # index_select takes int32, and index_copy_ does not.
    into = _numbers(copy.into).long()
    if copy.taken is None:
        target.index_copy_(0, into, source)
        return
    # index_select allocates memory for the selected rows, so they are copied in steps.
    step = max(1, OVERLAP_CHUNK_BYTES * len(target) // target.nbytes)
    for chosen, places in zip(_numbers(copy.taken).split(step), into.split(step), strict=True):
        target.index_copy_(0, places, source.index_select(0, chosen))


def _numbers(positions: TensorRange) -> torch.Tensor:
    tensor: torch.Tensor = positions.tensor
    return tensor[positions.begin : positions.begin + positions.n]


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Return values that begin at a multiple of 8 bytes of their memory, as ``_words`` needs.

    Values of the user may be a part of a larger tensor. Tensors that pinfeed creates are aligned.
    """
    begin = values.storage_offset() * values.element_size()
    return values.clone() if begin % 8 else values


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return rows as the widest integers that fit them, shape (n, words).

    Row copies then work for every dtype, and move 8 bytes at a time if possible.
    """
    rows = tensor.detach().reshape(len(tensor), -1).view(torch.uint8)
    nbytes = rows.shape[1]
    for width, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if nbytes % width == 0:
            return rows.view(dtype)
    return rows


def staging_memory(device: torch.device, nbytes: int) -> Bytes:
    """Return page-locked host memory, shape (nbytes,), for copies from and to one GPU.

    Raises:
        DeviceError: If the system or the driver refuses to lock the memory.
    """
    # The unlock function must not keep the CudaDevice alive, because its pool keeps the memory.
    lock = functools.partial(_call_runtime, device, "cudaHostRegister")
    try:
        return page_locked(
            nbytes,
            lambda address, size: lock(address, size, REGISTER),
            functools.partial(unlock_on, device),
        )
    except DeviceError as error:
        raise DeviceError(f"{error}; use a smaller batch or depth, or raise `ulimit -l`") from error


def unlock_on(device: torch.device, address: int) -> None:
    """Unlock page-locked memory.

    Raises:
        RuntimeError: If the driver refuses. The next call of the runtime does not report it again.
    """
    _call_runtime(device, "cudaHostUnregister", address)


def _call_runtime(device: torch.device, name: str, *args: int) -> None:
    # Without the guard, a thread that has not used this GPU would create a context on another one.
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        code = getattr(runtime, name)(*args)
    if code != runtime.cudaError.success:
        _forget_error()
        raise RuntimeError(f"{name} failed with CUDA error {int(code)}")


def _forget_error() -> None:
    """Clear the code of a failed call.

    The runtime keeps the code, and the next kernel launch of any library would report it. torch
    cannot clear it.
    """
    # Some builds have the runtime under another name.
    with contextlib.suppress(OSError):
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGetLastError()
