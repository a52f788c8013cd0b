"""Many reads, or writes, of a file by one system call: Linux native AIO, io_submit(2), on the page cache.

A read per row from Python takes the interpreter's lock a thousand times a batch; beside a loop that
is busy in Python, a batch of 1,024 rows then took 787 ms, and 5 ms this way. A memory map would
need one call too, but leaves the file resident in the process, and ends the process (SIGBUS) where
the file has shrunk.

The kernel has the call on every Linux; a sandbox may forbid it, and a system-wide limit
(fs.aio-max-nr) may be used up. Then ``AioContext.create`` gives None, and the caller reads row by row.
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

READ, WRITE = 0, 1
# RWF_NOWAIT of linux/fs.h: only what is in the page cache.
NOWAIT = 8

# Per call: enough to share its cost, and few enough that the system-wide limit allows a hundred of
# these.
N_REQUESTS = 256

# struct iocb and struct io_event of linux/aio_abi.h, little-endian
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
# Their numbers: glibc has no functions for them.
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}


class AioContext:
    """A context of the kernel's for ``N_REQUESTS`` requests at a time.

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
        # The kernel does it when the process ends.
        self._finalizer.atexit = False

    @classmethod
    def create(cls) -> AioContext | None:
        """A new context, or None where there is none to be had."""
        if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
            return None
        context = np.zeros(1, np.uint64)
        return cls(int(context[0])) if _call(_SETUP, N_REQUESTS, context.ctypes.data) == 0 else None

    @property
    def inherited(self) -> bool:
        """Whether this is a copy in a forked process, where the kernel does not know it."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Give the context back. Idempotent."""
        self._finalizer()

    def run(
        self,
        opcode: int,
        fd: int,
        addresses: Integers,
        offsets: Integers,
        nbytes: int,
        flags: int = 0,
    ) -> Integers:
        """Read or write ``nbytes`` between memory at ``addresses[i]`` and the file at ``offsets[i]``, for every i.

        The interpreter's lock is free meanwhile. The kernel does one request after the other,
        unless with ``NOWAIT`` it passes over those that it would have to wait for.

        Returns:
            Bytes moved by each request, or its negative error number, shape (n,); 0 also for
            requests that the kernel did not take, as it does not for every kind of file: do those
            one by one.
        """
        results = np.zeros(len(offsets), np.int64)
        for i in range(0, len(offsets), N_REQUESTS):
            n = min(N_REQUESTS, len(offsets) - i)
            iocbs = self._iocbs[:n]
            iocbs["opcode"] = opcode
            iocbs["rw_flags"] = flags
            iocbs["fd"] = fd
            iocbs["nbytes"] = nbytes
            iocbs["address"], iocbs["offset"] = addresses[i : i + n], offsets[i : i + n]
            submitted = self._submit(n)
            events = self._reap(submitted)
            results[i + events["data"].astype(np.intp)] = events["result"]
            if submitted < n:
                break
        return results

    def _submit(self, n: int) -> int:
        """The number of requests that the kernel took."""
        done = 0
        while done < n:
            taken = _call(_SUBMIT, self._context, n - done, self._pointers[done:].ctypes.data)
            if taken <= 0 and ctypes.get_errno() != errno.EINTR:
                break
            done += max(0, taken)
        return done

    def _reap(self, n: int) -> npt.NDArray[Any]:
        """Wait until ``n`` requests are done."""
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
    """Requests for any thread that needs some, made when there is none to spare.

    At most as many as threads use it at a time.
    """

    def __init__(self) -> None:
        # Its operations are atomic.
        self._idle: deque[AioContext] = deque()

    @contextlib.contextmanager
    def take(self) -> Iterator[AioContext | None]:
        """One that is the caller's meanwhile; None where there is none to be had."""
        try:
            requests: AioContext | None = self._idle.pop()
        except IndexError:
            requests = None
        if requests is None or requests.inherited:
            requests = AioContext.create()
        try:
            yield requests
        except BaseException:
            if requests is not None:
                # It may hold answers that nobody has fetched: the next one to use it would take
                # them for his own.
                requests.close()
            raise
        if requests is not None:
            self._idle.append(requests)

    def close(self) -> None:
        """Give back those that nobody uses: all at once, for the kernel takes some hundredths of a second over each."""
        idle = [self._idle.pop() for _ in range(len(self._idle))]
        threads = [
            threading.Thread(target=requests.close, name="pinfeed-close") for requests in idle
        ]
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
    """The system call; the interpreter's lock is free meanwhile."""
    number = _NUMBERS[platform.machine()][which]
    return int(_syscall()(ctypes.c_long(number), *map(ctypes.c_ulong, args)))


def _destroy(context: int, pid: int) -> None:
    if pid == os.getpid():
        _call(_DESTROY, context)
