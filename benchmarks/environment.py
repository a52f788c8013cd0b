"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed
from pinfeed.native.library import why_not

RESULTS = Path(__file__).parent / "results"


def environment() -> str:
    """Describe the machine and the versions in one line."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gpu = (
        f", {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        if torch.cuda.is_available()
        else ", no GPU"
    )
    n_cores = len(os.sched_getaffinity(0))
    return (
        f"pinfeed {pinfeed.__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}, "
        f"{n_cores} cores of {cpu[1] if cpu else platform.machine()} "
        f"({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads), "
        f"Linux {platform.release().split('-')[0]}{gpu}, compiled part {compiled_part()}"
    )


def compiled_part() -> str:
    """Return ``"used"``, or why pinfeed's compiled part is not used."""
    return why_not() or "used"


def commit() -> str:
    """Return the commit of the source tree, with ``+`` if files differ from it."""
    command = ["git", "-C", str(RESULTS), "describe", "--always", "--abbrev=8", "--dirty=+"]
    command.append("--exclude=*")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown, because the source tree is not a git repository"


def launch_us(device: str, n: int = 2000) -> float:
    """Return the microseconds in which the host queues one small operation.

    It is the price of a launch on a GPU, and tells a slow host from a slow GPU.
    """
    x = torch.ones(64, device=device)
    for _ in range(n // 10):
        x.add_(1)
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(n):
        x.add_(1)
    seconds = time.perf_counter() - begin
    if device != "cpu":
        torch.cuda.synchronize()
    return round(seconds / n * 1e6, 2)


def machine() -> str:
    """Return a short name of the machine, for file names."""
    return (
        re.sub(r"\W+", "-", torch.cuda.get_device_name())
        if torch.cuda.is_available()
        else f"cpu-{len(os.sched_getaffinity(0))}-cores"
    )


def save(name: str, results: Any) -> Path:
    """Write results as JSON, with the environment."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{machine()}.json"
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    return path
