"""The differences between a training step on a GPU and the same step on the CPU.

Matrix products need workspaces of cuBLAS, which torch takes from its allocator. It makes one for
each pair of a cuBLAS handle and a stream, and keeps it. Each thread has a handle of its own
(``CublasHandlePool.cpp`` and ``DeviceThreadHandles.h`` of torch 2.8 to 2.13). Later versions
allocate a workspace for each product (pytorch 194311). All products of a stream then use the same
memory, and the estimate may count one workspace too many.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
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
