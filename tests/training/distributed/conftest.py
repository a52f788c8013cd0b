"""Tests of sharded tables run on one torch thread."""

from collections.abc import Iterator

import pytest
import torch
from support.without_fsync import without_fsync

__all__ = ["without_fsync"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because more of them slow down work on small tensors."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
