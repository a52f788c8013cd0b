"""Workspaces of cuBLAS: one for each thread that multiplies matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pinfeed
from pinfeed import MiB
from pinfeed.training.memory_model.cublas_workspaces import clear_workspaces, workspace_bytes


def test_each_thread_has_a_workspace() -> None:
    assert workspace_bytes([]) == 0
    assert workspace_bytes(["forward"]) == MiB(32)
    # The loop's thread runs the optimizer, too.
    assert workspace_bytes(["forward", "optimizer"]) == MiB(32)
    assert workspace_bytes(["forward", "backward", "optimizer"]) == MiB(64)


@pytest.mark.parametrize(
    ("make", "n"),
    [
        (lambda: nn.Linear(8, 8), 2),
        # torch multiplies the input's gradient by no matrix if the input needs none.
        (lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU()), 0),
        (lambda: nn.Linear(8, 8).requires_grad_(False), 1),
    ],
    ids=["linear", "convolution", "frozen"],
)
def test_a_step_counts_the_threads_that_multiply(make: Callable[[], nn.Module], n: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, 1))
            self.inner = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x) * self.scale
            return out

    estimate = pinfeed.estimate(Model, 4, input_shape=(8, 8), device="cuda")
    assert estimate.breakdown["workspace"] == n * MiB(32)
    assert sum(estimate.breakdown.values()) == estimate.reserved_bytes
    assert "workspace" not in pinfeed.estimate(Model, 4, input_shape=(8, 8), device="cpu").breakdown


def test_torch_without_cuda_has_no_workspaces_to_clear() -> None:
    clear_workspaces()


@pytest.mark.gpu
def test_workspaces_are_returned_to_the_allocator() -> None:
    """The backward pass makes a second workspace, in autograd's thread."""
    clear_workspaces()
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = (x @ x).sum()
    one = torch.cuda.memory_allocated() - before
    y.backward()
    both = torch.cuda.memory_allocated() - before
    clear_workspaces()
    assert torch.cuda.memory_allocated() - before < MiB(1)
    assert both - one > MiB(4)
