"""Page-locked memory, which a driver locks, and unlocks after the last array on it dies."""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pinfeed.errors import DeviceError, described, logger
from pinfeed.memory.pages import PAGE, Bytes, Lease, advise_huge_pages, map_memory
from pinfeed.threads.pool import ThreadPool

# cudaHostRegisterPortable and Mapped: the memory is page-locked for every GPU, not only for the
# current one, and GPU kernels can access it.
REGISTER = 1 | 2
# Bytes that one thread touches at a time.
_TOUCH_BYTES = 64 << 20
# Drivers refuse to lock 512 GiB in one call (seen with r580 and later: xcena-dev/maru PR 64).
_LOCK_BYTES = 1 << 36

_locked: set[tuple[int, int]] = set()
"""Address and size of each piece that is page-locked."""


@dataclass(frozen=True)
class _Freed:
    """A page-locked piece of memory that no array uses.

    Attributes:
        unlock: Unlocks the piece, given its address.
        address: Address of the piece.
        nbytes: Size of the piece.
        memory: The whole memory, which keeps the mapping alive until the piece is unlocked.
        pid: The process that locked the piece.
    """

    unlock: Callable[[int], object]
    address: int
    nbytes: int
    memory: Bytes
    pid: int


freed: deque[_Freed] = deque()
"""Pieces to unlock: finalizers append to it at any time, and ``unlock_freed`` empties it.

A deque needs no lock for this.
"""
_kept: list[_Freed] = []
"""Pieces that stay mapped until the process ends.

Either the driver did not unlock the piece, or this is a forked process, which has no such memory at
its address. Other arrays may have been mapped at this address since.
"""


def locked_bytes() -> int:
    """Return the bytes that are page-locked now."""
    return sum(size for _, size in list(_locked))


def page_locked(
    nbytes: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]
) -> Bytes:
    """Return page-locked, zero-filled memory.

    After the last array on the memory dies, the next call of ``unlock_freed`` unlocks it. Forked
    processes do not inherit the memory, because locked pages must not become copy-on-write.

    Args:
        nbytes: Size, which is rounded up to whole pages. The pools of torch and CuPy round it up to
            a power of two.
        lock: Locks a piece, given its address and size; raises a RuntimeError with the driver's
            message.
        unlock: Unlocks a piece, given its address; raises a RuntimeError likewise.

    Raises:
        DeviceError: If the system does not have the memory, or the driver refuses to lock it.
    """
    unlock_freed()
    try:
        return _lock_pages(nbytes, lock, unlock)
    except (MemoryError, OSError, RuntimeError) as error:
        # The caller may retry with less memory, so locked pieces must not stay locked.
        unlock_freed()
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise DeviceError(
            f"{nbytes} bytes cannot be page-locked ({described(error)}; "
            f"`ulimit -l` is {allowed}, {locked_bytes()} bytes are locked)"
        ) from error


def unlock_freed() -> None:
    """Unlock page-locked memory without arrays, and return it to the system.

    Finalizers leave this to the threads that call pinfeed. The garbage collector runs a finalizer
    in the thread that it interrupts, and cudaHostUnregister in a thread that captures a CUDA graph
    invalidates the capture. The callers are code that takes page-locked memory, a loop that
    requests its next batch, and the ``close`` of a feeder or a device. Unlocking a large table
    takes time.
    """
    # A loop calls this for every batch, usually with nothing to unlock.
    while freed:
        try:
            piece = freed.popleft()
        except IndexError:
            return
        try:
            _unlock(piece)
        except BaseException:
            # After an interrupt, the next call unlocks it.
            freed.appendleft(piece)
            raise


def _unlock(freed: _Freed) -> None:
    piece = (freed.address, freed.nbytes)
    if freed.pid != os.getpid():
        _kept.append(freed)
        _locked.discard(piece)
        return
    try:
        freed.unlock(freed.address)
    except RuntimeError as error:
        logger.warning(
            "%d bytes of page-locked memory could not be unlocked, and stay mapped (%s)",
            freed.nbytes,
            error,
        )
        _kept.append(freed)
    else:
        _locked.discard(piece)


# At exit finalizers run in reverse order of creation, so this one runs after those of all
# page-locked memory.
weakref.finalize(_Freed, unlock_freed)


def _lock_pages(
    nbytes: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]
) -> Bytes:
    mapping = map_memory(nbytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    advise_huge_pages(mapping)
    memory = np.frombuffer(mapping, np.uint8)
    _touch(memory)
    lease = Lease()
    lease.owner = memory
    lease.__array_interface__ = memory.__array_interface__
    locked: list[weakref.finalize[..., Lease]] = []
    try:
        for start in range(0, len(memory), _LOCK_BYTES):
            address = memory.ctypes.data + start
            size = min(_LOCK_BYTES, len(memory) - start)
            lock(address, size)
            _locked.add((address, size))
            piece = _Freed(unlock, address, size, memory, os.getpid())
            locked.append(weakref.finalize(lease, freed.append, piece))
    except BaseException:
        # The traceback keeps the lease alive, so its finalizers are called here.
        for free in locked:
            free()
        raise
    return np.asarray(lease)


def _touch(memory: Bytes) -> None:
    """Fault all pages in with several threads, because the driver would do it one by one."""
    pieces = [
        memory[start : start + _TOUCH_BYTES : PAGE] for start in range(0, len(memory), _TOUCH_BYTES)
    ]
    if len(pieces) == 1:
        pieces[0].fill(0)
        return
    with ThreadPool(min(len(pieces), len(os.sched_getaffinity(0))), "pinfeed-touch") as threads:
        for _ in threads.map(lambda piece: piece.fill(0), pieces):
            pass
