"""Runs of the ``pinfeed`` command, in this process and in one of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import pinfeed
from pinfeed.cli.main import main

ROOT = Path(__file__).parents[2]


X = np.random.default_rng(0).normal(size=(500, 3, 8)).astype(np.float32)


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def values(*arguments: str, status: int = 0) -> dict[str, Any]:
    """Run a command with ``--json``; return the one object that it prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
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
