"""KernelAccess: the part of a CUDA device that reads and writes page-locked rows by kernels."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from pinfeed.devices.cuda_streams import CudaStream
from pinfeed.devices.kernels import Move, RowIndices, RowKernels
from pinfeed.devices.route import STAGED, Rates, Route, decide
from pinfeed.devices.route_benchmark import measure
from pinfeed.devices.route_cache import cached_rates
from pinfeed.errors import DeviceError, described
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, HostArray, Store, row_nbytes
from pinfeed.stores.pinned import PinnedStore

# Rows of a batch for which a route is measured if the number is unknown.
_TYPICAL_ROWS = 4096
# Blocks of a kernel if the route was not measured.
_N_BLOCKS = 8
# The kernels count the words of a row in 32 bits.
_MAX_ROW_BYTES = 1 << 30


class KernelAccess:
    """Direct reads and writes of the rows of page-locked stores, and the choice to use them.

    Args:
        index: Number of the GPU.
    """

    name: str

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._index = index
        self.route = STAGED
        """Route of the rows of page-locked stores; the last feeder that decided sets it for all."""

    def copy(
        self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: CudaStream
    ) -> None:
        """Queue a copy, like ``Device.copy``."""
        raise NotImplementedError

    def _same_gpu(self) -> Any:
        """Return another device object of the same GPU."""
        raise NotImplementedError

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        reached = [store for store in stores if self.can_reach(store)]
        if wanted == "direct" and len(reached) < len(stores):
            other = next(store for store in stores if store not in reached)
            raise DeviceError(
                f"route='direct': the rows of a {type(other).__name__} are not in page-locked "
                "memory that a GPU can read; put them into a PinnedStore, or leave route out"
            )
        self.route = STAGED
        if not reached or wanted == "staged":
            return ""
        try:
            # Compiled now, so that an error is raised here and not in a reader thread.
            _ = self.kernels
        except Exception as error:
            # CuPy is not installed, it has no compiler for this GPU, or the driver is too old.
            if wanted == "direct":
                raise DeviceError(
                    f"route='direct': the kernels do not run on {self.name} "
                    f"({described(error)}); leave route out"
                ) from error
            return f"page-locked rows are staged: the kernels do not run ({described(error)})"
        try:
            rates = self._rates(reached, n_rows or _TYPICAL_ROWS)
        except (DeviceError, RuntimeError) as error:
            # There is not enough memory for a measurement.
            self.route = Route(_N_BLOCKS, True, "") if wanted == "direct" else STAGED
            how = "read by the GPU" if wanted else "staged"
            return (
                f"page-locked rows are {how}: what is faster could not be measured "
                f"({described(error)})"
            )
        self.route = decide(rates, wanted)
        return self.route.why

    def reaches(self, source: HostArray | Store) -> bool:
        value = getattr(source, "host_value", None)
        if value is not None:
            # A batch of a loader is read directly if the loader has pin_memory=True.
            return bool(value.is_pinned())
        return self.route.n_blocks > 0 and self.can_reach(getattr(source, "store", source))

    def can_reach(self, store: Any) -> TypeGuard[PinnedStore]:
        """Return whether kernels can read and write the rows of a store.

        They can if the rows are page-locked and have bytes.
        """
        # A subclass may gather and scatter rows in its own way.
        return (
            type(store) is PinnedStore
            and store.page_locked
            and 0 < row_nbytes(store) < _MAX_ROW_BYTES
        )

    @functools.cached_property
    def kernels(self) -> RowKernels:
        """Kernels that move rows, compiled at the first use."""
        return RowKernels(self._index)

    def read(
        self, parts: Sequence[tuple[HostArray, torch.Tensor]], stream: CudaStream
    ) -> Iterator[None]:
        # Grouped by the array of row indices, which several stores have in common.
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

    def _move(
        self,
        launch: Callable[..., Iterator[None]],
        rows: Rows,
        tables: Sequence[tuple[Any, torch.Tensor]],
        stream: CudaStream,
    ) -> Iterator[None]:
        with torch.cuda.stream(stream.raw):
            # Allocated in this stream, so that its memory is reused only after the launches.
            numbers = self._upload(rows)
        moves = [
            Move(store.array.ctypes.data, tensor.data_ptr(), row_nbytes(store))
            for store, tensor in tables
        ]
        # Another feeder on this device may have chosen the staged route since.
        n_blocks = self.route.n_blocks or _N_BLOCKS
        on_device = RowIndices(numbers.data_ptr(), len(rows), numbers.element_size())
        yield from launch(stream.raw.cuda_stream, on_device, moves, n_blocks)

    def _rates(self, stores: Sequence[PinnedStore], n_rows: int) -> Rates:
        # Sizes are rounded to powers of two, so that few are measured.
        batch = (n_rows - 1).bit_length()
        table = (max(store.array.nbytes for store in stores) - 1).bit_length()
        key = (
            f"{torch.cuda.get_device_name(self._device)}, {len(os.sched_getaffinity(0))} cores, "
            f"rows of {sorted(map(row_nbytes, stores))} B, 2^{batch} of them, "
            f"tables up to 2^{table} B"
        )

        def measured() -> Rates:
            with contextlib.closing(self._same_gpu()) as apart:
                # Measured with a device object of its own, because others may use this one.
                return measure(apart, stores, 1 << batch)

        return cached_rates(key, measured)

    def _upload(self, rows: Rows) -> torch.Tensor:
        """Return row indices on the device, copied in the current stream.

        Unlike a copy from pageable memory, this does not block the host.
        """
        # torch's allocator of page-locked memory keeps the memory until the copy is done.
        staged = torch.empty(rows.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        staged.numpy()[...] = rows
        return staged.to(self._device, non_blocking=True)
