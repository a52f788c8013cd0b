"""DirectAccess: the part of a CUDA device that reads and writes page-locked rows directly.

Consecutive rows are one copy. Kernels move other rows.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import numpy as np
import torch

from pinfeed.devices.cuda_streams import CudaStream, queued_in
from pinfeed.devices.kernels import DeviceIndices, Grid, Move, RowKernels
from pinfeed.devices.route import STAGED, Rates, Route, cached_rates, decide
from pinfeed.devices.route_benchmark import MatrixProducts, grids_of, measure
from pinfeed.errors import DeviceError, described
from pinfeed.native.row_moves import RowDirection, RowMoves
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import Array, Store, row_nbytes, run_of
from pinfeed.tensors.numpy_torch import TORCH

_Table = tuple[Any, torch.Tensor]
"""Store, and rows of it in a batch on the device."""

# Rows of a batch for which a route is measured if the number is unknown.
_TYPICAL_ROWS = 4096
# Blocks of a kernel if the route was not measured.
_GRID = Grid(8)
# The kernels count the words of a row in 32 bits.
_MAX_ROW_BYTES = 1 << 30


class DirectAccess:
    """Direct reads and writes of the rows of page-locked stores, and the choice to use them.

    Args:
        index: Number of the GPU.
    """

    name: str

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._index = index
        self.route = STAGED
        """Route of the rows of page-locked stores; the last decision applies to all feeders."""

    def copy(
        self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: CudaStream
    ) -> None:
        """Queue a copy, like ``Device.copy``."""
        raise NotImplementedError

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        reached = [store for store in stores if self.can_reach(store)]
        if wanted == "direct" and len(reached) < len(stores):
            other = next(store for store in stores if store not in reached)
            raise DeviceError(
                f"route='direct': the rows of a {type(other).__name__} are not in page-locked "
                "memory that a GPU can read; put them into a PinnedStore, or leave route out"
            )
        self.route, why = self._measured_route(reached, n_rows, wanted)
        return why

    def _measured_route(
        self, stores: Sequence[PinnedStore], n_rows: int, wanted: str | None
    ) -> tuple[Route, str]:
        """Return the route of the rows of stores that the GPU can reach, and its reason."""
        if not stores or wanted == "staged":
            return STAGED, ""
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
            why = f"page-locked rows are staged: the kernels do not run ({described(error)})"
            return STAGED, why
        try:
            route = decide(_measured_rates(self, stores, n_rows or _TYPICAL_ROWS), wanted)
        except (DeviceError, RuntimeError) as error:
            # The machine does not have enough memory for a measurement.
            how = "read by the GPU" if wanted else "staged"
            why = (
                f"page-locked rows are {how}: the faster route could not be measured "
                f"({described(error)})"
            )
            return (Route(_GRID, True, "") if wanted == "direct" else STAGED), why
        return route, route.why

    def reaches(self, source: UnreadPart | Store) -> bool:
        value = getattr(source, "host_value", None)
        if value is not None:
            # A batch of a loader is read directly if the loader has pin_memory=True.
            return bool(value.is_pinned())
        return self.route.grid is not None and self.can_reach(getattr(source, "store", source))

    def can_reach(self, store: Any) -> TypeGuard[PinnedStore]:
        """Return whether the GPU can read and write the rows of a store itself.

        It can if the rows are page-locked and have bytes.
        """
        # A subclass may override how rows are gathered and scattered.
        return (
            type(store) is PinnedStore
            and store.page_locked
            and 0 < row_nbytes(store) < _MAX_ROW_BYTES
        )

    @property
    def grids(self) -> Sequence[Grid]:
        """Grids with which the kernels are timed."""
        return grids_of(torch.cuda.get_device_properties(self._device).multi_processor_count)

    @functools.cached_property
    def kernels(self) -> RowKernels:
        """Kernels that move rows, compiled at the first use."""
        return RowKernels(self._index)

    def row_moves(self, kind: RowDirection, stores: Mapping[int, Any]) -> RowMoves:
        # Another feeder on this device may have chosen the staged route since.
        return self.kernels.moves(kind, stores, self.route.grid or _GRID)

    def index_dtype(self, stores: Sequence[Store], rows: Rows) -> np.dtype[Any] | None:
        if not stores or not len(rows) or run_of(rows) is not None:
            return None
        return _index_dtype(stores)

    def read(
        self,
        parts: Sequence[tuple[UnreadPart, torch.Tensor]],
        stream: CudaStream,
        indices: torch.Tensor | None = None,
    ) -> Iterator[None]:
        # Grouped by the array of row indices, which several stores have in common.
        groups: dict[int, tuple[Rows, list[_Table]]] = {}
        for part, dst in parts:
            if hasattr(part, "host_value"):
                # torch's pinned allocator keeps it until the copy is done.
                self.copy(part.host_value, dst, stream)
                yield
            elif dst.numel():
                rows: Rows = part.rows  # type: ignore[attr-defined]  # rows of a store
                groups.setdefault(id(rows), (rows, []))[1].append((part.store, dst))  # type: ignore[attr-defined]
        for rows, tables in groups.values():
            yield from self._move(tables, rows, stream, indices, gather=True)

    def write(
        self,
        values: Sequence[_Table],
        rows: Rows,
        stream: CudaStream,
        indices: torch.Tensor | None = None,
    ) -> None:
        if len(rows):
            deque(self._move(values, rows, stream, indices, gather=False), maxlen=0)

    def _move(
        self,
        tables: Sequence[_Table],
        rows: Rows,
        stream: CudaStream,
        indices: torch.Tensor | None,
        *,
        gather: bool,
    ) -> Iterator[None]:
        """Queue the move of rows from their tables if ``gather``, or else to them, in steps."""
        run = run_of(rows)
        if run is None:
            yield from self._launch(tables, rows, stream, indices, gather=gather)
            return
        for store, tensor in tables:
            table = store.array[run]
            src, dst = (table, tensor) if gather else (tensor, table)
            self.copy(src, dst, stream)
            yield

    def _launch(
        self,
        tables: Sequence[_Table],
        rows: Rows,
        stream: CudaStream,
        indices: torch.Tensor | None,
        *,
        gather: bool,
    ) -> Iterator[None]:
        if indices is None:
            with queued_in(stream.raw):
                # Allocated in this stream, so that its memory is reused only after the launches.
                indices = self._upload(rows, _index_dtype([store for store, _ in tables]))
        on_device = DeviceIndices(indices.data_ptr(), len(rows), indices.element_size())
        # Another feeder on this device may have chosen the staged route since.
        grid = self.route.grid or _GRID
        moves = [
            Move(store.array.ctypes.data, tensor.data_ptr(), row_nbytes(store))
            for store, tensor in tables
        ]
        kind: Literal["gather", "scatter"] = "gather" if gather else "scatter"
        yield from self.kernels.move(kind, stream.raw.cuda_stream, on_device, moves, grid)

    def _upload(self, rows: Rows, dtype: np.dtype[Any]) -> torch.Tensor:
        """Return row indices on the device, copied in the current stream.

        Unlike a copy from pageable memory, this does not block the host.
        """
        # torch's allocator of page-locked memory keeps the memory until the copy is done.
        staged = torch.empty(rows.shape, dtype=TORCH[dtype], device="cpu", pin_memory=True)
        staged.numpy()[...] = rows
        return staged.to(self._device, non_blocking=True)


def _measured_rates(device: DirectAccess, stores: Sequence[PinnedStore], n_rows: int) -> Rates:
    """Return the rates of the routes of such rows, measured or remembered."""
    # Sizes are rounded to powers of two, so that few are measured.
    batch = (n_rows - 1).bit_length()
    table = (max(store.array.nbytes for store in stores) - 1).bit_length()
    key = (
        f"{torch.cuda.get_device_name(device._device)}, {len(os.sched_getaffinity(0))} cores, "
        f"rows of {sorted(map(row_nbytes, stores))} B, 2^{batch} of them, "
        f"tables up to 2^{table} B"
    )

    def measured() -> Rates:
        # Measured with a separate device object, because other feeders may use this one.
        same_gpu: Any = type(device)(device._index)
        with contextlib.closing(same_gpu) as apart:
            return measure(apart, stores, 1 << batch, MatrixProducts(device._device))

    return cached_rates(key, measured)


def _index_dtype(stores: Sequence[Store]) -> np.dtype[Any]:
    """Return the smallest dtype that holds every row index of these stores."""
    return np.dtype(np.int32 if max(store.n_rows for store in stores) < 1 << 31 else np.int64)
