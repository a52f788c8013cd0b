"""Workspace of operations on the CPU: predicted, and measured by the allocator's requests."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.allocations import peak_of_two_steps
from torch import nn

from pinfeed.training.memory_model.confidence import _VARIABLES
from pinfeed.training.memory_model.convolutions import Convolution
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.report import Estimate
from pinfeed.training.memory_model.tensor_specs import samples_of


def why_not_measured() -> str:
    """Return why oneDNN may use other layouts here than where they were measured, or ""."""
    capability, version = torch.backends.cpu.get_cpu_capability(), torch.__version__
    if capability != "AVX512" or "GenuineIntel" not in Path("/proc/cpuinfo").read_text():
        return "not an Intel CPU with AVX-512"
    if not os.environ.keys().isdisjoint(_VARIABLES):
        return "an environment variable makes it another CPU"
    return (
        "" if (2, 11) <= tuple(map(int, version.split(".")[:2])) <= (2, 13) else f"torch {version}"
    )


with_onednn = pytest.mark.skipif(
    bool(why_not_measured()), reason=f"oneDNN's choices: {why_not_measured()}"
)
with_avx = pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(),
    reason="tiles are those of x86",
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Compute with one thread, because the memory of each thread would hide the workspace."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def estimated(model: Any, shape: tuple[int, ...], loss: Any) -> Estimate:
    parts = samples_of(shape[1:], "float32", "input"), None
    return StepEstimator(
        model,
        *parts,
        loss=loss,
        optimizer=sgd,
        device="cpu",
    ).at(shape[0])


def ratio(model: Any, shape: tuple[int, ...], loss: Any) -> tuple[float, str]:
    """Return predicted bytes divided by measured bytes, and the confidence."""
    estimate = estimated(model, shape, loss)
    taken = peak_of_two_steps(model, torch.zeros(shape), torch.zeros(0), loss, sgd)
    return estimate.allocated_bytes / taken, estimate.confidence


def of_few(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    """Return a loss that takes almost no memory for itself."""
    return outputs[..., :1].sum()


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), (4, 32, 32, 32)),
    "channels that fill no block": (lambda: nn.Conv2d(20, 20, 3, padding=1), (4, 20, 32, 32)),
    "groups": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=8), (4, 64, 24, 24)),
    "groups of odd channels": (lambda: nn.Conv2d(48, 48, 3, padding=1, groups=8), (4, 48, 32, 32)),
    "depthwise": (lambda: nn.Conv2d(64, 64, 7, padding=3, groups=64), (4, 64, 24, 24)),
    "dilated": (lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2), (4, 32, 32, 32)),
    "one sample": (lambda: nn.Conv2d(16, 16, 3, padding=1), (1, 16, 16, 16)),
    "1D": (lambda: nn.Conv1d(48, 48, 3, padding=1), (4, 48, 1000)),
    "3D": (lambda: nn.Conv3d(32, 32, 3, padding=1), (2, 32, 8, 16, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 32, 3, padding=1), (4, 32, 32, 32)),
    "channels last": (
        lambda: nn.Sequential(ChannelsLast(), nn.Conv2d(32, 32, 3, padding=1)),
        (4, 32, 32, 32),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)),
        (32, 16, 32, 32),
    ),
    "widened": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 1), nn.Upsample(scale_factor=2)),
        (4, 16, 32, 32),
    ),
    "LSTM": (lambda: First(nn.LSTM(64, 128, 2, batch_first=True)), (8, 40, 64)),
    "LSTM, both ways": (
        lambda: First(nn.LSTM(64, 64, bidirectional=True, bias=False)),
        (40, 8, 64),
    ),
}


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class ChannelsLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(memory_format=torch.channels_last)


@with_onednn
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_the_predicted_workspace(layer: str) -> None:
    found, confidence = ratio(*LAYERS[layer], of_few)
    assert 0.95 <= found <= 1.05
    assert confidence == "close"


@with_onednn
@pytest.mark.parametrize("kernel", [2, 4])
def test_a_strided_transposed_convolution_makes_three_results(kernel: int) -> None:
    found, _ = ratio(
        lambda: nn.ConvTranspose2d(32, 32, kernel, 2, kernel // 2 - 1),
        (8, 32, 32, 32),
        of_few,
    )
    assert 0.95 <= found <= 1.05


@with_avx
@pytest.mark.parametrize(
    "loss",
    [
        lambda y, _: nn.functional.mse_loss(y, torch.zeros_like(y)),
        lambda y, _: nn.functional.binary_cross_entropy_with_logits(y, torch.zeros_like(y)),
        lambda y, _: y.logsumexp(1).sum(),
        lambda y, _: nn.functional.scaled_dot_product_attention(
            *(y.unflatten(1, (2, 25, 10)),) * 3,
            dropout_p=0.1,
        ).sum(),
        lambda y, _: nn.functional.scaled_dot_product_attention(
            *(y.unflatten(1, (2, 25, 10)),) * 3,
        ).sum(),
        lambda y, _: nn.functional.binary_cross_entropy(y.sigmoid(), torch.zeros_like(y)),
        lambda y, _: nn.functional.group_norm(y, 10).sum(),
    ],
    ids=[
        "squares",
        "binary",
        "logsumexp",
        "attention with dropout",
        "attention",
        "entropy",
        "group norm",
    ],
)
def test_losses_take_the_predicted_workspace(loss: Any) -> None:
    found, confidence = ratio(lambda: nn.Linear(20, 500), (256, 20), loss)
    assert 0.98 <= found <= 1.02
    assert confidence == "exact"


def test_the_workspace_of_libraries_is_unknown() -> None:
    _, confidence = ratio(
        lambda: nn.Linear(8, 8),
        (8, 8),
        lambda y, _: torch.fft.rfft(y).abs().sum(),
    )
    assert confidence == "low"


@pytest.mark.parametrize(
    ("block", "onward", "weight"),
    [
        # Twenty channels take the memory of 32: two blocks of 16; or of 24: three blocks of 8.
        (16, [(4 * (2 * 32 * 64 + 9 * 32 * 32), 0), (4 * 32 * 64, 1)], 4 * 9 * 32 * 32),
        (8, [(4 * (2 * 24 * 64 + 9 * 24 * 24), 0), (4 * 24 * 64, 1)], 4 * 9 * 24 * 24),
    ],
)
def test_operands_are_copied_in_blocks_of_channels(block: int, onward: Any, weight: int) -> None:
    one = convolution(block)
    assert one.forward_stages() == onward
    assert one.weight_stages(1) == [(onward[0][0], 1), (weight, 2)]


def test_every_thread_makes_columns_of_its_own() -> None:
    (one, _), (many, _) = (
        convolution(16, padding=(16, 16), n_threads=n).forward_stages()[0] for n in (1, 4)
    )
    assert many - one == 3 * 4 * 9 * 20 * 64


def convolution(block: int, padding: tuple[int, int] = (1, 1), n_threads: int = 1) -> Convolution:
    """Return a convolution of one sample with 20 channels of 8 × 8."""
    return Convolution(
        x=(1, 20, 8, 8),
        w=(20, 20, 3, 3),
        y=(1, 20, 8, 8),
        stride=(1, 1),
        padding=padding,
        dilation=(1, 1),
        groups=1,
        itemsize=4,
        n_threads=n_threads,
        block=block,
    )


def test_layers_are_close_only_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def confidence(layer: str) -> str:
        return estimated(*LAYERS[layer], of_few).confidence

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for layer in ("convolution", "LSTM"):
        assert confidence(layer) == "close"
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        assert confidence(layer) == "low"
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        assert confidence(layer) == "low"
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert confidence(layer) == "low"
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    low = estimated(lambda: Halves(), (8, 20), of_few)
    assert low.confidence == "low"
    assert "half precision" in "".join(low.notes)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 20, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() @ self.weight
