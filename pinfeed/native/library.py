"""Library: the compiled functions of this folder, if they were built; requests to files."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).with_name("libpinfeed.so.2")
SWITCH = "PINFEED_NATIVE"
"""Environment variable; with the value 0, nothing uses the compiled functions."""

Function = Callable[[bytes], int]
"""Takes its arguments as packed int64; see api.c."""


Integers = npt.NDArray[np.int64]

# After this many requests, an interrupt can end the call.
_N_REQUESTS = 256
_NO_BYTES = ctypes.c_char * 0
# Work on so many row indices takes less time than another thread needs to wake up, twice.
_BRIEF_ROWS = 2048


class RowFunctions:
    """The compiled functions that take the row indices of a batch.

    Args:
        loaded: The shared library.
    """

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.distinct_rows = _function(loaded, "pf_api_distinct_rows")
        self.first_occurrences = _function(loaded, "pf_api_first_occurrences")
        self.overlaps = _function(loaded, "pf_api_overlaps")


class Library:
    """The compiled functions. Each takes its arguments as the result of ``packed``.

    Args:
        path: The shared library.

    Raises:
        OSError: If the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        # The interpreter's lock is released during a call, unless the call is too short.
        releasing = ctypes.CDLL(str(path))
        holding = ctypes.PyDLL(str(path))
        self.copy = _function(releasing, "pf_api_copy")
        self.copy_runs = _function(releasing, "pf_api_copy_runs")
        self.permute = _function(releasing, "pf_api_permute")
        self.request_each = _function(releasing, "pf_api_request_each")
        self._brief_rows = RowFunctions(holding)
        self._rows = RowFunctions(releasing)
        self.decide = _function(releasing, "pf_api_decide")
        self.dense = _function(releasing, "pf_api_dense")
        self.open_engine = _function(releasing, "pf_api_engine_open")
        self.use_driver = _function(releasing, "pf_api_engine_use_driver")
        self.start_engine = _function(releasing, "pf_api_engine_start")
        self.submit = _function(holding, "pf_api_engine_submit")
        self.wait = _function(releasing, "pf_api_engine_wait")
        self.wait_again = _function(holding, "pf_api_engine_wait_again")
        self.help = _function(releasing, "pf_api_engine_help")
        self.stop_engine = _function(releasing, "pf_api_engine_stop")
        self.free_engine = _function(releasing, "pf_api_engine_free")
        self.open_writer = _function(releasing, "pf_api_writer_open")
        self.start_writer = _function(releasing, "pf_api_writer_start")
        self.queue_write = _function(holding, "pf_api_writer_write")
        self.step_writer = _function(releasing, "pf_api_writer_step")
        self.wait_write = _function(releasing, "pf_api_writer_wait")
        self.is_write_computed = _function(holding, "pf_api_writer_is_computed")
        self.stop_writer = _function(releasing, "pf_api_writer_stop")
        self.free_writer = _function(releasing, "pf_api_writer_free")
        self.receive = _function(holding, "pf_api_receive")
        self.queue = _function(holding, "pf_api_queue")
        self.queue_long = _function(releasing, "pf_api_queue")
        self.create_event = _function(holding, "pf_api_event_create")
        self.record_event = _function(holding, "pf_api_event_record")
        self.wait_event = _function(holding, "pf_api_event_wait")
        self.query_event = _function(holding, "pf_api_event_query")
        self.sync_event = _function(releasing, "pf_api_event_sync")
        self.queue_copy = _function(holding, "pf_api_copy_queued")
        self.move_rows = _function(holding, "pf_api_move_rows")
        self.copy_rows = _function(holding, "pf_api_copy_rows")
        self.count_maps = _function(holding, "pf_api_guard_count")

    def of_rows(self, n: int) -> RowFunctions:
        """Return the functions for ``n`` row indices, which keep the interpreter's lock for few."""
        return self._brief_rows if n <= _BRIEF_ROWS else self._rows


def _function(library: ctypes.CDLL, name: str) -> Function:
    function = library[name]
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return function


@functools.cache
def packing(n: int) -> Callable[..., bytes]:
    """Return a function that packs ``n`` arguments."""
    return struct.Struct(f"{n}q").pack


def address_of(array: npt.NDArray[Any]) -> int:
    """Return what ``array.ctypes.data`` does, which takes more than twice as long."""
    # numpy's types do not say that an array is a buffer.
    memory: Any = array
    try:
        return ctypes.addressof(_NO_BYTES.from_buffer(memory))
    except (TypeError, ValueError):
        # A read-only array, one with gaps, or one of a dtype that only numpy knows.
        return int(array.ctypes.data)


@functools.cache
def library() -> Library | None:
    """Return the library; None if there is none, for the reason that ``why_not`` returns."""
    if why_not():
        return None
    return Library(PATH)


def is_turned_off() -> bool:
    """Return whether the user has turned the compiled functions off."""
    return os.environ.get(SWITCH) == "0"


@functools.cache
def why_not() -> str:
    """Return why the compiled functions are not used; empty if they are."""
    if is_turned_off():
        return f"{SWITCH}=0 is set"
    if not PATH.exists():
        return "they were not built, because no C compiler was found during the installation"
    try:
        Library(PATH)
    except (OSError, AttributeError) as error:
        return f"{PATH.name} cannot be loaded: {error}"
    return ""


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
    arrays = [address_of(numbers) for numbers in (addresses, offsets, nbytes)]
    for i in range(0, len(offsets), _N_REQUESTS):
        n = min(_N_REQUESTS, len(offsets) - i)
        places = [address + 8 * i for address in (*arrays, address_of(results))]
        found.request_each(packing(7)(fd, kind, n, *places))
    return results
