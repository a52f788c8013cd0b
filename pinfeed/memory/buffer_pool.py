"""Host memory for rows: page-aligned blocks of exact size that go back to their pool when the last array on them dies.

A fresh block costs a page fault every 4 KiB, so a loop that drops its batches runs on the same few
blocks for ever; a batch that is kept keeps its block. ``malloc`` promises neither the alignment,
nor the size, nor that freed memory leaves the process.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import DeviceError, described
from pinfeed.threads.pool import ThreadPool

logger = logging.getLogger("pinfeed")

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE
# cudaHostRegisterPortable and Mapped: for every GPU, not only for the current one, and in reach of
# its kernels.
REGISTER = 1 | 2
# That one thread touches at a time.
_TOUCH_BYTES = 64 << 20
# Drivers refuse to lock 512 GiB in one call (seen with r580 and later: xcena-dev/maru PR 64).
_LOCK_BYTES = 1 << 36


def block_nbytes(nbytes: int) -> int:
    """What a block for ``nbytes`` takes: whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def anonymous(nbytes: int) -> Bytes:
    """Zero-filled memory of its own mapping, shape (block_nbytes(nbytes),), unmapped when the last array on it dies.

    Raises:
        MemoryError: The system has not so much.
    """
    return np.frombuffer(_mapping(nbytes), np.uint8)


def huge(nbytes: int) -> Bytes:
    """As ``anonymous``, in huge pages where the system has them: rows gathered at random from 4 KiB pages wait for the page tables."""
    mapping = _mapping(nbytes)
    _advise_huge_pages(mapping)
    return np.frombuffer(mapping, np.uint8)


def _mapping(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, block_nbytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        # OverflowError: more bytes than an address can tell.
        raise MemoryError(
            f"the system has no {nbytes} bytes for rows ({getattr(error, 'strerror', error)}); ask for smaller batches or free memory"
        ) from error


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    # A kernel without huge pages refuses.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


class _Lease:
    """What every array on a block has as its base: its death tells that the block is free."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: Bytes) -> None:
        # The address below is good for as long as this lives.
        self._memory = memory
        self.__array_interface__: dict[str, Any] = memory.__array_interface__


class BufferPool:
    """Blocks for reuse. ``take`` and the death of an array may happen in any thread.

    Args:
        n_spare: Free blocks that are kept, of whatever size; beyond that, the one that was free for
            longest goes back to the system.
        make: Makes memory of at least that many bytes.
    """

    def __init__(self, n_spare: int, make: Callable[[int], Bytes] = anonymous) -> None:
        self._n_spare = n_spare
        self._make = make
        # A deque and no lock: its operations are atomic, and a finalizer may run in the midst of
        # anything, take() included.
        self._free: deque[Bytes] = deque()

    def take(self, nbytes: int) -> Bytes:
        """Memory with old contents, shape (nbytes,); it is the caller's until the last array on it dies."""
        memory = self._find(block_nbytes(nbytes))
        if memory is None:
            memory = self._make(nbytes)
        lease = _Lease(memory)
        weakref.finalize(lease, self._give, memory).atexit = False
        return np.asarray(lease)[:nbytes]

    def close(self) -> None:
        """Give the free blocks back to the system; those still in use follow when their last array dies."""
        self._n_spare = 0
        self._free.clear()

    def _find(self, size: int) -> Bytes | None:
        with contextlib.suppress(IndexError):
            # Others may take the last one meanwhile.
            for _ in range(len(self._free)):
                memory = self._free.pop()
                if len(memory) == size:
                    return memory
                self._free.appendleft(memory)
        return None

    def _give(self, memory: Bytes) -> None:
        self._free.append(memory)
        with contextlib.suppress(IndexError):
            while len(self._free) > self._n_spare:
                self._free.popleft()


_locked: set[tuple[int, int]] = set()
"""Address and size of what is page-locked."""


@dataclass(frozen=True)
class _Freed:
    """A page-locked piece of memory that no array uses any more.

    Attributes:
        unlock: Called with the address.
        address: Where it begins.
        nbytes: Its size.
        memory: Its bytes, which keep the mapping alive until the piece is unlocked.
        pid: The process that locked it.
    """

    unlock: Callable[[int], object]
    address: int
    nbytes: int
    memory: Bytes
    pid: int


_freed: deque[_Freed] = deque()
"""Finalizers append to it, in any thread and at any time; ``unlock_freed`` empties it.

A deque needs no lock for that.
"""
_kept: list[_Freed] = []
"""Memory that stays mapped for ever.

The driver did not unlock it; or it is a hole in this forked process, which other arrays may fill.
"""


def locked_bytes() -> int:
    """Bytes that are page-locked now."""
    return sum(size for _, size in list(_locked))


def page_locked(
    nbytes: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]
) -> Bytes:
    """Memory as ``anonymous`` gives it, page-locked until ``unlock_freed`` is called after the last array on it has died.

    Forked processes do not inherit it: what the driver has locked must not become copy-on-write.

    Args:
        nbytes: Size, rounded up to whole pages and not to a power of two, as the pools of torch and
            CuPy do.
        lock: Called with address and size of each piece; raises a RuntimeError with what the driver
            says.
        unlock: Called with the address of each piece; raises a RuntimeError likewise.

    Raises:
        DeviceError: The system has no such memory, or the driver refuses to lock it.
    """
    unlock_freed()
    try:
        return _lock_pages(nbytes, lock, unlock)
    except (MemoryError, OSError, RuntimeError) as error:
        # The caller may try again with less, so pieces that were locked must not stay locked.
        unlock_freed()
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise DeviceError(
            f"{nbytes} bytes cannot be page-locked ({described(error)}; `ulimit -l` is {allowed}, {locked_bytes()} bytes are locked)"
        ) from error


def unlock_freed() -> None:
    """Unlock page-locked memory whose last array has died, and give it back to the system.

    Finalizers leave this to the threads that call pinfeed. The garbage collector runs a finalizer
    in whatever thread it interrupts, and cudaHostUnregister in a thread that captures a CUDA graph
    invalidates the capture. The callers are those that take page-locked memory, a loop that asks
    for its next batch, and whoever closes a feeder or a device. To unlock a large table takes time.
    """
    while True:
        try:
            freed = _freed.popleft()
        except IndexError:
            return
        try:
            _unlock(freed)
        except BaseException:
            # An interrupt: the next call does it.
            _freed.appendleft(freed)
            raise


def _unlock(freed: _Freed) -> None:
    piece = freed.address, freed.nbytes
    if freed.pid != os.getpid():
        _kept.append(freed)
        _locked.discard(piece)
        return
    try:
        freed.unlock(freed.address)
    except RuntimeError as error:
        logger.warning(
            "%d bytes of page-locked memory could not be unlocked, and stay as they are (%s)",
            freed.nbytes,
            error,
        )
        _kept.append(freed)
    else:
        _locked.discard(piece)


# At exit finalizers run in reverse order of creation, so this one runs after those of all
# page-locked memory.
weakref.finalize(BufferPool, unlock_freed)


def _lock_pages(
    nbytes: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]
) -> Bytes:
    mapping = _mapping(nbytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    _advise_huge_pages(mapping)
    memory = np.frombuffer(mapping, np.uint8)
    _touch(memory)
    lease = _Lease(memory)
    locked: list[weakref.finalize[..., _Lease]] = []
    try:
        for start in range(0, len(memory), _LOCK_BYTES):
            address = memory.ctypes.data + start
            size = min(_LOCK_BYTES, len(memory) - start)
            lock(address, size)
            _locked.add((address, size))
            freed = _Freed(unlock, address, size, memory, os.getpid())
            locked.append(weakref.finalize(lease, _freed.append, freed))
    except BaseException:
        # The traceback keeps the lease alive, so its finalizers are called here.
        for free in locked:
            free()
        raise
    return np.asarray(lease)


def _touch(memory: Bytes) -> None:
    """Have the system give the pages now, by several threads: the driver would ask for them one by one."""
    pieces = [
        memory[start : start + _TOUCH_BYTES : PAGE] for start in range(0, len(memory), _TOUCH_BYTES)
    ]
    if len(pieces) == 1:
        pieces[0].fill(0)
        return
    with ThreadPool(min(len(pieces), len(os.sched_getaffinity(0))), "pinfeed-touch") as threads:
        for _ in threads.map(lambda piece: piece.fill(0), pieces):
            pass
