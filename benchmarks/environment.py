"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed

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
        f"Linux {platform.release().split('-')[0]}{gpu}"
    )


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
