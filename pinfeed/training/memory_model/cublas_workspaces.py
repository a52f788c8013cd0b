"""Workspaces of cuBLAS: memory from torch's allocator that matrix products on a GPU keep.

torch makes a workspace for each pair of a cuBLAS handle and a stream, and keeps it. Each thread has
a handle of its own (``CublasHandlePool.cpp`` and ``DeviceThreadHandles.h`` of torch 2.8 to 2.13).
Later versions allocate a workspace for each product (pytorch 194311). All products of a stream then
use the same memory, and the estimate may count one workspace too many.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import torch

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
