"""Freeing memory between measurements."""

from __future__ import annotations

import gc
import sys

import torch

from pinfeed.memory.page_locked import unlock_freed


def free() -> None:
    """Return unused memory to the system and to the driver.

    Raises:
        RuntimeError: If the CUDA context is unusable after an earlier error.
    """
    gc.collect()
    if torch.cuda.is_available():
        # Running kernels may still use page-locked memory.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    unlock_freed()
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()
