"""Demand: the rows that a feeder moves, and the buffers that it needs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pinfeed.memory.depth import DEFAULT_DEPTH, n_batches, n_held
from pinfeed.memory.plan import Allocation, Place, Route
from pinfeed.memory.transform_memory import TransformMemory

# Host memory is taken in whole pages.
_PAGE = 4096
# torch's caching allocator rounds to this.
_DEVICE_BLOCK = 512
# Row indices are int64, positions of shared rows int32.
_INDEX_NBYTES = 8
_POSITION_NBYTES = 4
# For each row of a recent batch: its index, its position, and a link to an earlier batch.
_RECENT_NBYTES = 8 + 2 * 4
# A table has an entry for each row of recent batches, and a power of two of entries.
_ENTRY_NBYTES = 4
OVERLAP_CHUNK_BYTES = 8 << 20
"""Most bytes that the device copies at once of the rows that batches share."""
# Most bytes that an order of pinfeed.rows needs: three tables of 512 KiB, and arrays for a run of
# 16384 rows.
_ORDER_BYTES = 3 << 20


@dataclass(frozen=True)
class Demand:
    """The properties of a feeder's rows that its memory depends on."""

    row_nbytes: tuple[int, ...]
    """Bytes of one row in each store."""
    writable: tuple[bool, ...]
    """Whether rows can be written back, for each store."""
    resident_bytes: int
    """Host memory that the stores need in addition to their rows, in bytes."""
    n_rows: int
    """Rows of one epoch, the most that a batch can have."""
    unified: bool
    """Whether batches live in host memory."""
    staged: tuple[bool, ...]
    """Whether the device cannot read the rows directly, for each store."""
    windows: tuple[tuple[int, int], ...] = ()
    """Rows of a window and bytes of a row, for each store whose windows are read ahead."""
    batches_per_slot: int = 1
    """Small batches that are gathered together."""
    repeats: bool = True
    """Whether a row may occur twice in an epoch."""
    ragged: tuple[Callable[[int], Sequence[int]], ...] = ()
    """For each ragged store, a function from the rows of a batch to the most bytes of its parts.

    Its rows are staged, and read-only.
    """

    transforms: TransformMemory | None = None
    """Memory of transforms; None if there are no transforms."""

    def part_nbytes(self, batch_size: int) -> list[int]:
        """Return the most bytes of each part of a batch, first those of stores, then ragged ones.

        Args:
            batch_size: Rows of the batch.
        """
        fixed = [batch_size * nbytes for nbytes in self.row_nbytes]
        return fixed + [nbytes for parts in self.ragged for nbytes in parts(batch_size)]

    @property
    def is_staged(self) -> tuple[bool, ...]:
        """Whether the device cannot read a part of a batch directly, for each part."""
        n_ragged = len(self.part_nbytes(1)) - len(self.staged)
        return self.staged + (not self.unified,) * n_ragged

    @property
    def is_written(self) -> tuple[bool, ...]:
        """Whether a part of a batch can be written back, for each part."""
        n_ragged = len(self.part_nbytes(1)) - len(self.writable)
        return self.writable + (False,) * n_ragged

    @property
    def route(self) -> Route:
        """The route of the batches: direct only if the device can read every store directly."""
        return "staged" if any(self.is_staged) else "direct"


def resident_allocation(nbytes: int) -> Allocation:
    """Return the memory that stores need in addition to their rows."""
    return Allocation("memory of the stores besides their rows", "host", 1, nbytes)


def plan_allocations(demand: Demand, batch_size: int, depth: int) -> tuple[Allocation, ...]:
    """List all buffers that a feeder holds at a time if the loop drops its batches.

    Args:
        demand: The rows that the feeder moves.
        batch_size: Rows of a batch; 0 if it is unknown, which gives an empty list.
        depth: Batches that are prefetched.
    """
    if batch_size == 0:
        return ()
    n_written = n_held(_written_ahead(demand, depth)) if any(demand.writable) else 0
    allocations = [
        *_batch_buffers(demand, batch_size, depth, n_written),
        *_row_index_buffers(demand, batch_size, depth, n_written),
        Allocation("the order of the rows", "host", 1, _ORDER_BYTES),
    ]
    if demand.transforms is not None:
        rows_nbytes = sum(demand.part_nbytes(batch_size))
        allocations += demand.transforms.allocations(rows_nbytes, depth, unified=demand.unified)
    if demand.resident_bytes:
        allocations.append(resident_allocation(demand.resident_bytes))
    n_batch_rows = n_batches(depth, demand.batches_per_slot) * batch_size
    allocations += [
        window_allocation(window_rows, row_nbytes, n_batch_rows)
        for window_rows, row_nbytes in demand.windows
    ]
    return tuple(allocations)


def window_allocation(window_rows: int, row_nbytes: int, n_batch_rows: int) -> Allocation:
    """Return the memory for the windows of a file.

    One window is read ahead. The ``n_batch_rows`` rows of the batches in memory are in other
    windows.
    """
    count = 2 + -(-n_batch_rows // window_rows)
    return Allocation("windows", "host", count, _round_up(window_rows * row_nbytes, _PAGE))


def _batch_buffers(demand: Demand, batch_size: int, depth: int, n_written: int) -> list[Allocation]:
    """List the buffers of whole batches: on the device, in staging memory, for write-backs."""
    place: Place = "host" if demand.unified else "device"
    block = _PAGE if demand.unified else _DEVICE_BLOCK

    nbytes_of = demand.part_nbytes(batch_size)

    def batch_nbytes(parts: Sequence[bool], block: int) -> int:
        return sum(
            max(block, _round_up(nbytes, block))
            for nbytes, is_chosen in zip(nbytes_of, parts, strict=True)
            if is_chosen
        )

    every_part = [True] * len(nbytes_of)
    if demand.transforms is not None and demand.transforms.has_host:
        rows_nbytes = batch_nbytes(every_part, _PAGE)
        return [Allocation("rows for host_transform", "host", n_batches(depth), rows_nbytes)]
    everything = batch_nbytes(every_part, block)
    buffers = [Allocation("batches", place, n_batches(depth, demand.batches_per_slot), everything)]
    if n_written:
        nbytes = batch_nbytes(demand.is_written, block)
        what = "values that are written back"
        buffers.append(Allocation(what, place, n_written, nbytes))
    if not demand.unified and any(demand.is_staged):
        nbytes = batch_nbytes(demand.is_staged, _PAGE)
        buffers.append(Allocation("staging", "pinned", depth + 1, nbytes))
        pairs = zip(demand.is_written, demand.is_staged, strict=True)
        written = [writable and staged for writable, staged in pairs]
        if any(written):
            nbytes = batch_nbytes(written, _PAGE)
            # Two write-backs overlap.
            buffers.append(Allocation("staging of a write-back", "pinned", 2, nbytes))
    return buffers


def _row_index_buffers(
    demand: Demand, batch_size: int, depth: int, n_written: int
) -> list[Allocation]:
    """List the buffers of row indices, on the host and for the device's kernels."""
    nbytes = batch_size * _INDEX_NBYTES
    buffers = [Allocation("row indices", "host", depth + 3 + n_written, nbytes)]
    if not demand.unified and not all(demand.staged):
        # Kernels take the row indices of each batch, also to write it back.
        pinned = _round_up(nbytes, _PAGE)
        uploaded = _round_up(nbytes, _DEVICE_BLOCK)
        buffers.append(Allocation("page-locked row indices", "pinned", depth + 1, pinned))
        n_uploads = depth + 2 + n_written
        buffers.append(Allocation("uploaded row indices", "device", n_uploads, uploaded))
    if n_written and depth and demand.repeats:
        ahead = _written_ahead(demand, depth)
        buffers += _shared_row_buffers(demand, batch_size, ahead, n_written)
    return buffers


def _shared_row_buffers(
    demand: Demand, batch_size: int, depth: int, n_written: int
) -> list[Allocation]:
    """List the buffers that find and copy rows that a batch shares with earlier ones."""
    # At most, every row is in every batch with which it is compared.
    positions = 2 * batch_size * _POSITION_NBYTES * n_written
    n_batches = depth + 2
    table = _power_of_two(n_written * batch_size) * _ENTRY_NBYTES
    # A reader thread may search rows in batches that a later batch no longer needs.
    n_recent = n_written + depth
    buffers = [
        Allocation("rows of recent batches", "host", n_recent, batch_size * _RECENT_NBYTES),
        Allocation("table of recent rows", "host", 1, table),
        Allocation("positions of shared rows", "host", n_batches, positions),
    ]
    if demand.unified:
        return buffers
    pairs = zip(demand.row_nbytes, demand.writable, strict=True)
    row_nbytes = max(nbytes for nbytes, writable in pairs if writable)
    values = max(row_nbytes, min(OVERLAP_CHUNK_BYTES, batch_size * row_nbytes))
    copied = _round_up(values + 2 * batch_size * _INDEX_NBYTES, _DEVICE_BLOCK)
    staged = _round_up(positions, _PAGE)
    return [
        *buffers,
        Allocation("staged positions of shared rows", "pinned", depth + 1, staged),
        Allocation("uploaded positions of shared rows", "device", n_batches, staged),
        Allocation("shared rows that are copied", "device", 1, copied),
    ]


def _written_ahead(demand: Demand, depth: int) -> int:
    """Return the number of batches that a loop which writes prefetches.

    If small batches are gathered together, it is at most the default; see ``Feeder.batches``.
    """
    return min(depth, DEFAULT_DEPTH) if demand.batches_per_slot > 1 else depth


def _round_up(nbytes: int, block: int) -> int:
    return -(-nbytes // block) * block


def _power_of_two(n: int) -> int:
    """Round up to a power of two."""
    return 1 << (n - 1).bit_length()
