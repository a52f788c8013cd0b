"""The predicted peak of a training step, compared with the requests to the CPU's allocator."""

import copy
from typing import Any

import pytest
import torch
from support.allocations import peak_of_two_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

import pinfeed
from pinfeed import errors
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.tensor_specs import samples_of


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.head = nn.Linear(64, 500)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(ids))).flatten(0, 1)


class Copied(nn.Module):
    """A model whose layers are copies of one that it drops, as in ``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10)
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


CASES = {
    "mlp": (mlp, (300,), "float32", (), "int64"),
    "frozen": (frozen, (300,), "float32", (), "int64"),
    "norm": (
        lambda: nn.Sequential(
            nn.Linear(100, 400), nn.BatchNorm1d(400), nn.Tanh(), nn.Linear(400, 9)
        ),
        (100,),
        "float32",
        (),
        "int64",
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(100, 400), nn.Dropout(), nn.Linear(400, 9)),
        (100,),
        "float32",
        (),
        "int64",
    ),
    "checkpoint": (Checkpointed, (256,), "float32", (), "int64"),
    "copies of a layer": (Copied, (256,), "float32", (), "int64"),
    "attention": (Attention, (16,), "int64", (), "int64"),
}


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, sgd], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("batch_size", [4, 512])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_agrees_with_the_allocator(case: str, batch_size: int, optimizer: Any) -> None:
    model, shape, dtype, target, target_dtype = CASES[case]
    n_targets = batch_size * (16 if case == "attention" else 1)
    loss = nn.functional.cross_entropy
    if case == "attention":

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs, targets.flatten())

        target = (16,)
    x = torch.zeros((batch_size, *shape), dtype=getattr(torch, dtype))
    y = torch.zeros(n_targets, dtype=torch.int64).reshape(batch_size, *target)
    parts = samples_of(shape, dtype, "input"), samples_of(target, target_dtype, "output")
    estimate = StepEstimator(model, *parts, loss=loss, optimizer=optimizer, device="cpu").at(
        batch_size
    )
    wanted = peak_of_two_steps(model, x, y, loss, optimizer)
    assert wanted * 0.99 <= estimate.nbytes <= wanted * 1.01
    assert estimate.nbytes == max(estimate.phases.values())
    of_instance = StepEstimator(model(), *parts, loss=loss, optimizer=optimizer, device="cpu").at(
        batch_size
    )
    assert of_instance.breakdown == estimate.breakdown


def test_where_each_byte_goes() -> None:
    model = mlp()
    n = sum(p.numel() for p in model.parameters())
    parts = samples_of((300,), "float32", "input"), samples_of((), "int64", "output")
    small = StepEstimator(
        model, *parts, loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam, device="cpu"
    ).at(1)
    assert small.breakdown["parameters"] == pytest.approx(4 * n, rel=0.01)
    assert small.breakdown["gradients"] == pytest.approx(4 * n, rel=0.01)
    assert small.breakdown["optimizer state"] == pytest.approx(8 * n, rel=0.01)
    large = StepEstimator(
        model, *parts, loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam, device="cpu"
    ).at(8192)
    assert large.breakdown["batch"] == 8192 * (1200 + 8)
    assert large.breakdown["activations"] > 8192 * 4 * 1000
    assert large.phases["backward"] > large.phases["optimizer"]
    cuda = StepEstimator(
        model, *parts, loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam
    ).at(8192)
    assert cuda.breakdown["workspace"] == 64 << 20
    for text in (
        "parameters",
        "activations",
        "workspace",
        "total",
        "100.0%",
        "on one NVIDIA H200, steps took 0.7 to 2.4 times as much",
        f"{n:,} trainable, 0 frozen",
    ):
        assert text in str(cuda)


def test_an_existing_optimizer_is_used_unchanged() -> None:
    model = mlp()
    slow = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[2].parameters(), "amsgrad": True},
        ]
    )
    parts = samples_of((300,), "float32", "input"), samples_of((), "int64", "output")
    estimate = StepEstimator(
        model, *parts, loss=nn.functional.cross_entropy, optimizer=slow, device="cpu"
    ).at(2)
    first, second = (sum(4 * p.numel() for p in model[i].parameters()) for i in (0, 2))
    assert estimate.breakdown["optimizer state"] == pytest.approx(2 * first + 3 * second, rel=0.01)
    assert not slow.state
    assert all(p.grad is None for p in model.parameters())


def test_each_parameter_counts_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 3, bias=False)))
            self.inner[0].bias.requires_grad_(False)
            self.tied = nn.Linear(3, 4)
            self.tied.weight = self.inner[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    estimate = StepEstimator(Model, samples_of((3,), "float32", "input"), None, device="cpu").at(2)
    assert estimate.n_parameters == (3 + 12 + 12 + 4, 4)
    assert estimate.notes == (
        "loss=None: the estimate uses the sum of the outputs as the loss",
        "optimizer=None: the estimate uses AdamW",
        "the temporary memory of operations on the CPU was measured in a step of 2 samples",
    )


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if y.sum().item() > 0 else -y


@pytest.mark.parametrize(
    ("model", "shape"), [(Looks, (3,)), (mlp, (7,))], ids=["looks at values", "another shape"]
)
def test_models_that_cannot_be_predicted_are_refused(model: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        errors.EstimateError,
        match=rf"the step cannot be predicted: .*inputs \(2, {shape[0]}\) float32, .* measures st",
    ):
        StepEstimator(model, samples_of(shape, "float32", "input"), None).at(2)


def test_a_loss_without_targets_is_named_in_the_error() -> None:
    with pytest.raises(
        errors.EstimateError,
        match=r"float32, the loss raised .*; the loss got None instead of targets \(give output_sh",
    ):
        pinfeed.estimate(mlp, 2, input_shape=(300,), loss=nn.MSELoss())
    # The forward pass fails before the loss.
    with pytest.raises(errors.EstimateError, match="the forward pass raised") as refused:
        pinfeed.estimate(mlp, 2, input_shape=(7,), loss=nn.MSELoss())
    assert "None instead" not in str(refused.value)


def test_functions_that_return_no_model_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="returned a int; expected a torch module"):
        StepEstimator(lambda: 3, samples_of((3,), "float32", "input"), None).at(2)


def test_many_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(10, 4)
            self.b = nn.Linear(3, 4)

        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": self.a(ids).sum(1) + self.b(x)}

    def loss(outputs: Any, targets: Any) -> torch.Tensor:
        return (outputs["sum"] - targets[0]).square().mean() + targets[1].sum()

    targets = samples_of(((4,), ()), "float32", "output")
    for inputs in (
        samples_of(((5,), (3,)), ("int64", "float32"), "input"),
        samples_of({"ids": (5,), "x": (3,)}, {"ids": int, "x": "torch.float32"}, "input"),
    ):
        estimate = StepEstimator(Two, inputs, targets, loss=loss, device="cpu").at(1000)
        assert estimate.breakdown["batch"] >= 1000 * (5 * 8 + 3 * 4 + 4 * 4 + 4)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ("ab", "float32", "input_shape='ab': expected a shape"),
        ((3, -1), "float32", "expected dimensions of at least 0"),
        ((3,), "float33", "input_dtype='float33'.*expected a dtype of torch or numpy"),
        ((3,), object, "expected a dtype of torch or numpy"),
        (((3,), (4,)), ("float32",), "has another structure"),
    ],
)
def test_invalid_samples_are_refused(shape: Any, dtype: Any, said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        samples_of(shape, dtype, "input")


@pytest.mark.parametrize(
    "dtype", [torch.float64, "float64", "torch.float64", "double", float, "f8"]
)
def test_a_dtype_however_it_is_spelled(dtype: Any) -> None:
    assert samples_of((2, 3), dtype, "input").dtypes == (torch.float64,)
    assert samples_of((2, 3), dtype, "input").nbytes == (48,)
    assert samples_of((2,), "bfloat16", "input").dtypes == (torch.bfloat16,)


def test_a_loss_stays_as_it_is() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("center", torch.zeros(10))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.center = outputs.detach().mean(0)
            return nn.functional.cross_entropy(outputs * self.scale, targets)

    loss, model = Own(), mlp()
    parts = samples_of((300,), "float32", "input"), samples_of((), "int64", "output")
    both = torch.optim.Adam([*model.parameters(), *loss.parameters()])
    StepEstimator(model, *parts, loss=loss, optimizer=both).at(4)
    assert loss.scale.grad is None
    assert type(loss.center) is torch.Tensor
    other = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    with pytest.raises(errors.ArgumentError, match="neither to the model nor to the loss"):
        StepEstimator(model, *parts, loss=loss, optimizer=other).at(4)


def test_tensors_that_are_plain_attributes() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.mask = torch.ones(5)
            self.last = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.inner(x) * self.mask
            return self.last

    model = Masked()
    # After this call the model keeps a tensor of a graph.
    model(torch.zeros(2, 5))
    estimate = StepEstimator(model, samples_of((5,), "float32", "input"), None).at(4)
    assert estimate.nbytes > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            ({"batch_size": size}, f"batch_size={size!r}: expected a whole number, from 1 to ")
            for size in ("2", 2.0, True, 0, 2**70)
        ),
        ({"device": "gpu"}, "device='gpu': expected 'cuda' or 'cpu'"),
        ({"autocast": "bfloat16"}, "autocast='bfloat16': expected a floating-point dtype of torch"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        pinfeed.estimate(nn.Linear(3, 1), **{"batch_size": 2, "input_shape": (3,), **arguments})
