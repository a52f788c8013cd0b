"""Demand: the rows that a feeder moves, and the buffers that it needs to move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pinfeed.memory.depth import DEFAULT_DEPTH, n_batches, n_held
from pinfeed.memory.plan import Allocation, Place, Route

# Host memory is taken in whole pages.
_PAGE = 4096
# torch's caching allocator rounds to this.
_DEVICE_BLOCK = 512
# Row indices and positions are int64.
_INDEX_NBYTES = 8
OVERLAP_CHUNK_BYTES = 8 << 20
"""Most bytes that the device copies at once of the rows that two batches share."""
# Most bytes that an order of pinfeed.rows takes: three tables of 512 KiB, and arrays for a run of
# 16384 rows.
_ORDER_BYTES = 3 << 20


@dataclass(frozen=True)
class Demand:
    """The rows that a feeder moves, as far as its memory depends on them."""

    row_nbytes: tuple[int, ...]
    """Bytes of one row in each store."""
    writable: tuple[bool, ...]
    """Whether rows can be written back, for each store."""
    resident_bytes: int
    """Host memory that the stores take besides their rows, in bytes."""
    n_rows: int
    """Rows of one epoch, the most that a batch can have."""
    unified: bool
    """Whether batches live in host memory."""
    staged: tuple[bool, ...]
    """Whether the device does not reach the rows, for each store."""
    windows: tuple[tuple[int, int], ...] = ()
    """Rows of a window and bytes of a row, for each store whose windows are read ahead."""
    batches_per_slot: int = 1
    """Small batches that are gathered together."""

    @property
    def route(self) -> Route:
        """The route of the batches: direct only if the device reaches every store."""
        return "staged" if any(self.staged) else "direct"


def plan_allocations(demand: Demand, batch_size: int, depth: int) -> tuple[Allocation, ...]:
    """List every buffer that a feeder has at a time if the loop drops its batches.

    Args:
        demand: The rows that the feeder moves.
        batch_size: Rows of a batch; 0 if it is unknown, which gives an empty list.
        depth: Batches that are prefetched.
    """
    if batch_size == 0:
        return ()
    # A loop that writes prefetches no deeper than the default where small batches are gathered
    # together: see Feeder.batches.
    written_ahead = min(depth, DEFAULT_DEPTH) if demand.batches_per_slot > 1 else depth
    n_written = n_held(written_ahead) if any(demand.writable) else 0
    allocations = [
        *_batch_buffers(demand, batch_size, depth, n_written),
        *_row_index_buffers(demand, batch_size, depth, n_written),
        Allocation("the order of the rows", "host", 1, _ORDER_BYTES),
    ]
    if demand.resident_bytes:
        allocations.append(
            Allocation("memory of the stores besides their rows", "host", 1, demand.resident_bytes)
        )
    n_batch_rows = n_batches(depth, demand.batches_per_slot) * batch_size
    allocations += [
        window_allocation(window_rows, row_nbytes, n_batch_rows)
        for window_rows, row_nbytes in demand.windows
    ]
    return tuple(allocations)


def window_allocation(window_rows: int, row_nbytes: int, n_batch_rows: int) -> Allocation:
    """Return the memory that the windows of a file take.

    One window is read ahead. The ``n_batch_rows`` rows of the batches in memory lie in others,
    wherever these begin.
    """
    count = 2 + -(-n_batch_rows // window_rows)
    return Allocation("windows", "host", count, _round_up(window_rows * row_nbytes, _PAGE))


def _batch_buffers(demand: Demand, batch_size: int, depth: int, n_written: int) -> list[Allocation]:
    """List the buffers of whole batches: on the device, in staging memory, for write-backs."""
    place: Place = "host" if demand.unified else "device"
    block = _PAGE if demand.unified else _DEVICE_BLOCK

    def batch_nbytes(stores: Sequence[bool], block: int) -> int:
        return sum(
            max(block, _round_up(batch_size * nbytes, block))
            for nbytes, is_chosen in zip(demand.row_nbytes, stores, strict=True)
            if is_chosen
        )

    everything = batch_nbytes([True] * len(demand.row_nbytes), block)
    buffers = [Allocation("batches", place, n_batches(depth, demand.batches_per_slot), everything)]
    if n_written:
        nbytes = batch_nbytes(demand.writable, block)
        what = "values that are written back"
        buffers.append(Allocation(what, place, n_written, nbytes))
    if not demand.unified and any(demand.staged):
        nbytes = batch_nbytes(demand.staged, _PAGE)
        buffers.append(Allocation("staging", "pinned", depth + 1, nbytes))
        pairs = zip(demand.writable, demand.staged, strict=True)
        written = [writable and staged for writable, staged in pairs]
        if any(written):
            nbytes = batch_nbytes(written, _PAGE)
            buffers.append(Allocation("staging of a write-back", "pinned", 1, nbytes))
    return buffers


def _row_index_buffers(
    demand: Demand, batch_size: int, depth: int, n_written: int
) -> list[Allocation]:
    """List the buffers of row indices, on the host and for the device's kernels."""
    nbytes = batch_size * _INDEX_NBYTES
    # A write-back keeps its row indices, the same sorted, and the order that sorts them.
    n_arrays = depth + 3 + 3 * n_written
    buffers = [Allocation("row indices", "host", n_arrays, nbytes)]
    if demand.unified:
        return buffers
    if not all(demand.staged):
        # Kernels take the row indices of each slot and of a write-back.
        n_uploads = depth + 2
        pinned = _power_of_two(nbytes)
        uploaded = _round_up(nbytes, _DEVICE_BLOCK)
        buffers.append(Allocation("page-locked row indices", "pinned", n_uploads, pinned))
        buffers.append(Allocation("uploaded row indices", "device", n_uploads, uploaded))
    if n_written:
        buffers += _overlap_buffers(demand, batch_size)
    return buffers


def _overlap_buffers(demand: Demand, batch_size: int) -> list[Allocation]:
    """List the buffers for rows that a write-back and a prefetched batch have in common."""
    positions = 2 * batch_size * _INDEX_NBYTES
    pairs = zip(demand.row_nbytes, demand.writable, strict=True)
    row_nbytes = max(nbytes for nbytes, writable in pairs if writable)
    values = max(row_nbytes, min(OVERLAP_CHUNK_BYTES, batch_size * row_nbytes))
    on_device = _round_up(values + positions, _DEVICE_BLOCK)
    return [
        Allocation(
            "positions of rows that two batches share", "pinned", 2, _power_of_two(positions)
        ),
        Allocation("rows that two batches share", "device", 1, on_device),
    ]


def _round_up(nbytes: int, block: int) -> int:
    return -(-nbytes // block) * block


def _power_of_two(nbytes: int) -> int:
    """Round up to a power of two, as torch's allocator of pinned memory does."""
    return 1 << (nbytes - 1).bit_length()
