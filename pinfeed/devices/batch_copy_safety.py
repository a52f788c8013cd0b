"""Check that the driver copies rows in batches without a fault, in a separate process.

Some drivers crash or hang in ``cuMemcpyBatchAsync`` (vllm-project/vllm#49276), and a process cannot
recover from either. Therefore the first feeder whose rows may be copied in batches runs
``batch_copy_trial``, and ends it after a time limit. A file remembers the result for each driver.
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

from pinfeed.devices.batch_copy_trial import BEGINS
from pinfeed.devices.route_cache import Trial, cached_trial, routes_file
from pinfeed.errors import described

logger = logging.getLogger("pinfeed")

# The copies take about a second. The limit of the whole process also counts its start and the
# creation of a context, which take long on a busy machine.
_COPIES_LIMIT_S = 20.0
_LIMIT_S = 60.0
# A process that hangs inside the operating system may not end, and is then left alone.
_END_LIMIT_S = 5.0
_VERSION_FILE = pathlib.Path("/proc/driver/nvidia/version")


@functools.cache
def is_safe(index: int, gpu: str) -> bool:
    """Return whether the driver copies rows in batches without a fault.

    A driver with a fault causes a warning, once in each process.

    Args:
        index: Number of the GPU.
        gpu: Name of the GPU.
    """
    driver = driver_name()
    try:
        trial = cached_trial(f"batched copies, {gpu}, {driver}", lambda: _run_trial(index))
    except (OSError, RuntimeError) as error:
        logger.info(
            "kernels move long rows on %s, because batched copies could not be tried in a separate "
            "process (%s)",
            gpu,
            described(error),
        )
        return False
    if trial.failure:
        logger.warning(
            "kernels move long rows on %s, because batched copies by cuMemcpyBatchAsync of the %s "
            "failed in a trial: %s. Another driver may be faster. To repeat the trial, delete %s",
            *(gpu, driver, trial.failure, routes_file()),
        )
    return not trial.failure


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


def _run_trial(index: int) -> Trial:
    """Try batched copies in a separate process.

    Raises:
        OSError: If the process cannot start.
        RuntimeError: If it ends before the first copy.
    """
    if not sys.executable:
        raise RuntimeError("sys.executable is empty")
    arguments = [str(index), str(_COPIES_LIMIT_S)]
    command = [sys.executable, "-m", "pinfeed.devices.batch_copy_trial", *arguments]
    # The process finds the modules that this process has found.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        written = process.communicate(timeout=_LIMIT_S)[0]
    except subprocess.TimeoutExpired as expired:
        written = expired.output or b""
    finally:
        _end(process)
    before, begins, after = written.decode(errors="replace").partition(BEGINS)
    failure = _failure(process.returncode, after or before)
    if not begins:
        raise RuntimeError(failure or f"{sys.executable} did not run it")
    return Trial(failure)


def _failure(code: int | None, text: str) -> str:
    """Return what went wrong in a process; an empty text if nothing did.

    Args:
        code: Its exit status, as ``subprocess`` gives it; None if it has not ended.
        text: Its output.
    """
    if code == 0:
        return ""
    if code in (None, -signal.SIGALRM, -signal.SIGKILL):
        return "it did not end in time"
    if code < 0:
        return f"a signal ended it ({signal.strsignal(-code)})"
    return (text.strip().splitlines() or [f"it ended with exit status {code}"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that has not ended."""
    assert process.stdout is not None
    process.stdout.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_LIMIT_S)
