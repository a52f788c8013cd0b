"""Workspaces of cuBLAS: one for each thread that multiplies matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pinfeed
from pinfeed import MiB
from pinfeed.training.memory_model.cuda_memory import clear_workspaces, workspace_bytes
from pinfeed.training.memory_model.storage_tracker import StorageTracker


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


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (None, MiB(32)),
        ("", MiB(32)),
        ("none", MiB(32)),
        (":4096:8", MiB(32)),
        (":16:8", 128 << 10),
        (":4096:2:16:8", MiB(8) + (128 << 10)),
    ],
)
def test_the_size_that_the_environment_sets(
    config: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert workspace_bytes(["forward"]) == size


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("addmm_", [(8, 8), (8, 8), (8, 8)]),
        ("addmv_", [(8,), (8, 8), (8,)]),
        ("addbmm", [(8, 8), (2, 8, 8), (2, 8, 8)]),
        ("baddbmm_", [(2, 8, 8), (2, 8, 8), (2, 8, 8)]),
        ("_grouped_mm", [(2, 8, 8), (2, 8, 8)]),
        ("_int_mm", [(32, 8), (8, 8)]),
        ("_scaled_mm", [(16, 16), (16, 16), (), ()]),
        ("sin_", [(8,)]),
    ],
)
def test_products_in_place_and_of_other_dtypes_need_a_workspace(
    name: str, arguments: list[tuple[int, ...]]
) -> None:
    dtypes = {"_grouped_mm": torch.bfloat16, "_int_mm": torch.int8}
    tensors = [torch.zeros(shape, dtype=dtypes.get(name), device="meta") for shape in arguments]
    if name == "_scaled_mm":
        # The second matrix has its columns in a row.
        tensors[:2] = [tensors[0].to(torch.float8_e4m3fn), tensors[1].to(torch.float8_e4m3fn).t()]
    tracker = StorageTracker(is_cpu=False)
    with tracker:
        getattr(torch.ops.aten, name)(*tensors)
    assert len(tracker.multiplying) == (name != "sin_")


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
    if one < MiB(4):
        pytest.skip("this version of torch keeps no workspace")
    y.backward()
    both = torch.cuda.memory_allocated() - before
    clear_workspaces()
    assert torch.cuda.memory_allocated() - before < MiB(1)
    assert both - one > MiB(4)
