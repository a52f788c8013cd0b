"""DirectAccess: the part of a CUDA device that reads and writes page-locked rows directly.

Consecutive rows are one copy. Kernels move other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from pinfeed.devices.cuda_driver import CudaDriver
from pinfeed.devices.cuda_streams import CudaStream, queued_in
from pinfeed.devices.device import RowPairs
from pinfeed.devices.kernels import WIDEST_WORD, RowKernels
from pinfeed.devices.layout import SMALL_NBYTES
from pinfeed.devices.row_copies import address_of
from pinfeed.errors import DeviceError, described
from pinfeed.native.row_moves import RowDirection, RowMove, RowMover, RowMoves
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import Array, Store, row_nbytes, run_of
from pinfeed.tensors.numpy_torch import TORCH, plain

_Table = tuple[Any, torch.Tensor]
"""Store, and rows of it in a batch on the device."""

# The kernels count the words of a row in 32 bits.
_MAX_ROW_BYTES = 1 << 30


class DirectAccess:
    """Direct reads and writes of the rows of page-locked stores, and the choice to use them.

    Args:
        index: Number of the GPU.
    """

    name: str
    engine_driver: CudaDriver | None
    """Driver of the GPU; None without it, or without the compiled functions."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._index = index
        self.is_direct = False
        """Whether rows of page-locked stores are read directly; the last choice applies to all
        feeders."""
        # Every loop over the same stores uses the same ones.
        self._movers: dict[tuple[Any, ...], RowMover] = {}

    def copy(
        self, src: torch.Tensor | Array, dst: torch.Tensor | Array, stream: CudaStream
    ) -> None:
        """Queue a copy, like ``Device.copy``."""
        raise NotImplementedError

    def choose_route(self, stores: Sequence[Store], wanted: str | None, default: str) -> str:
        reached = [store for store in stores if self.can_reach(store)]
        if wanted == "direct" and len(reached) < len(stores):
            other = next(store for store in stores if store not in reached)
            raise DeviceError(
                f"route='direct': the rows of a {type(other).__name__} are not in page-locked "
                "memory that a GPU can read; put them into a PinnedStore, or leave route out"
            )
        is_wanted = bool(reached) and (wanted or default) == "direct"
        problem = self._problem() if is_wanted else ""
        if problem and wanted == "direct":
            raise DeviceError(f"route='direct': {problem}; leave route out")
        # Stores of earlier feeders are not kept.
        self._movers.clear()
        self.is_direct = is_wanted and not problem
        return problem and f"page-locked rows are staged: {problem}"

    def _problem(self) -> str:
        """Return why kernels cannot move rows; an empty string if they can."""
        if self.engine_driver is None:
            return (
                f"{self.name} needs pinfeed's compiled part and the CUDA driver, which "
                "`pinfeed doctor` looks for"
            )
        try:
            # Compiled now, so that an error is raised here and not in a reader thread.
            _ = self.kernels
        except Exception as error:
            # CuPy is not installed, it has no compiler for this GPU, or the driver is too old.
            return f"the kernels do not run on {self.name} ({described(error)})"
        return ""

    def reaches(self, source: UnreadPart | Store) -> bool:
        value = getattr(source, "host_value", None)
        if value is not None:
            # A batch of a loader is read directly if the loader has pin_memory=True, unless a copy
            # of its own takes longer than to stage it together with others.
            return value.nbytes > SMALL_NBYTES and bool(value.is_pinned())
        return self.is_direct and self.can_reach(getattr(source, "store", source))

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

    @functools.cached_property
    def kernels(self) -> RowKernels:
        """Kernels that move rows, compiled at the first use."""
        return RowKernels(self._index)

    def row_moves(self, kind: RowDirection, stores: Mapping[int, Any]) -> RowMoves:
        return self.kernels.moves(kind, stores)

    def index_dtype(self, stores: Sequence[Store], rows: Rows) -> np.dtype[Any] | None:
        if not stores or not len(rows) or run_of(rows) is not None:
            return None
        return _index_dtype(stores)

    def read(
        self,
        parts: Sequence[tuple[UnreadPart, torch.Tensor]],
        stream: CudaStream,
        indices: torch.Tensor | RowPairs | None = None,
    ) -> None:
        values, tables = self.sorted_parts(parts)
        for value, dst in values:
            # torch's pinned allocator keeps it until the copy is done.
            self.copy(value, dst, stream)
        for rows in tables:
            self._queue("gather", *rows, stream, indices)

    def write(
        self,
        values: Sequence[_Table],
        rows: Rows,
        stream: CudaStream,
        indices: torch.Tensor | None = None,
    ) -> None:
        if len(rows):
            tables = [(store, _aligned(tensor, stream)) for store, tensor in values]
            self._queue("scatter", rows, tables, stream, indices)

    @staticmethod
    def sorted_parts(
        parts: Sequence[tuple[UnreadPart, torch.Tensor]],
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Iterable[tuple[Rows, list[_Table]]]]:
        """Return the tensors among parts, and the tables that have row indices in common."""
        values = []
        groups: dict[int, tuple[Rows, list[_Table]]] = {}
        for part, dst in parts:
            if hasattr(part, "host_value"):
                values.append((part.host_value, dst))
            elif dst.numel():
                rows: Rows = part.rows  # type: ignore[attr-defined]  # rows of a store
                groups.setdefault(id(rows), (rows, []))[1].append((part.store, dst))  # type: ignore[attr-defined]
        return values, groups.values()

    def _queue(
        self,
        kind: RowDirection,
        rows: Rows,
        tables: Sequence[_Table],
        stream: CudaStream,
        indices: torch.Tensor | RowPairs | None,
    ) -> None:
        assert self.engine_driver is not None
        move = self.move(kind, rows, tables, stream, indices)
        self.engine_driver.move_rows(stream.handle, move)

    def move(
        self,
        kind: RowDirection,
        rows: Rows,
        tables: Sequence[_Table],
        stream: CudaStream,
        indices: torch.Tensor | RowPairs | None,
    ) -> RowMove:
        """Return the move of rows from or to their tables.

        Row indices that are not on the GPU are copied to it in ``stream``.
        """
        stores, tensors = zip(*tables, strict=True)
        n, start, index_nbytes = len(rows), -1, 4
        if is_paired := isinstance(indices, RowPairs):
            n, address = indices.n, address_of(indices)
        elif (run := run_of(rows)) is not None:
            start, address = run.start, 0
        else:
            if indices is None:
                with queued_in(stream.raw):
                    # Allocated in this stream, so its memory is reused only after the launches.
                    indices = self._upload(rows, _index_dtype(stores))
            index_nbytes, address = indices.element_size(), indices.data_ptr()
        mover = self._mover(kind, stores, index_nbytes, paired=is_paired)
        packed = [tensor.data_ptr() for tensor in tensors]
        return mover.move(start, n, address, packed, indices)

    def _mover(
        self,
        kind: RowDirection,
        stores: tuple[PinnedStore, ...],
        index_nbytes: int,
        *,
        paired: bool,
    ) -> RowMover:
        """Return what queues moves of the rows of stores."""
        key = (kind, index_nbytes, paired, *stores)
        mover = self._movers.get(key)
        if mover is None:
            numbered = dict(enumerate(stores))
            moves = self.kernels.moves(kind, numbered, index_nbytes, paired=paired)
            self._movers[key] = mover = RowMover(moves, kind)
        return mover

    def _upload(self, rows: Rows, dtype: np.dtype[Any]) -> torch.Tensor:
        """Return row indices on the device, copied in the current stream.

        Unlike a copy from pageable memory, this does not block the host.
        """
        # torch's allocator of page-locked memory keeps the memory until the copy is done.
        staged = torch.empty(rows.shape, dtype=TORCH[dtype], device="cpu", pin_memory=True)
        staged.numpy()[...] = rows
        return staged.to(self._device, non_blocking=True)


def is_in_order(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in memory one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_aligned(values: torch.Tensor) -> bool:
    """Return whether kernels can read values by words of any size.

    Values of the user may have any layout, and begin anywhere in their memory.
    """
    return not values.data_ptr() % WIDEST_WORD and is_in_order(values)


def _aligned(values: torch.Tensor, stream: CudaStream) -> torch.Tensor:
    """Return values as kernels can read them in a stream."""
    if is_aligned(values):
        return values
    with queued_in(stream.raw):
        return plain(values).detach().clone(memory_format=torch.contiguous_format)


def _index_dtype(stores: Sequence[Store]) -> np.dtype[Any]:
    """Return the smallest dtype that holds every row index of these stores."""
    return np.dtype(np.int32 if max(store.n_rows for store in stores) < 1 << 31 else np.int64)
