"""Parts in processes of their own, so that an error, a hang or a lack of memory ends only one."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]
LEAST_S = 12.0
"""Minimum time of a part. Most parts need some seconds to load their libraries."""
_BOUND = Path(__file__).with_name("bound.py")
_GRACE_S = 15.0
_N_LINES = 60
CRASH = "Fatal Python error"
"""Beginning of the dump of a Python process that crashed."""
_N_CRASH_LINES = 40


@dataclass(frozen=True)
class Part:
    """One part of a call.

    Args:
        name: Its name on the command line and in the name of its file.
        group: Name of the group it belongs to.
        share: Its share of the time, in proportion to the shares of the other parts.
        target: The function that returns its cells, written as ``module:function``.
    """

    name: str
    group: str
    share: float
    target: str


def run_parts(
    parts: Sequence[Part],
    *,
    seconds: float,
    out: Path,
    header: dict[str, Any],
    prefix: str,
    least_s: float = LEAST_S,
) -> list[Path]:
    """Run parts one after the other. Later parts may use the time that a part does not need.

    Args:
        parts: The parts.
        seconds: Time for all of them.
        out: Folder of the results.
        header: Fields of every result: the device (``cuda`` or ``cpu``), the command line and the
            commit.
        prefix: Beginning of the names of the files.
        least_s: Minimum time of a part, while time remains.

    Returns:
        The paths of the JSON files, one for each part.
    """
    end_s = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for i, part in enumerate(parts):
        left_s = end_s - time.monotonic()
        share = part.share / sum(other.share for other in parts[i:])
        limit_s = max(0.0, min(left_s, max(least_s, left_s * share)))
        path = new_file(out, f"{prefix}-{part.name}", ".json")
        print(f"=== {part.name}: up to {limit_s:.0f} s, {path}", flush=True)
        names = {"part": part.name, "group": part.group}
        run_part(part, path, names | header, limit_s, least_s)
        written.append(path)
    return written


def run_part(
    part: Part, path: Path, header: dict[str, Any], limit_s: float, least_s: float = 0.0
) -> None:
    """Run one part for up to ``limit_s`` seconds, and write to its file how it ended.

    A part is not started if ``limit_s`` is less than half of ``least_s``.
    """
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    header = {
        **header,
        "began": began,
        "limit_s": round(limit_s, 1),
        "status": "not started",
        "cells": [],
    }
    path.write_text(json.dumps(header, indent=1) + "\n")
    if limit_s < max(1.0, least_s / 2):
        print(f"{part.name} is not started: {limit_s:.1f} s remain", flush=True)
        return
    begin = time.monotonic()
    exit_status, output = _run(part, path, str(header["device"]), limit_s)
    record = json.loads(path.read_text())
    if exit_status is None:
        record["status"] = f"killed at its limit of {limit_s:.0f} s"
    elif exit_status != 0:
        record["status"] = f"crashed with exit status {exit_status}"
    record |= {
        "exit_status": exit_status,
        "seconds": round(time.monotonic() - begin, 1),
        "output": output,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{part.name}: {record['status']}, {record['seconds']} s, {len(record['cells'])} cells",
        flush=True,
    )


def _run(part: Part, path: Path, device: str, limit_s: float) -> tuple[int | None, list[str]]:
    """Return the exit status, None if it was killed, and the last lines that it printed."""
    limit = time.monotonic() + limit_s
    deadline = limit - min(_GRACE_S, 0.2 * limit_s)
    last = LastLines()
    command = (
        sys.executable,
        "-m",
        "benchmarks.gpu.child",
        part.target,
        str(path),
        device,
        str(deadline),
        str(limit),
    )
    # The temporary files of a part are removed even if it is killed.
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            bound(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
        )
        reader = threading.Thread(target=_echo, args=(process.stdout, last), daemon=True)
        reader.start()
        exit_status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_status = process.wait(timeout=max(0.0, limit - time.monotonic()))
        finally:
            end(process)
        reader.join(timeout=5)
    return exit_status, last.lines()


def bound(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that also ends if this process is killed.

    Processes of a session of their own would continue otherwise, and keep the GPU.
    """
    # A function that runs between fork and exec would need a copy of the page tables of a process
    # with many GB of page-locked memory.
    return (sys.executable, "-I", "-S", str(_BOUND), str(os.getpid()), *command)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session, and all processes that it has started."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    # A process that waits in the driver may not end at once.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def run_program(
    command: Sequence[str], limit_s: float, **environment: str
) -> tuple[int | None, str]:
    """Run a program for up to ``limit_s`` seconds.

    Returns:
        Its exit status, or None if it was killed, and its output.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            bound(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        exit_status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_status = process.wait(timeout=limit_s)
        finally:
            end(process)
        output.seek(0)
        return exit_status, output.read()


def machine() -> str:
    """Return a short name of the GPU, from another process: this one must not use the GPU."""
    code = "from benchmarks.environment import machine; print(machine())"
    status, output = run_program((sys.executable, "-c", code), 60.0)
    return output.split()[-1] if status == 0 else "unknown"


def last_lines(text: str, n: int = _N_LINES) -> list[str]:
    """Return the last lines of a program's output, after the head of a crash dump if any."""
    kept = LastLines(n)
    for line in text.strip().splitlines():
        kept.append(line)
    return kept.lines()


def new_file(folder: Path, stem: str, suffix: str) -> Path:
    """Create an empty file, whose name has the first number that is free."""
    number = 1
    while True:
        path = folder / f"{stem}-{number}{suffix}"
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return path


class LastLines:
    """The last lines of an output, after the head of a crash dump if there is one.

    The head has the signal and the innermost frames. The end of a dump lists threads and modules.
    """

    def __init__(self, n: int = _N_LINES) -> None:
        self._crash: list[str] = []
        self._last: deque[str] = deque(maxlen=n)

    def append(self, line: str) -> None:
        """Add a line."""
        if len(self._crash) < _N_CRASH_LINES and (self._crash or CRASH in line):
            self._crash.append(line)
        else:
            self._last.append(line)

    def lines(self) -> list[str]:
        """Return the lines that are kept."""
        return [*self._crash, *self._last]


def _echo(lines: IO[str], last: LastLines) -> None:
    with lines:
        for line in lines:
            last.append(line.rstrip("\n"))
            print(line, end="", flush=True)
