"""Runs of the ``pinfeed`` command, in this process and in one of its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pinfeed
from pinfeed.cli.main import main

ROOT = Path(__file__).parents[2]


X = np.random.default_rng(0).normal(size=(500, 3, 8)).astype(np.float32)


class Result(NamedTuple):
    """Output of a command, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Result:
    """Run a command in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exited:
            status = int(exited.code or 0)
    return Result(status, stdout.getvalue(), stderr.getvalue())


def values(*arguments: str, status: int = 0) -> dict[str, Any]:
    """Run a command with ``--json``; return the one object that it prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == status, result
    found = json.loads(result.stdout)
    assert (found["pinfeed"], found["command"]) == (pinfeed.__version__, arguments[0])
    return dict(found)


def python(*arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
    )
