"""Trial of batched copies, in a separate process, before the first of them.

Some drivers crash or hang in ``cuMemcpyBatchAsync`` (vllm-project/vllm#49276), and a process cannot
recover from either. Therefore the first feeder whose rows may be copied in batches runs
``python -m pinfeed.devices.batch_copy_trial INDEX SECONDS``, and ends it after a time limit. A file
remembers the result for each driver. The process does not import torch, so it starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.batch_copy import LONG_ROW_BYTES, MOST_COPIES, addresses, batch_copy
from pinfeed.devices.kernels import Move
from pinfeed.devices.route import cached_trial, routes_file
from pinfeed.errors import described
from pinfeed.memory.page_locked import REGISTER, page_locked

logger = logging.getLogger("pinfeed")

# The copies take about a second. The limit of the whole process also counts its start and the
# creation of a context, which take long on a busy machine.
_COPIES_LIMIT_S = 20.0
_LIMIT_S = 60.0
# A process that hangs inside the operating system may not end, and is then left alone.
_END_LIMIT_S = 5.0
_VERSION_FILE = pathlib.Path("/proc/driver/nvidia/version")
# Set in the process of a trial. An application that contains Python may be started instead of
# Python, and must not start a trial, which would start the application again.
_IN_TRIAL = "PINFEED_IN_BATCH_COPY_TRIAL"
# Other signals come from users, or from the operating system if memory is short.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
_TOO_LATE = "it did not end in time"


@functools.cache
def is_safe(index: int, gpu: str) -> bool:
    """Return whether the driver copies rows in batches without a fault.

    A driver with a fault causes a warning, once in each process.

    Args:
        index: Number of the GPU.
        gpu: Name of the GPU.
    """
    try:
        failure = cached_trial(trial_key(gpu), lambda: _run_trial(index))
    except (OSError, RuntimeError) as error:
        logger.info(
            "kernels move long rows on %s, because batched copies could not be tried in a separate "
            "process (%s)",
            gpu,
            described(error),
        )
        return False
    if failure:
        logger.warning(
            "kernels move long rows on %s, because batched copies by cuMemcpyBatchAsync of the %s "
            "failed in a trial: %s. Another driver may be faster. To repeat the trial, delete %s",
            *(gpu, driver_name(), failure, routes_file()),
        )
    return not failure


def trial_key(gpu: str) -> str:
    """Return the key of the remembered trial of a GPU with the installed driver."""
    return f"batched copies, {gpu}, {driver_name()}"


def driver_name() -> str:
    """Return the name of the installed driver, such as ``NVIDIA driver 580.82.07 (CUDA 13.0)``."""
    version, cuda = "of unknown version", ctypes.c_int()
    with contextlib.suppress(OSError):
        found = re.search(r"\d+\.\d[\d.]*", _VERSION_FILE.read_text())
        version = found[0] if found else version
    # The file may be missing, for example in Windows Subsystem for Linux.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    return f"NVIDIA driver {version} (CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10})"


def _run_trial(index: int) -> str:
    """Try batched copies in a separate process; return the fault of the driver, or an empty text.

    Raises:
        OSError: If the process cannot start.
        RuntimeError: If it ends before the first copy, or not because of the driver.
    """
    if not sys.executable or getattr(sys, "frozen", False) or _IN_TRIAL in os.environ:
        raise RuntimeError(f"sys.executable, which is {sys.executable!r}, does not start Python")
    arguments = [str(index), str(_COPIES_LIMIT_S)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pinfeed.devices.batch_copy_trial", *arguments],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    is_late = False
    try:
        written = process.communicate(timeout=_LIMIT_S)[0]
    except subprocess.TimeoutExpired as expired:
        written, is_late = expired.output or b"", True
    finally:
        _end(process)
    before, begins, after = written.decode(errors="replace").partition(BEGINS)
    failure = _TOO_LATE if is_late else _failure(process.returncode, after or before)
    if not begins:
        raise RuntimeError(failure or f"{sys.executable} did not run it")
    if not (is_late or _is_of_driver(process.returncode, failure)):
        raise RuntimeError(failure)
    return failure


def _environment() -> dict[str, str]:
    """Return the environment of the process, which finds the modules that this process finds.

    Files of the current folder do not replace modules, except in Python 3.10, which does not know
    the variable for this.
    """
    # The interactive interpreter may have found pinfeed in the current folder.
    path = [*filter(None, map(str, sys.path)), str(pathlib.Path(__file__).parents[2])]
    ours = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", _IN_TRIAL: "1"}
    return {**os.environ, **ours}


def _failure(code: int, text: str) -> str:
    """Return what went wrong in a process; an empty text if nothing did.

    Args:
        code: Its exit status, as ``subprocess`` gives it.
        text: Its output.
    """
    if code == 0:
        return ""
    if code == -signal.SIGALRM:
        return _TOO_LATE
    if code < 0:
        return f"a signal ended it ({signal.strsignal(-code)})"
    return (text.strip().splitlines() or [f"it ended with exit status {code}"])[-1]


def _is_of_driver(code: int, failure: str) -> bool:
    """Return whether the driver alone explains how the copies ended.

    Args:
        code: Exit status of the process, as ``subprocess`` gives it.
        failure: Its fault, as from ``_failure``; empty if it has none.
    """
    if code < 0:
        return -code in {*_CRASHES, signal.SIGALRM}
    # Another error, such as a MemoryError, is one of the machine.
    return not failure or failure.startswith("RuntimeError: ")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that has not ended."""
    assert process.stdout is not None
    process.stdout.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_LIMIT_S)


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
