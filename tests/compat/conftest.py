"""Fixtures of the compatibility tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread: for tiny tensors, threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
