"""A folder with a few files for every test of the command."""

from pathlib import Path

import numpy as np
import pytest
from support.command import X


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run commands in a folder of their own, with a few files."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("s-0.npy", X[:300])
    np.save("s-1.npy", X[300:])
    return tmp_path
