"""BatchCopy: copies of long rows by the copy engine, many in one call of the CUDA driver.

The copy engine leaves all multiprocessors to the model. CUDA 13.1 and later prefer it for these
copies; earlier drivers may use multiprocessors. A short row takes about as long as a row of a few
KiB, so kernels are faster for short rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from pinfeed.devices.kernels import Move
from pinfeed.rows.orders import Rows

Addresses = npt.NDArray[np.int64]
"""Addresses of rows, shape (n,)."""
LONG_ROW_BYTES = 32 << 10
"""Fewest bytes of a row that is worth a separate copy."""
MOST_COPIES = 1024
"""Most copies of one call.

Drivers have failed with tens of thousands of copies in one call. A loop that ends waits for the
current call.
"""
# Sources are read in stream order, after the earlier work of the stream.
_STREAM_ORDER = 1
# The driver should prefer copy engines to multiprocessors.
_OVERLAP_WITH_COMPUTE = 1


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of the driver."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    # Addresses of targets and of sources, and sizes in bytes.
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    # Attributes, and for each of them the first copy that has them.
    *(ctypes.POINTER(CopyAttributes), ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t),
    # Number of a copy that failed.
    ctypes.POINTER(ctypes.c_size_t),
    # Stream.
    ctypes.c_void_p,
)
"""Type of ``cuMemcpyBatchAsync`` as drivers have it from CUDA 12.8 on.

Drivers of CUDA 13 still export it. The headers of CUDA 13 use its name for another function,
``cuMemcpyBatchAsync_v2``, which does not report the failed copy.
"""


class BatchCopy:
    """Copies of rows between page-locked memory and the device, many in one call of the driver.

    Args:
        function: The function of the driver.
    """

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function
        self._attributes = CopyAttributes(_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)

    def copy(self, stream: int, sources: Addresses, targets: Addresses, row_nbytes: int) -> None:
        """Queue copies of rows, which the GPU does in any order.

        The context of the GPU must be current in the calling thread.

        Args:
            stream: Handle of the stream. The driver refuses the legacy default stream.
            sources: Addresses of the rows, shape (n,).
            targets: Addresses to which they are copied, shape (n,).
            row_nbytes: Bytes of a row.

        Raises:
            RuntimeError: If the driver refuses the copies.
        """
        # The driver reads the arrays during the call only.
        sizes = np.full(len(sources), row_nbytes, np.uint64)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._function(
            *(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes)),
            *(ctypes.byref(self._attributes), ctypes.byref(first), 1),
            ctypes.byref(failed),
            stream,
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {code}")


def addresses(rows: Rows, move: Move) -> Iterator[tuple[Addresses, Addresses]]:
    """Yield, for each call, the addresses of rows in the table and in the packed batch.

    Args:
        rows: Row indices on the host.
        move: Move of these rows.
    """
    for first in range(0, len(rows), MOST_COPIES):
        chosen = rows[first : first + MOST_COPIES]
        positions = np.arange(first, first + len(chosen))
        yield (
            move.table + chosen * move.row_nbytes,
            move.packed + positions * move.row_nbytes,
        )


@functools.cache
def batch_copy() -> BatchCopy | None:
    """Return the batched copy of the installed driver, or None if it has none."""
    try:
        return BatchCopy(PROTOTYPE(("cuMemcpyBatchAsync", ctypes.CDLL("libcuda.so.1"))))
    except (OSError, AttributeError):
        return None
