"""Trial of batched copies: ``python -m pinfeed.devices.batch_copy_trial INDEX SECONDS``.

``batch_copy_safety`` runs this module in a separate process, because some drivers crash or hang.
The module does not import torch, so that the process starts quickly.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.batch_copy import LONG_ROW_BYTES, MOST_COPIES, addresses, batch_copy
from pinfeed.devices.kernels import Move
from pinfeed.memory.page_locked import REGISTER, page_locked

BEGINS = "The copies begin."
"""Line that the process prints before the first copy."""
# Calls that are queued at once in each stream, and how often they are. Together they are more calls
# than a measurement of a route makes. The hang of vllm-project/vllm#49276 needs repeated calls.
_N_CALLS = 8
_N_ROUNDS = 8
_TABLE_BYTES = MOST_COPIES * LONG_ROW_BYTES
# The streams do not wait for the legacy default stream.
_NON_BLOCKING = 1


def main(index: int, limit_s: float) -> None:
    """Gather rows in one stream, and scatter those of the previous round in another stream.

    Args:
        index: Number of the GPU.
        limit_s: Seconds after which the signal SIGALRM ends the process, unless all copies are
            complete.

    Raises:
        RuntimeError: If the driver reports an error, or the rows are wrong.
    """
    copier = batch_copy()
    if copier is None:
        raise RuntimeError("the driver does not have cuMemcpyBatchAsync")
    gpu = _Gpu(index)
    table, written = gpu.page_locked_rows(), gpu.page_locked_rows()
    table[...] = np.arange(table.size).reshape(table.shape)
    gathered, scattered = gpu.memory(), gpu.memory()
    read, write = gpu.stream(), gpu.stream()
    # Consecutive rows would be one copy.
    order = np.random.default_rng(0).permutation(MOST_COPIES)
    print(BEGINS, flush=True)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    for i in range(_N_ROUNDS):
        gather = Move(table.ctypes.data, gathered, LONG_ROW_BYTES)
        scatter = Move(written.ctypes.data, scattered, LONG_ROW_BYTES)
        for _ in range(_N_CALLS):
            for in_table, packed in addresses(order, gather):
                copier.copy(read, in_table, packed, LONG_ROW_BYTES)
            for in_table, packed in addresses(order, scatter):
                copier.copy(write, packed, in_table, LONG_ROW_BYTES)
        gpu.sync(read)
        gpu.sync(write)
        # Nothing was gathered before the first round.
        if i > 0 and not np.array_equal(written, table - 1):
            raise RuntimeError("cuMemcpyBatchAsync copied wrong bytes")
        table += 1
        gathered, scattered = scattered, gathered


class _Gpu:
    """A GPU, whose context becomes current in the calling thread.

    Args:
        index: Number of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def page_locked_rows(self) -> npt.NDArray[np.int64]:
        """Return page-locked memory for long rows, shape (MOST_COPIES, words)."""

        def lock(address: int, nbytes: int) -> None:
            size = ctypes.c_size_t(nbytes)
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, REGISTER)

        def unlock(address: int) -> None:
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

        memory = page_locked(_TABLE_BYTES, lock, unlock)
        return memory[:_TABLE_BYTES].view(np.int64).reshape(MOST_COPIES, -1)

    def memory(self) -> int:
        """Return the address of device memory for as many rows."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(_TABLE_BYTES))
        return address.value

    def stream(self) -> int:
        """Return the handle of a new stream."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def sync(self, stream: int) -> None:
        """Wait until all copies of a stream are complete."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
