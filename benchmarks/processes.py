"""Jobs in processes of their own, so that every run has its own memory, allocator and threads."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def new_process() -> ProcessPoolExecutor:
    """Return an executor of one process, which shares no memory with this one."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def in_process(module: str, job: dict[str, Any], timeout_s: float = 90.0) -> Any:
    """Return the last line that ``python -m MODULE --one JOB`` prints, which is JSON.

    Raises:
        RuntimeError: If it fails or takes too long.
    """
    command = [sys.executable, "-m", module, "--one", json.dumps(job)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {timeout_s:g} s") from None
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
