"""Comparison of strategies with the plain step: models and losses that chunks change or do not."""

import copy
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.equivalence_models import Average, Calls, Counts, batch_norm, error_of
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.utils.checkpoint import checkpoint

from pinfeed import BigBatch, errors

N, CHUNK = 24, 8


X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(5, (N,), generator=torch.Generator().manual_seed(1))
IGNORED = Y.clone()
IGNORED[:9] = 0


def net(*middle: nn.Module, last: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, last))


class TimeMajor(nn.Module):
    """Outputs of shape (steps, samples, features), with as many steps as a chunk has samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x.reshape(-1, 3, 2).transpose(0, 1))[0]


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.inner(x)
        return outputs, outputs.square().mean().reshape(1)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.inner(x)
        return z @ z.T


def hooked() -> nn.Module:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def shuffled(x: torch.Tensor) -> torch.Tensor:
    return x + 0.3 * x[torch.randperm(len(x))]


def auxiliary_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs[0], targets) + outputs[1].sum()


def square(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().mean()


class Tells(nn.Module):
    """A model that passes a term to the loss by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.auxiliary = y.softmax(1).mean(0).square().sum()
        return y


class Lists(Tells):
    """A model that passes a small term to the loss by a list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.terms = [0.001 * y.softmax(1).mean(0).square().sum()]
        return y

    @property
    def auxiliary(self) -> torch.Tensor:
        return self.terms[0]


def told(make: Callable[[], nn.Module]) -> tuple[Callable[[], nn.Module], Any]:
    """A loss that reads an attribute of the model made last."""
    made: list[Any] = []

    def remembered() -> nn.Module:
        made.append(make())
        return made[-1]

    return (
        remembered,
        lambda outputs, targets: functional.cross_entropy(outputs, targets) + made[-1].auxiliary,
    )


class Momentum(nn.Module):
    """A second network that follows the first one, as in MoCo (He et al., arXiv 1911.05722)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = net()
        self.second = net()
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p, q in zip(self.second.parameters(), self.first.parameters(), strict=True):
            p.data.mul_(0.9).add_(q.data, alpha=0.1)
        return self.first(x) + self.second(x)


class Generated(nn.Module):
    """Dropout by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5)


class Bank(nn.Module):
    """Keeps a running mean of its inputs, which begins as the mean of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x


class Encoder(nn.Module):
    """A transformer: in eval mode without gradients, torch's fast path leaves zeros in padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(6)[None] >= (x[:, :1] > 0) * 3 + 3
        return self.encoder(x[:, :, None].expand(-1, -1, 8), src_key_padding_mask=padding)


KEPT: list[Any] = []
"""Nodes of autograd's that have hooks: torch keeps them only as long as they are used."""


def clamped() -> nn.Module:
    model = net()
    weight = model[0].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0].clamp(-0.001, 0.001),))
    KEPT.append(node)
    return model


def sometimes(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if torch.rand(()) < 0.3 else x


def by_python(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if random.random() < 0.3 else x


def pairs_of(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return (
        (outputs @ outputs.flatten(1).T if outputs.ndim == 2 else outputs.flatten(1))
        .logsumexp(1)
        .mean()
    )


def narrow() -> nn.Module:
    return net(Calls(lambda x: x - 0.03 * x.mean(0)), Narrow())


class Narrow(nn.Module):
    """A layer that computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype)).to(x.dtype)


tells, tells_loss = told(Tells)
lists, lists_loss = told(Lists)


cross_entropy = functional.cross_entropy


WRONG: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "an output of (n, n)": (Pairs, square, Y),
    "time-major outputs": (TimeMajor, square, Y),
    "an auxiliary output of (1,)": (Auxiliary, auxiliary_loss, Y),
    "F.batch_norm": (lambda: net(Calls(batch_norm)), cross_entropy, Y),
    "minus the mean": (lambda: net(Calls(lambda x: x - x.mean(0))), cross_entropy, Y),
    "a little of the mean": (lambda: net(Calls(lambda x: x + 0.01 * x.mean(0))), cross_entropy, Y),
    "softmax over samples": (lambda: net(Calls(lambda x: x.softmax(0))), cross_entropy, Y),
    "shuffled samples": (lambda: net(Calls(shuffled)), cross_entropy, Y),
    "the sample before": (lambda: net(Calls(lambda x: x + x.roll(1, 0))), cross_entropy, Y),
    "spectral_norm": (
        lambda: net(parametrizations.spectral_norm(nn.Linear(8, 8))),
        cross_entropy,
        Y,
    ),
    "old spectral_norm": (lambda: net(old_spectral_norm(nn.Linear(8, 8))), cross_entropy, Y),
    "an average as a buffer": (lambda: net(Average(True)), cross_entropy, Y),
    "an average as an attribute": (lambda: net(Average(False)), cross_entropy, Y),
    "a number that counts": (lambda: net(Counts()), cross_entropy, Y),
    "a hook of a parameter": (hooked, cross_entropy, Y),
    "a hook behind a parameter": (clamped, cross_entropy, Y),
    "a loss that reads the model": (tells, tells_loss, Y),
    "a loss that reads a list of the model": (lists, lists_loss, Y),
    "a network that follows another": (Momentum, cross_entropy, Y),
    "a branch by torch's numbers": (lambda: net(Calls(sometimes)), cross_entropy, Y),
    "a branch by Python's numbers": (lambda: net(Calls(by_python)), cross_entropy, Y),
    "sorted random numbers": (
        lambda: net(Calls(lambda x: x + 0.3 * x[torch.rand(len(x)).argsort()])),
        cross_entropy,
        Y,
    ),
    "a generator of its own": (lambda: net(Generated()), pairs_of, Y),
    "an average from the first batch on": (lambda: net(Bank()), cross_entropy, Y),
    "an encoder in eval mode": (Encoder, pairs_of, Y),
    "next to a bfloat16 layer": (narrow, cross_entropy, Y),
    "next to a large offset": (
        lambda: net(Calls(lambda x: x - 0.1 * x.mean(0)), Calls(lambda x: x + 1e4 - 1e4)),
        square,
        Y,
    ),
}


class Packed(nn.Module):
    """A GRU that needs samples sorted by their length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(1, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(x),), 6)
        packed = nn.utils.rnn.pack_padded_sequence(
            x[:, :, None], lengths, batch_first=True, enforce_sorted=True
        )
        return self.gru(packed)[1][0]


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.detach().requires_grad_(), use_reentrant=True)


RIGHT: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "uint8 classes, one ignored": (
        net,
        nn.CrossEntropyLoss(ignore_index=0),
        IGNORED.byte(),
        "accumulate",
    ),
    "uint8 classes with weights": (
        net,
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 6)),
        Y.byte(),
        "accumulate",
    ),
    "size_average=False": (
        functools.partial(net, last=1),
        functools.partial(functional.mse_loss, size_average=False),
        X[:, :1],
        "accumulate",
    ),
    "reduce=True": (
        functools.partial(net, last=1),
        functools.partial(functional.mse_loss, reduce=True),
        X[:, :1],
        "accumulate",
    ),
    "weights of samples": (
        functools.partial(net, last=1),
        nn.BCEWithLogitsLoss(weight=torch.rand(N, 1)),
        (X[:, :1] > 0).float(),
        "two_pass",
    ),
    "GroupNorm": (lambda: net(nn.GroupNorm(2, 8)), cross_entropy, Y, "accumulate"),
    "dropout": (lambda: net(nn.Dropout(0.4)), cross_entropy, Y, "accumulate"),
    "dropout, a loss of pairs": (
        lambda: net(nn.Dropout(0.4)),
        lambda o, y: (o @ o.T).logsumexp(1).mean(),
        Y,
        "two_pass",
    ),
    "sorted by length": (lambda: Packed(), lambda o, _: o.square().mean(), Y, "two_pass"),
    "recomputed": (lambda: Again(), cross_entropy, Y, "accumulate"),
    "a frozen layer": (
        lambda: net(nn.Linear(8, 8).requires_grad_(False)),
        cross_entropy,
        Y,
        "accumulate",
    ),
    "weight_norm": (
        lambda: net(parametrizations.weight_norm(nn.Linear(8, 8))),
        cross_entropy,
        Y,
        "accumulate",
    ),
}


def state_of(model: nn.Module) -> dict[str, Any]:
    found = copy.deepcopy(dict(model.state_dict()))
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Generator):
                found[f"{name}.{key}"] = value.get_state()
            elif not key.startswith("_"):
                found[f"{name}.{key}"] = copy.deepcopy(value)
    return found


def twice(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Make two equal models from the same seed."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    return [model, make()]


@pytest.mark.parametrize("case", WRONG)
def test_models_that_chunks_would_change_are_refused(case: str) -> None:
    make, loss, targets = WRONG[case]
    model = make()
    model.requires_grad_()
    before = state_of(model)
    generator = torch.get_rng_state()
    with (
        BigBatch(model, loss, chunk_size=CHUNK) as big,
        pytest.raises(errors.ArgumentError, match="chunks do not give the gradients of 24 samples"),
    ):
        big.backward(X, targets)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    after = state_of(model)
    for name, value in before.items():
        assert (
            torch.equal(after[name], value)
            if isinstance(value, torch.Tensor)
            else after[name] == value
        ), name


@pytest.mark.parametrize("strategy", ["offload", "checkpoint", "checkpoint_offload"])
@pytest.mark.parametrize("case", [case for case in WRONG if "reads" not in case])
def test_strategies_on_the_whole_batch_are_right(case: str, strategy: str) -> None:
    """A named strategy warns only if its gradients differ."""
    make, loss, targets = WRONG[case]
    plain, model = twice(make)
    torch.manual_seed(2)
    random.seed(2)
    loss(plain(X), targets).backward()
    torch.manual_seed(2)
    random.seed(2)
    with (
        BigBatch(model, loss, strategy=strategy) as big,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        big.backward(X, targets)
    assert error_of(plain, model) == 0 or (said and strategy != "offload")


@pytest.mark.parametrize("strategy", ["accumulate", "two_pass"])
@pytest.mark.parametrize(
    "case", ["minus the mean", "a hook of a parameter", "an average as a buffer"]
)
def test_a_strategy_that_was_named_is_warned_of(case: str, strategy: str) -> None:
    make, loss, targets = WRONG[case]
    with BigBatch(make(), loss, chunk_size=CHUNK, strategy=strategy) as big:
        with pytest.warns(
            UserWarning,
            match=f"strategy='{strategy}' does not give the gradients of the plain step: ",
        ):
            big.backward(X, targets)
        # The warning is given once.
        big.backward(X, targets)
    with BigBatch(make(), loss, chunk_size=CHUNK, strategy=strategy, verify=False) as big:
        big.backward(X, targets)


def test_a_named_strategy_is_warned_of_outputs_without_rows() -> None:
    options: Any = {"strategy": "accumulate", "reduction": "mean"}
    with (
        BigBatch(Auxiliary(), auxiliary_loss, chunk_size=CHUNK, **options) as big,
        pytest.warns(UserWarning, match="need outputs with one row for each sample"),
    ):
        big.backward(X, Y)


@pytest.mark.parametrize("case", RIGHT)
def test_models_that_chunks_do_not_change_are_computed_in_chunks(case: str) -> None:
    make, loss, targets, strategy = RIGHT[case]
    plain, model = twice(make)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        # torch deprecates size_average.
        warnings.simplefilter("ignore")
        loss(plain(X), targets).backward()
        torch.manual_seed(1)
        with BigBatch(model, loss, chunk_size=CHUNK) as big:
            big.backward(X, targets)
    assert big.chosen is not None
    assert big.chosen.strategy == strategy
    assert error_of(plain, model) < 1e-5


def test_a_loss_that_is_no_mean_is_not_accumulated() -> None:
    """The caller is mistaken about the reduction."""
    plain, model = net(), net()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets, reduction="sum")

    loss(plain(X), Y).backward()
    with BigBatch(model, loss, chunk_size=CHUNK, reduction="mean") as big:
        big.backward(X, Y)
    assert big.chosen is not None
    assert big.chosen.strategy == "two_pass"
    assert "the losses of the chunks do not add up to the loss of the batch" in big.chosen.why
    assert error_of(plain, model) < 1e-5


def test_the_comparison_is_repeated_in_another_mode() -> None:
    model = net(Calls(lambda x: batch_norm(x) if model.training else x)).eval()
    with BigBatch(model, cross_entropy, chunk_size=CHUNK) as big:
        big.backward(X, Y)
        model.train()
        with pytest.raises(errors.ArgumentError, match="chunks do not give"):
            big.backward(X, Y)


def test_a_model_that_changes_its_inputs() -> None:
    """The two passes of ``two_pass`` change the inputs twice."""

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.sub_(0.5))

    plain, model = Shifts(), Shifts()
    cross_entropy(plain(X.clone()), Y).backward()
    with BigBatch(model, cross_entropy, chunk_size=CHUNK) as big:
        big.backward(X.clone(), Y)
        assert error_of(plain, model) < 1e-5
    with (
        BigBatch(model, pairs_of, chunk_size=CHUNK) as big,
        pytest.raises(errors.ArgumentError, match="chunks do not give"),
    ):
        big.backward(X.clone(), Y)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            {"x": X, "lengths": [3] * N},
            r"\['lengths'\] is a list with a value for each of 24 samples",
        ),
        (
            {"x": X, "names": np.array(["a"] * N)},
            r"\['names'\] is an array of dtype <U1; expected a dtype of numbers",
        ),
        (X.to_sparse(), "sparse_coo tensor, which cannot be cut"),
    ],
)
def test_inputs_that_cannot_be_cut(inputs: Any, said: str) -> None:
    with (
        BigBatch(net(), cross_entropy, chunk_size=CHUNK) as big,
        pytest.raises(errors.ArgumentError, match=said),
    ):
        big.backward(inputs, Y)


def test_weights_of_rare_classes_are_noticed() -> None:
    """The loss is a mean weighted by class, and the caller says that it is a plain mean."""
    targets = torch.arange(N) % 10
    weight = torch.ones(10)
    weight[5] = 30.0

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, y, weight=weight)

    plain, model = twice(lambda: net(last=10))
    loss(plain(X), targets).backward()
    with BigBatch(model, loss, chunk_size=CHUNK, reduction="mean") as big:
        big.backward(X, targets)
    assert error_of(plain, model) < 1e-5
    assert big.chosen is not None
    assert big.chosen.strategy == "two_pass"


@pytest.mark.parametrize("sizes", [[1] * N, [2] * 12, [12, 12]], ids=str)
def test_batches_of_any_size_are_proved(sizes: list[int]) -> None:
    model = net(Calls(lambda x: x - x.mean(0)))
    batches = list(zip(X.split(sizes), Y.split(sizes), strict=True))
    with (
        BigBatch(model, cross_entropy, chunk_size=CHUNK) as big,
        pytest.raises(errors.ArgumentError, match="arrive one by one"),
    ):
        big.backward(iter(batches))
    plain, model = twice(net)
    cross_entropy(plain(X), Y).backward()
    with BigBatch(model, cross_entropy, chunk_size=CHUNK) as big:
        big.backward(iter(batches))
    assert error_of(plain, model) < 1e-5


def test_a_later_batch_of_another_shape_is_proved() -> None:
    model = net(Calls(lambda x: x - x.mean(0) if x.ndim == 3 else x))
    batches = [(X, X[:, :5]), (X[:, None].expand(-1, 2, -1), X[:, None, :5].expand(-1, 2, -1))]
    with (
        BigBatch(model, nn.MSELoss(), chunk_size=CHUNK) as big,
        pytest.raises(errors.ArgumentError, match="arrive one by one"),
    ):
        big.backward(iter(batches))
    assert all(p.grad is None for p in model.parameters())


def test_a_named_strategy_on_a_source_is_warned_of_once() -> None:
    model = net(Calls(lambda x: x - x.mean(0)))
    with BigBatch(model, cross_entropy, chunk_size=CHUNK, strategy="accumulate") as big:
        with pytest.warns(UserWarning, match="does not give the gradients of the plain step"):
            big.backward(iter([(X, Y)]))
        big.backward(iter([(X, Y)]))


def test_models_are_compared_on_batches_of_an_iterator() -> None:
    model = net(Calls(lambda x: x - x.mean(0)))
    with (
        BigBatch(model, cross_entropy, chunk_size=CHUNK) as big,
        pytest.raises(errors.ArgumentError, match="arrive one by one"),
    ):
        big.backward(iter([(X, Y)]))
    with BigBatch(model, cross_entropy, chunk_size=CHUNK, verify=False) as big:
        big.backward(iter([(X, Y)]))
    with BigBatch(net(), cross_entropy, chunk_size=CHUNK) as big:
        big.backward(iter([(X.numpy(), Y.numpy())]))
