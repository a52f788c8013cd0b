"""A folder with a few files for every test of the command, and small measurements."""

from pathlib import Path

import numpy as np
import pytest
from support.command import X

from pinfeed import MiB
from pinfeed.cli import bandwidth, machine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run commands in a folder of their own, with a few files."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("s-0.npy", X[:300])
    np.save("s-1.npy", X[300:])
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(bandwidth, "_MEMORY_BYTES", MiB(1))
    return ["--seconds", "0.01", "--device", "cpu"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SPAN_BYTES", MiB(8))
    monkeypatch.setattr(bandwidth, "_MEMORY_BYTES", MiB(64))
