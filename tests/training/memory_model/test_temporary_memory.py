"""Temporary memory of operations on the CPU, measured in a real step of a small batch."""

import re
from typing import Any

import pytest
import torch
from support.allocations import peak_of_two_steps
from torch import nn
from torch.autograd import profiler_legacy

from pinfeed.training.memory_model import estimate
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.report import StepMemory
from pinfeed.training.memory_model.tensor_specs import samples_of


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Compute with one thread, because the memory of each thread would hide the workspace."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def estimated(model: Any, shape: tuple[int, ...], loss: Any, **options: Any) -> StepMemory:
    parts = samples_of(shape[1:], "float32", "input"), None
    return StepEstimator(
        model,
        *parts,
        loss=loss,
        optimizer=sgd,
        device="cpu",
        **options,
    ).at(shape[0])


def ratio(model: Any, shape: tuple[int, ...], loss: Any) -> float:
    """Return predicted bytes divided by measured bytes."""
    taken = peak_of_two_steps(model, torch.zeros(shape), torch.zeros(0), loss, sgd)
    return estimated(model, shape, loss).nbytes / taken


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


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_the_predicted_workspace(layer: str) -> None:
    assert 0.98 <= ratio(*LAYERS[layer], of_few) <= 1.02


@pytest.mark.parametrize("kernel", [2, 4])
def test_a_strided_transposed_convolution_makes_three_results(kernel: int) -> None:
    found = ratio(
        lambda: nn.ConvTranspose2d(32, 32, kernel, 2, kernel // 2 - 1),
        (8, 32, 32, 32),
        of_few,
    )
    assert 0.95 <= found <= 1.05


@pytest.mark.sweep(2)
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
        lambda y, _: torch.fft.rfft(y).abs().sum(),
    ],
    ids=[
        "squares",
        "binary",
        "logsumexp",
        "attention with dropout",
        "attention",
        "entropy",
        "group norm",
        "FFT",
    ],
)
def test_losses_take_the_predicted_workspace(loss: Any) -> None:
    assert 0.98 <= ratio(lambda: nn.Linear(20, 500), (256, 20), loss) <= 1.02


def test_a_large_batch_has_the_memory_of_a_measured_sample() -> None:
    """Only a small batch is run, and each sample of a large one counts as much."""
    layer, shape = LAYERS["convolution"]
    small, large = (estimated(layer, (n, *shape[1:]), of_few) for n in (4, 1000))
    per_sample = [one.breakdown["temporary"] / one.batch_size for one in (small, large)]
    assert per_sample[0] == pytest.approx(per_sample[1], rel=0.1)
    measured = re.search(r"measured in a step of (\d+) samples", " ".join(large.notes))
    assert measured is not None
    assert 4 < int(measured[1]) < 1000


@pytest.mark.parametrize(("n", "counted"), [(4, [4]), (1000, [1000, 256])])
def test_a_measured_estimate_counts_few_steps(
    n: int, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, shape = LAYERS["convolution"]
    sizes: list[int] = []
    run = StepEstimator._run
    monkeypatch.setattr(
        StepEstimator,
        "_run",
        lambda self, tracker, n, step: (sizes.append(n), run(self, tracker, n, step))[1],
    )
    estimated(layer, (n, *shape[1:]), of_few)
    assert sizes == counted


def test_a_step_that_cannot_be_measured_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = LAYERS["convolution"]
    before = torch.get_rng_state()
    with profiler_legacy.profile():
        found = estimated(*layer, of_few)
    assert any("was not measured (" in note for note in found.notes)
    monkeypatch.setattr(estimate, "free_host_bytes", lambda: 1000)
    found = estimated(*layer, of_few)
    assert any("little memory is free)" in note for note in found.notes)
    assert torch.equal(torch.get_rng_state(), before)


class OneBatchSize(nn.Module):
    """A model that accepts one batch size only."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.inner = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.view(self.n, 3, 8, 8))


@pytest.mark.parametrize(("n", "said"), [(4, "was measured"), (6, "was not measured")])
def test_a_model_of_one_batch_size_is_still_estimated(n: int, said: str) -> None:
    """A step of four samples is measured, but none of six: measured sizes are powers of two."""
    found = estimated(lambda: OneBatchSize(n), (n, 3, 8, 8), of_few)
    assert said in found.notes[-1]
    assert found.nbytes > 0


@pytest.mark.parametrize("kind", ["half", "autocast"])
def test_half_precision_is_measured(kind: str) -> None:
    model = Halves if kind == "half" else lambda: nn.Linear(20, 20)
    options = {"autocast": torch.bfloat16} if kind == "autocast" else {}
    found = estimated(model, (8, 20), of_few, **options)
    assert any("was measured in a step of 8 samples" in note for note in found.notes)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 20, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() @ self.weight
