"""Workspaces of cuBLAS: memory from torch's allocator that matrix products on a GPU keep.

torch makes a workspace for each pair of a cuBLAS handle and a stream, and keeps it. Each thread has
a handle of its own (``CublasHandlePool.cpp`` and ``DeviceThreadHandles.h`` of torch 2.8 to 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WORKSPACE_BYTES = 32 << 20
"""Size of a workspace on Hopper (pytorch 89027 and 175344); other GPUs take less."""

PRODUCTS = frozenset(
    {"addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot", "_addmm_activation"}
)
"""Operations that call cuBLAS."""


def workspace_bytes(phases: Iterable[str]) -> int:
    """Return the bytes of the workspaces of a step in one stream.

    Autograd runs the backward pass on a GPU in a thread of its own (``engine.cpp`` of torch), which
    has a handle, and so a workspace, of its own.

    Args:
        phases: Phases of the step that multiply matrices; ``"backward"`` is the backward pass.
    """
    threads = {"autograd" if phase == "backward" else "loop" for phase in phases}
    return len(threads) * _WORKSPACE_BYTES


def clear_workspaces() -> None:
    """Return the workspaces of all threads to torch's allocator; the next products make new ones.

    A CUDA graph must not be replayed afterwards if it was captured in a stream that had a workspace
    before, because its products would use memory that was freed.
    """
    # This is torch's own function for its tests of memory. torch without CUDA does not have it.
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        clear()
