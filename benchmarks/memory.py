"""Memory that a measurement leaves behind is given back before the next measurement."""

from __future__ import annotations

import gc
import sys

import torch

from pinfeed.memory.page_locked import unlock_freed


def free() -> None:
    """Give memory that nobody uses any more back to the system and to the driver.

    Raises:
        RuntimeError: The CUDA context is unusable after an earlier error.
    """
    gc.collect()
    if torch.cuda.is_available():
        # Kernels that still run may use memory that is page-locked.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    unlock_freed()
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()
