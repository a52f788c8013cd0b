"""Linux native AIO (io_submit(2)): many reads or writes of a file by one system call.

A read per row from Python takes the interpreter's lock a thousand times per batch. While a training
loop was busy in Python, a batch of 1,024 rows took 787 ms that way, and 5 ms by native AIO. A
gather from a memory map (``FileMap``) is even faster. However, a map is not suitable for a file
that is larger than memory, or that may shrink, because the kernel then ends the process (SIGBUS).

Every Linux kernel has the system call, but a sandbox may forbid it, and a system-wide limit
(fs.aio-max-nr) may be exhausted. ``AioContext.create`` then returns None, and the caller reads row
by row.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import platform
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

# IOCB_CMD_PREAD and IOCB_CMD_PWRITE of linux/aio_abi.h.
READ = 0
WRITE = 1
# RWF_NOWAIT of linux/fs.h: read only what is in the page cache.
NOWAIT = 8

# Requests per call: enough to share its cost, and few enough that the system-wide limit allows a
# hundred contexts.
N_REQUESTS = 256

# struct iocb and struct io_event of linux/aio_abi.h, little-endian.
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("address", "<u8"),
        ("nbytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("result_fd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_SETUP, _DESTROY, _SUBMIT, _GETEVENTS = range(4)
# Numbers of the system calls, because glibc has no functions for them.
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}


class AioContext:
    """Context of the kernel for ``N_REQUESTS`` requests at a time.

    One thread at a time may use it.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._pid = os.getpid()
        self._iocbs = np.zeros(N_REQUESTS, _IOCB)
        self._events = np.zeros(N_REQUESTS, _EVENT)
        self._iocbs["data"] = np.arange(N_REQUESTS)
        self._pointers = (self._iocbs.ctypes.data + _IOCB.itemsize * np.arange(N_REQUESTS)).astype(
            np.uint64
        )
        self._finalizer = weakref.finalize(self, _destroy, context, self._pid)
        # The kernel destroys the context when the process ends.
        self._finalizer.atexit = False

    @classmethod
    def create(cls) -> AioContext | None:
        """Return a new context, or None if the system does not allow one."""
        if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
            return None
        context = np.zeros(1, np.uint64)
        return cls(int(context[0])) if _call(_SETUP, N_REQUESTS, context.ctypes.data) == 0 else None

    @property
    def inherited(self) -> bool:
        """Whether this is a copy in a forked process, where the kernel has no such context."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Destroy the context. Further calls do nothing."""
        self._finalizer()

    def run(
        self,
        opcode: int,
        fd: int,
        addresses: Integers,
        offsets: Integers,
        nbytes: int | Integers,
        flags: int = 0,
    ) -> Integers:
        """Make n requests, each of which moves bytes between memory and the file.

        The interpreter's lock is released. The kernel does one request after another. With
        ``NOWAIT`` it skips requests for which it would have to wait.

        Args:
            opcode: ``READ`` or ``WRITE``.
            fd: Descriptor of the file.
            addresses: Address in memory of each request, shape (n,).
            offsets: Offset in the file of each request, shape (n,).
            nbytes: Bytes of each request, shape (n,), or one number for all.
            flags: ``NOWAIT``, or 0 to wait for the disk.

        Returns:
            Bytes moved by each request, or its negative error number, shape (n,). It is 0 for
            requests that the kernel did not accept, because it does not support every kind of file.
            The caller repeats those requests one by one.
        """
        results = np.zeros(len(offsets), np.int64)
        sizes = np.broadcast_to(nbytes, len(offsets))
        for i in range(0, len(offsets), N_REQUESTS):
            n = min(N_REQUESTS, len(offsets) - i)
            iocbs = self._iocbs[:n]
            iocbs["opcode"] = opcode
            iocbs["rw_flags"] = flags
            iocbs["fd"] = fd
            iocbs["nbytes"] = sizes[i : i + n]
            iocbs["address"] = addresses[i : i + n]
            iocbs["offset"] = offsets[i : i + n]
            submitted = self._submit(n)
            events = self._reap(submitted)
            results[i + events["data"].astype(np.intp)] = events["result"]
            if submitted < n:
                break
        return results

    def _submit(self, n: int) -> int:
        """Submit ``n`` requests, and return how many the kernel accepted."""
        done = 0
        while done < n:
            taken = _call(_SUBMIT, self._context, n - done, self._pointers[done:].ctypes.data)
            if taken <= 0 and ctypes.get_errno() != errno.EINTR:
                break
            done += max(0, taken)
        return done

    def _reap(self, n: int) -> npt.NDArray[Any]:
        """Wait until ``n`` requests are done, and return their events."""
        done = 0
        while done < n:
            got = _call(
                _GETEVENTS, self._context, n - done, n - done, self._events[done:].ctypes.data, 0
            )
            if got < 0 and (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))
            done += max(0, got)
        return self._events[:n]


class AioContextPool:
    """Contexts for any thread that needs one; a new one is created if none is idle.

    There are at most as many contexts as threads that use the pool at the same time.
    """

    def __init__(self) -> None:
        # Operations of a deque are atomic.
        self._idle: deque[AioContext] = deque()

    @contextlib.contextmanager
    def take(self) -> Iterator[AioContext | None]:
        """Take a context for the caller; None if the system does not allow one."""
        try:
            context: AioContext | None = self._idle.pop()
        except IndexError:
            context = None
        if context is None or context.inherited:
            context = AioContext.create()
        try:
            yield context
        except BaseException:
            if context is not None:
                # The context may hold events that were not collected. Its next user would mistake
                # them for the events of its own requests.
                context.close()
            raise
        if context is not None:
            self._idle.append(context)

    def close(self) -> None:
        """Destroy the idle contexts, all at once, because the kernel takes about 30 ms for each."""
        idle = [self._idle.pop() for _ in range(len(self._idle))]
        threads = [threading.Thread(target=context.close, name="pinfeed-close") for context in idle]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@functools.cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _call(which: int, *args: int) -> int:
    """Make the system call with the interpreter's lock released."""
    number = _NUMBERS[platform.machine()][which]
    return int(_syscall()(ctypes.c_long(number), *map(ctypes.c_ulong, args)))


def _destroy(context: int, pid: int) -> None:
    if pid == os.getpid():
        _call(_DESTROY, context)
