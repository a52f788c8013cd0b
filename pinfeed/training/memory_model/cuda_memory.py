"""CachingAllocator: torch's allocator, simulated; and the workspaces of a step on a GPU.

Matrix products need workspaces of cuBLAS, which torch takes from its allocator. It makes one for
each pair of a cuBLAS handle and a stream, and keeps it. Each thread has a handle of its own
(``CublasHandlePool.cpp`` and ``DeviceThreadHandles.h`` of torch 2.8 to 2.13). Later versions
allocate a workspace for each product (pytorch 194311). All products of a stream then use the same
memory, and the estimate may count one workspace too many.

Sizes and policy of the simulated allocator are the defaults of
c10/cuda/CUDACachingAllocator.cpp: one stream, no expandable segments.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

# Size of a workspace on Hopper and Blackwell (pytorch 89027 and 175344). Other GPUs take 8.1 MiB.
# The GPU may be unknown here, and a query would initialize CUDA, which breaks later forks.
_WORKSPACE_BYTES = 32 << 20
_PRODUCTS = frozenset(
    {
        *("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"),
        *("_addmm_activation", "_foreach_mm", "_grouped_mm", "_int_mm"),
        *("_scaled_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
    }
)


def is_product(name: str) -> bool:
    """Return whether an operation, such as ``addmm_``, calls cuBLAS."""
    return name.removesuffix("_") in _PRODUCTS


def workspace_bytes(phases: Iterable[str]) -> int:
    """Return the bytes of the workspaces of a step in one stream.

    Autograd runs the backward pass on a GPU in a thread of its own (``engine.cpp`` of torch), which
    has a handle, and so a workspace, of its own.

    Args:
        phases: Phases of the step that multiply matrices; ``"backward"`` is the backward pass.
    """
    threads = {"autograd" if phase == "backward" else "loop" for phase in phases}
    return len(threads) * _size()


def _size() -> int:
    """Return the bytes of one workspace, at most."""
    # Pairs of a size in KiB and a count, such as ":4096:2:16:8".
    pairs = re.findall(":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(1024 * int(size) * int(n) for size, n in pairs) if pairs else _WORKSPACE_BYTES


def clear_workspaces() -> None:
    """Return the workspaces of all threads to torch's allocator; the next products make new ones.

    A CUDA graph must not be replayed afterwards if it was captured in a stream that had a workspace
    before, because its products would use memory that was freed.
    """
    # This is torch's own function for its tests of memory. torch without CUDA does not have it.
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        clear()


def use_cuda_defaults(optimizer: Any) -> None:
    """Make an optimizer on the CPU step parameters as it does on CUDA.

    By default, torch steps many parameters together on CUDA. That takes temporary memory of about
    the size of the parameters.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Make CPU operations save the same tensors for the backward pass as CUDA operations.

    Dropout saves a mask of bytes on CUDA, and a mask of floats on the CPU. Attention with dropout
    saves nothing on CUDA, and the whole matrix on the CPU. This context replaces the functions,
    because a TorchFunctionMode is not active in the backward pass, where a checkpoint runs the
    forward pass again.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    low_level = torch.dropout
    dropout = functional.dropout
    attention = functional.scaled_dot_product_attention

    def native(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if isinstance(x, FakeTensor) and training and 0 < p < 1 and not inplace:
            # Other threads compute with real tensors, which are not affected.
            return torch.native_dropout(x, p, True)[0]
        return dropout(x, p, training, inplace)

    # The parameters are those of torch's function.
    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return attention(
            query,
            key,
            value,
            attn_mask,
            0.0 if isinstance(query, FakeTensor) else dropout_p,
            *args,
            **kwargs,
        )

    torch.dropout = native  # type: ignore[assignment]
    functional.dropout = native  # type: ignore[assignment]
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        torch.dropout = low_level
        functional.dropout = dropout
        functional.scaled_dot_product_attention = attention


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
