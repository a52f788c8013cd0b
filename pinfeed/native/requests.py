"""request_each: many reads or writes of a file, without the interpreter's lock."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import library, packing

Integers = npt.NDArray[np.int64]

# After this many requests, an interrupt can end the call.
_N_REQUESTS = 256

_pack = packing(7)


class Kind(enum.IntEnum):
    """Kind of a request; see pinfeed.h."""

    READ = 0
    READ_CACHED = 1
    """Read only what is in the page cache."""
    WRITE = 2


def request_each(
    fd: int, kind: Kind, addresses: Integers, offsets: Integers, nbytes: Integers
) -> Integers | None:
    """Make n requests, each of which moves bytes between memory and a file, one after another.

    Args:
        fd: Descriptor of the file.
        kind: Kind of the requests.
        addresses: Address in memory of each request, shape (n,).
        offsets: Offset in the file of each request, shape (n,).
        nbytes: Bytes of each request, shape (n,).

    Returns:
        Bytes moved by each request, or its negative error number, shape (n,). The caller repeats
        those that moved fewer bytes one by one. None if the compiled functions are missing.
    """
    found = library()
    if found is None:
        return None
    results = np.zeros(len(offsets), np.int64)
    addresses, offsets, nbytes = (
        np.ascontiguousarray(numbers, np.int64) for numbers in (addresses, offsets, nbytes)
    )
    arrays = [numbers.ctypes.data for numbers in (addresses, offsets, nbytes)]
    for i in range(0, len(offsets), _N_REQUESTS):
        n = min(_N_REQUESTS, len(offsets) - i)
        places = [address + 8 * i for address in (*arrays, results.ctypes.data)]
        found.request_each(_pack(fd, kind, n, *places))
    return results
