"""Host memory for rows: page-aligned blocks of exact size that go back to their pool when the last array on them dies.

A fresh block costs a page fault every 4 KiB, so a loop that drops its batches runs on the same few blocks for ever; a batch that
is kept keeps its block. ``malloc`` promises neither the alignment, nor the size, nor that freed memory leaves the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE
REGISTER = 1 | 2  # cudaHostRegisterPortable and Mapped: for every GPU, not only for the current one, and in reach of its kernels
_TOUCH_BYTES = 64 << 20  # that one thread touches at a time
_LOCK_BYTES = 1 << 36  # drivers refuse to lock 512 GiB in one call (seen with r580 and later: xcena-dev/maru PR 64)


def block_nbytes(nbytes: int) -> int:
    """What a block for ``nbytes`` takes: whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def anonymous(nbytes: int) -> Bytes:
    """Zero-filled memory of its own mapping, shape (block_nbytes(nbytes),), unmapped when the last array on it dies.

    Raises:
        MemoryError: The system has not so much.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, block_nbytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError as error:
        raise MemoryError(
            f"the system has no {nbytes} bytes for rows ({error.strerror}); ask for smaller batches or free memory"
        ) from error


def huge(nbytes: int) -> Bytes:
    """As ``anonymous``, in huge pages where the system has them: rows gathered at random from 4 KiB pages wait for the page tables."""
    mapping = mmap.mmap(-1, block_nbytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


class _Lease:
    """What every array on a block has as its base: its death tells that the block is free."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory  # the address below is good for as long as this lives
        self.__array_interface__: dict[str, Any] = memory.__array_interface__


class Pool:
    """Blocks for reuse. ``take`` and the death of an array may happen in any thread.

    Args:
        n_spare: Free blocks that are kept, of whatever size; beyond that, the one that was free for longest goes back to the system.
        make: Makes memory of at least that many bytes.
    """

    def __init__(self, n_spare: int, make: Callable[[int], Bytes] = anonymous) -> None:
        self._n_spare, self._make = n_spare, make
        # A deque and no lock: its operations are atomic, and a finalizer may run in the midst of anything, take() included.
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
        with contextlib.suppress(IndexError):  # others may take the last one meanwhile
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


def locked_bytes() -> int:
    """Bytes that are page-locked now."""
    return sum(size for _, size in list(_locked))


def page_locked(nbytes: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]) -> Bytes:
    """Memory as ``anonymous`` gives it, page-locked until the last array on it dies, or the interpreter ends.

    Forked processes do not inherit it: what the driver has locked must not become copy-on-write.

    Args:
        nbytes: Size, rounded up to whole pages and not to a power of two, as the pools of torch and CuPy do.
        lock: Called with address and size of each piece; raises what the driver says.
        unlock: Called with the address of each piece.
    """
    mapping = mmap.mmap(-1, block_nbytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    _touch(memory)
    lease = _Lease(memory)
    locked: list[weakref.finalize[..., _Lease]] = []
    try:
        for start in range(0, len(memory), _LOCK_BYTES):
            piece = memory.ctypes.data + start, min(_LOCK_BYTES, len(memory) - start)
            lock(*piece)
            _locked.add(piece)
            locked.append(weakref.finalize(lease, _unlock, unlock, piece, memory, os.getpid()))
    except BaseException:
        for unlock_piece in locked:
            unlock_piece()
        raise
    return np.asarray(lease)


def _touch(memory: Bytes) -> None:
    """Have the system give the pages now, by several threads: the driver would ask for them one by one."""
    pieces = [memory[start : start + _TOUCH_BYTES : PAGE] for start in range(0, len(memory), _TOUCH_BYTES)]
    if len(pieces) == 1:
        pieces[0].fill(0)
        return
    with ThreadPoolExecutor(min(len(pieces), len(os.sched_getaffinity(0)))) as threads:
        for _ in threads.map(lambda piece: piece.fill(0), pieces):
            pass


def _unlock(unlock: Callable[[int], object], piece: tuple[int, int], memory: Bytes, pid: int) -> None:
    """``memory`` is an argument so that the mapping outlives the lock on it. A forked process has neither."""
    _locked.discard(piece)
    if pid == os.getpid():
        unlock(piece[0])
