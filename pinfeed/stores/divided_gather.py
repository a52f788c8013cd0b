"""Gathers of long batches into staging memory, divided into pieces that several threads copy."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import CheckStop, HostArray, StoreRows, memory_rows_of, part_nbytes

# Two cores are left to the program: one for the loop, and one for the second writer or a loader.
# Memory is as fast as some cores can copy.
N_GATHERING_THREADS = min(len(os.sched_getaffinity(0)) - 2, 16)
"""Number of threads that gather rows in memory for a GPU; at most 0 on a small machine."""

DIVIDED_NBYTES = 4 << 20
"""Bytes of a part from which on several threads gather it."""

# Waking a thread takes up to 50 us, in which it would copy about a tenth of a piece.
_PIECE_NBYTES = 2 << 20
# The device reads the rows next, so they are written past the caches. A gather of shorter rows
# waits for memory anyway, and these writes make it slower.
_BYPASS_ROW_NBYTES = 4 << 10


def gather_pieces(
    part: HostArray, out: npt.NDArray[Any], check_stop: CheckStop
) -> list[Callable[[], object]] | None:
    """Return calls that together gather a part; they may run at the same time.

    Args:
        part: Part of a batch.
        out: Staging memory for the part, of its shape and dtype.
        check_stop: Raises an error if the loop has ended; each call begins with it.

    Returns:
        The calls, or None if the part is short, or if its rows are not in memory from which the
        compiled functions copy.
    """
    if part_nbytes(part) < DIVIDED_NBYTES or type(part) is not StoreRows:
        return None
    memory_rows = memory_rows_of(part.store)
    if memory_rows is None:
        return None
    return list(_pieces(memory_rows, part.rows, out, check_stop))


def _pieces(
    memory_rows: MemoryRows, rows: Rows, out: npt.NDArray[Any], check_stop: CheckStop
) -> Iterator[Callable[[], object]]:
    bypass = memory_rows.row_nbytes >= _BYPASS_ROW_NBYTES
    step = max(1, _PIECE_NBYTES // memory_rows.row_nbytes)

    def gather(begin: int) -> None:
        check_stop()
        piece = slice(begin, begin + step)
        memory_rows.gather(rows[piece], out[piece], bypass=bypass)

    for begin in range(0, len(rows), step):
        yield functools.partial(gather, begin)
