"""What operations take on the CPU beside their results: predicted, and asked of the allocator."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pinfeed.training.memory.estimate import StepEstimator
from pinfeed.training.memory.shapes import samples_of

pytestmark = pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(),
    reason="oneDNN's layouts are those of CPUs with AVX2 or AVX-512",
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Each thread takes memory of its own, which would hide what is looked for."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def measured(model: Any, shape: tuple[int, ...], loss: Any) -> int:
    """Most bytes at a time of two steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for _ in range(2):
            inputs = torch.zeros(shape)
            outputs = made(inputs)
            found = loss(outputs, None)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
    now = most = 0
    for event in sorted(
        (e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    ):
        now += event.nbytes()
        most = max(most, now)
    return most


def ratio(model: Any, shape: tuple[int, ...], loss: Any) -> tuple[float, str]:
    """Predicted by measured bytes, and the confidence."""
    parts = samples_of(shape[1:], "float32", "input"), None
    estimate = StepEstimator(
        model,
        *parts,
        loss=loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        device="cpu",
    ).at(shape[0])
    return estimate.allocated_bytes / measured(model, shape, loss), estimate.confidence


def of_few(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    """A loss that takes hardly any memory for itself."""
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


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_what_was_predicted(layer: str) -> None:
    found, confidence = ratio(*LAYERS[layer], of_few)
    assert 0.95 <= found <= 1.05
    assert confidence == "close"


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="the kernel is one of AVX-512",
)
@pytest.mark.parametrize("kernel", [2, 4])
def test_a_strided_transposed_convolution_makes_three_results(kernel: int) -> None:
    found, _ = ratio(
        lambda: nn.ConvTranspose2d(32, 32, kernel, 2, kernel // 2 - 1),
        (8, 32, 32, 32),
        of_few,
    )
    assert 0.95 <= found <= 1.05


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
    ],
    ids=["squares", "binary", "logsumexp", "attention with dropout", "attention"],
)
def test_losses_take_what_was_predicted(loss: Any) -> None:
    found, confidence = ratio(lambda: nn.Linear(20, 500), (256, 20), loss)
    assert 0.98 <= found <= 1.02
    assert confidence == "exact"


def test_libraries_take_what_is_not_known() -> None:
    _, confidence = ratio(
        lambda: nn.Linear(8, 8),
        (8, 8),
        lambda y, _: torch.fft.rfft(y).abs().sum(),
    )
    assert confidence == "low"
