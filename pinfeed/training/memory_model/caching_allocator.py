"""CachingAllocator: a simulation of torch's caching allocator of CUDA memory.

Sizes and policy are the defaults of c10/cuda/CUDACachingAllocator.cpp: one stream, no expandable
segments.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

_ROUND = 512
"""Bytes to which the size of a block is rounded up."""
_SMALL = 1 << 20
"""Largest size of a small tensor, in bytes; small tensors are in segments of their own kind."""
_SMALL_SEGMENT = 2 << 20
_MEDIUM = 10 << 20
"""Tensors above ``_SMALL`` and below this size are in segments of ``_MEDIUM_SEGMENT`` bytes."""
_MEDIUM_SEGMENT = 20 << 20
_ROUND_SEGMENT = 2 << 20
"""Bytes to which the size of a larger segment is rounded up."""

Event = tuple[int, int]
"""Allocation (number of a tensor, bytes) or free (number of a tensor, minus bytes)."""


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment."""

    size: int
    segment: int
    offset: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Key for best fit: the smallest block that is large enough, and the oldest of these."""
        return self.size, self.segment, self.offset


class CachingAllocator:
    """Simulated allocator, which is empty at first.

    Attributes:
        allocated: Bytes of the blocks of living tensors.
        reserved: Bytes of all segments, none of which is given back.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._n_segments = 0
        self._live: dict[int, _Block] = {}
        self._free: dict[bool, list[_Block]] = {True: [], False: []}
        """Free blocks of small and of other segments, sorted by their key."""

    def malloc(self, number: int, nbytes: int) -> None:
        """Allocate memory for a tensor."""
        size = rounded(nbytes)
        block = self._best_fit(size) or self._segment(size)
        rest = block.size - size
        if rest >= _ROUND if block.is_small else rest > _SMALL:
            self._split(block, size)
        block.is_free = False
        self._live[number] = block
        self.allocated += block.size

    def free(self, number: int) -> None:
        """Free the memory of a tensor; its segment stays reserved."""
        block = self._live.pop(number)
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                is_before = other is block.before
                block = _joined(other, block) if is_before else _joined(block, other)
        self._put(block)

    def _best_fit(self, size: int) -> _Block | None:
        free = self._free[size <= _SMALL]
        i = bisect.bisect_left(free, (size, -1, -1), key=_key)
        return free.pop(i) if i < len(free) else None

    def _segment(self, size: int) -> _Block:
        wanted = _segment_nbytes(size)
        self.reserved += wanted
        self._n_segments += 1
        return _Block(wanted, self._n_segments, 0, size <= _SMALL)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(
            block.size - size,
            block.segment,
            block.offset + size,
            block.is_small,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._put(rest)

    def _put(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], block, key=_key)

    def _remove(self, block: _Block) -> None:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, block.key, key=_key)]


def reserved_bytes(events: Iterable[Event]) -> int:
    """Return the bytes that torch's allocator reserves for a program's allocations and frees."""
    allocator = CachingAllocator()
    for number, nbytes in events:
        if nbytes > 0:
            allocator.malloc(number, nbytes)
        else:
            allocator.free(number)
    return allocator.reserved


def rounded(nbytes: int) -> int:
    """Return the size of the block for a tensor of ``nbytes`` bytes."""
    return max(1, -(-nbytes // _ROUND)) * _ROUND


def _key(block: _Block) -> tuple[int, int, int]:
    return block.key


def _segment_nbytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT


def _joined(first: _Block, second: _Block) -> _Block:
    """Join two adjacent blocks into the first one."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
