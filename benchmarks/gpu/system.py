"""The system that a call runs on, as its own programs and files describe it."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
import shutil
from pathlib import Path

from benchmarks.gpu.conditions import gpu_state, host_state
from benchmarks.gpu.processes import run_program
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped

_COMMANDS = (
    "nvidia-smi -q",
    "nvidia-smi topo -m",
    "lscpu",
    "free -m",
    "sh -c 'ulimit -a'",
    "df -h /tmp /dev/shm",
    "uname -srm",
)
_FILES = (
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/defrag",
    "/proc/meminfo",
    "/proc/driver/nvidia/params",
)
# These identify a machine of somebody else, and no measurement depends on them.
_PRIVATE = re.compile("UUID|Serial|Part Number|PDI", re.IGNORECASE)
_COMMAND_S = 20.0


def system(run: Run) -> list[Cell]:
    """Return cells of the conditions, what programs and files say, and the packages."""
    return [
        Cell({"what": "conditions"}, lambda: {**host_state(), **gpu_state()}),
        *(Cell({"command": text}, functools.partial(_said, run, text)) for text in _COMMANDS),
        *(Cell({"file": path}, functools.partial(_lines, Path(path))) for path in _FILES),
        # This reads a file of each package, which is slow on a remote disk.
        Cell({"what": "packages"}, _packages),
    ]


def _packages() -> Fields:
    found = importlib.metadata.distributions()
    return {"versions": dict(sorted((one.metadata["Name"], one.version) for one in found))}


def _said(run: Run, text: str) -> Fields:
    """Return what a program says; a program that hangs ends after some seconds."""
    command = shlex.split(text)
    if shutil.which(command[0]) is None:
        raise Skipped(f"the program {command[0]} is not installed")
    status, output = run_program(command, max(1.0, min(_COMMAND_S, run.left_s())))
    return {"exit_status": status, "lines": _public(output)}


def _lines(path: Path) -> Fields:
    try:
        return {"lines": _public(path.read_text())}
    except OSError as error:
        raise Skipped(f"{path} cannot be read: {error}") from error


def _public(text: str) -> list[str]:
    return [line for line in text.splitlines() if not _PRIVATE.search(line)]
