"""Recognition of out-of-memory errors, and release of memory after one."""

from __future__ import annotations

import gc

import torch

_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    It recognises errors of torch, CUDA and its libraries, the CPU's allocator and numpy.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def release_cached_memory() -> None:
    """Free dead objects, and return the allocator's unused memory to the device.

    Call it after the ``except`` block of the error, because within the block the traceback keeps
    the tensors of the failed frames alive.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
