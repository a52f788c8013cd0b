"""BigBatch: gradients of whole batches, the choice of strategies, and refused arguments."""

import copy
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.big_batches import IGNORED, X, Y, contrastive, gradients, gradients_of_both, mlp
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pinfeed import BigBatch, Config, Feeder, MiB, errors
from pinfeed.training.large_batch.strategy_choice import STRATEGIES

WHOLE = [strategy for strategy in STRATEGIES if strategy not in ("accumulate", "two_pass")]


def tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of all tokens, as language models compute it."""
    return functional.cross_entropy(outputs.view(-1, 7), targets.view(-1))


CASES: dict[str, tuple[Any, Any, torch.Tensor]] = {
    "mean": (mlp, functional.cross_entropy, Y),
    "sum": (mlp, nn.CrossEntropyLoss(reduction="sum"), IGNORED),
    "ignored": (mlp, nn.CrossEntropyLoss(), IGNORED),
    "weights": (mlp, nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, 7)), IGNORED),
    "tokens": (mlp, tokens, IGNORED),
    "numbers": (mlp, nn.MSELoss(), functional.one_hot(Y, 7).float()),
    "dropout": (lambda: mlp(nn.Dropout(0.3)), functional.cross_entropy, Y),
    "norm": (lambda: mlp(nn.BatchNorm1d(50)), functional.cross_entropy, Y),
    "contrastive": (mlp, contrastive, Y),
}


def both(
    case: str, strategy: str, chunk_size: int = 5, **options: Any
) -> tuple[nn.Module, torch.Tensor, nn.Module, torch.Tensor, BigBatch]:
    """Run the plain step and a strategy from the same state; return models and losses of both."""
    make, loss, targets = CASES[case]
    plain, other = make(), make()
    torch.manual_seed(1)
    want = loss(plain(X), targets)
    want.backward()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    with BigBatch(other, loss, chunk_size=chunk_size, strategy=strategy, **options) as big:
        got = big.backward(X, targets)
    if case == "dropout" and strategy != "accumulate":
        assert torch.equal(torch.get_rng_state(), after), (
            "random numbers continue as after the plain step"
        )
    return plain, want.detach(), other, got, big


@pytest.mark.sweep(4)
@pytest.mark.parametrize("chunk_size", [1, 5, 22, 23, 100])
@pytest.mark.parametrize("strategy", ["accumulate", "two_pass"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("norm", "contrastive")])
def test_chunks_give_the_gradients_of_the_whole(case: str, strategy: str, chunk_size: int) -> None:
    plain, want, other, got, _ = both(
        case, strategy, chunk_size, reduction="mean" if case == "tokens" else None
    )
    # On the CPU a single layer draws the same numbers for a chunk as for these rows of a batch.
    torch.testing.assert_close(gradients(other), gradients(plain), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strategy", WHOLE)
@pytest.mark.parametrize("case", CASES)
def test_strategies_on_the_whole_batch_are_equal_bit_for_bit(case: str, strategy: str) -> None:
    plain, want, other, got, big = both(case, strategy)
    assert torch.equal(gradients(other), gradients(plain))
    assert torch.equal(got, want)
    assert str(big.chosen) == f"{strategy}, 23 samples at a time: strategy={strategy!r} was given"
    for a, b in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


def test_any_loss_in_two_passes() -> None:
    plain, want, other, got, _ = both("contrastive", "two_pass")
    torch.testing.assert_close(gradients(other), gradients(plain), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got, want)


def test_a_loss_of_the_whole_batch_is_not_accumulated() -> None:
    with pytest.raises(errors.ArgumentError, match="torch does not define this loss"):
        both("contrastive", "accumulate")


@pytest.mark.parametrize("strategy", ["accumulate", "two_pass"])
def test_statistics_of_chunks_are_warned_of(strategy: str) -> None:
    with pytest.warns(
        UserWarning,
        match=r"module '1' \(BatchNorm1d\) normalizes over the batch",
    ):
        both("norm", strategy)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (case, "two_pass" if case in ("contrastive", "tokens") else "accumulate")
        for case in CASES
        if case != "norm"
    ],
)
def test_auto_chooses_a_correct_strategy(case: str, strategy: str) -> None:
    plain, _, other, _, big = both(case, "auto")
    assert big.chosen is not None
    assert (big.chosen.strategy, big.chosen.chunk_size) == (strategy, 5)
    assert str(big.chosen).startswith(f"{strategy}, 5 samples at a time: ")
    torch.testing.assert_close(gradients(other), gradients(plain), rtol=1e-4, atol=1e-6)


def test_auto_refuses_models_that_chunks_would_change() -> None:
    with pytest.raises(
        errors.ArgumentError,
        match=r"chunks do not give the gradients of 23 samples "
        r"\(accumulate, two_pass: module '1' \(BatchNorm1d\) normalizes over the batch\)",
    ):
        both("norm", "auto")
    model = mlp(nn.BatchNorm1d(50)).eval()
    with BigBatch(model, functional.cross_entropy, chunk_size=5) as big:
        # In eval mode the running statistics do not change.
        big.backward(X, Y)
        assert big.chosen is not None
        assert big.chosen.strategy == "accumulate"


def test_a_limit_chooses() -> None:
    def made(strategy: str, limit: int, *middle: nn.Module) -> str:
        model = nn.Sequential(
            nn.Linear(100, 300),
            *middle,
            *(layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(300, 300))),
        )
        config = Config(
            cpu_memory_limit=MiB(4096), gpu_memory_limit=limit, optimizer=torch.optim.SGD
        )
        with BigBatch(model, nn.MSELoss(), config=config, strategy=strategy) as big:
            big.backward(torch.zeros(3000, 100), torch.zeros(3000, 300))
            assert big.chosen is not None
            return big.chosen.strategy

    assert made("auto", MiB(132)) == "plain"
    assert made("auto", MiB(82)) == "accumulate"
    # Recomputation alone comes first, and together with Offload only if it does not fit.
    assert made("auto", MiB(104), nn.BatchNorm1d(300)) == "checkpoint"
    assert made("auto", MiB(92), nn.BatchNorm1d(300)) == "checkpoint_offload"
    assert made("auto", MiB(80), nn.BatchNorm1d(300)) == "offload"
    with pytest.raises(errors.NotEnoughGPUMemory, match="chunks of one sample need"):
        made("auto", MiB(20))


def test_gradients_are_added_to_existing_ones() -> None:
    for strategy in STRATEGIES:
        model, again = mlp(), mlp()
        for one in (model, again):
            functional.mse_loss(one(X), torch.zeros(23, 7)).backward()
        functional.cross_entropy(again(X), Y).backward()
        with BigBatch(model, functional.cross_entropy, chunk_size=4, strategy=strategy) as big:
            big.backward(X, Y)
        torch.testing.assert_close(gradients(model), gradients(again), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("source", ["feeder", "loader", "list"])
@pytest.mark.parametrize("case", ["ignored", "sum"])
def test_several_batches_count_as_one_large_batch(source: str, case: str) -> None:
    make, loss, targets = CASES[case]
    model, plain = make(), make()
    for one in (model, plain):
        functional.mse_loss(one(X), torch.zeros(23, 7)).backward()
    loss(plain(X), targets).backward()
    with BigBatch(model, loss, chunk_size=4) as big:
        if source == "feeder":
            with Feeder((X.numpy(), targets.numpy()), batch_size=6, device="cpu") as feeder:
                got = big.backward(feeder)
        elif source == "loader":
            got = big.backward(DataLoader(TensorDataset(X, targets), batch_size=7))
        else:
            got = big.backward(iter([(X[:1], targets[:1]), (X[1:], targets[1:])]))
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got, loss(plain(X), targets))
    with (
        pytest.raises(errors.ArgumentError, match="strategy='two_pass' needs all samples at once"),
        BigBatch(model, loss, chunk_size=4, strategy="two_pass") as big,
    ):
        big.backward(DataLoader(TensorDataset(X, targets), batch_size=7))


def test_structures_of_inputs_and_targets() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(20, 8)
            self.b = nn.Embedding(7, 8)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": self.a(x) + self.b(ids), "ids": ids}

    def loss(outputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return (outputs["sum"].sum(1) - targets["y"]).square().mean()

    plain = Two()
    loss(plain(X, Y), {"y": X[:, 0]}).backward()
    for inputs, strategy in itertools.product(
        ((X, Y), {"x": X.numpy(), "ids": Y}), ("auto", "two_pass")
    ):
        model = Two()
        with BigBatch(model, loss, chunk_size=4, strategy=strategy) as big:
            big.backward(inputs, {"y": X[:, 0]})
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)


def test_a_loss_with_parameters_of_its_own() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(outputs * self.scale, targets)

    plain, loss = mlp(), Tempered()
    loss(plain(X), IGNORED).backward()
    for strategy in STRATEGIES:
        model, own = mlp(), Tempered()
        with BigBatch(model, own, chunk_size=4, strategy=strategy, reduction="mean") as big:
            big.backward(X, IGNORED)
        torch.testing.assert_close(gradients(own), gradients(loss), rtol=1e-4, atol=1e-6)


def test_a_loss_with_parameters_of_the_model() -> None:
    model = mlp()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets) + model[0].weight.square().sum()

    loss(model(X), Y).backward()
    want = gradients(model)
    for strategy in STRATEGIES:
        model.zero_grad()
        with BigBatch(model, loss, chunk_size=4, strategy=strategy, reduction="mean") as big:
            big.backward(X, Y)
        torch.testing.assert_close(gradients(model), want, rtol=1e-4, atol=1e-6)


def test_a_scaler_and_autocast() -> None:
    plain = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(plain(X), Y)
    (1024 * loss).backward()
    for strategy in STRATEGIES:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1024)
        with BigBatch(
            model,
            functional.cross_entropy,
            chunk_size=8,
            strategy=strategy,
            autocast=torch.bfloat16,
            scaler=scaler,
        ) as big:
            got = big.backward(X, Y)
        torch.testing.assert_close(got, loss.detach(), rtol=1e-2, atol=1e-2)
        assert (gradients(model) - gradients(plain)).norm() < 0.03 * gradients(plain).norm()


@pytest.mark.parametrize(
    ("case", "strategy", "exact"),
    [("dropout", "two_pass", True), ("norm", "checkpoint", True), ("norm", "accumulate", False)],
)
def test_check_reports_the_result_and_changes_nothing(
    case: str, strategy: str, exact: bool
) -> None:
    make, loss, targets = CASES[case]
    model = make()
    model[0].weight.grad = before = torch.ones(50, 20)
    state, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with (
        BigBatch(model, loss, chunk_size=100, strategy=strategy) as big,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        found = big.check(X, targets)
    assert not said
    assert found.is_exact == exact
    assert ("equal except for rounding" in str(found)) == exact
    assert (found.gradient_error > 0.01) != exact
    assert model[0].weight.grad is before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)


def dropouts(*middle: nn.Module) -> nn.Module:
    """Return a model with two layers of dropout, whose chunks draw other numbers than the batch."""
    return nn.Sequential(mlp(nn.Dropout(0.3)), *middle, nn.Dropout(0.3))


@pytest.mark.parametrize("strategy", ["accumulate", "two_pass"])
def test_check_fixes_random_numbers_that_chunks_draw(strategy: str) -> None:
    numbers = torch.get_rng_state()
    with BigBatch(dropouts(), functional.cross_entropy, strategy=strategy) as big:
        found = big.check(X, Y, chunk_size=5)
        assert found.is_exact
        assert str(found).startswith(f"{strategy} and the plain step, with fixed random numbers: ")
        assert not big.check(X, Y, chunk_size=23).has_fixed_numbers
    assert torch.equal(torch.get_rng_state(), numbers)
    mixing = dropouts(nn.BatchNorm1d(7))
    with BigBatch(mixing, functional.cross_entropy, strategy=strategy) as big:
        found = big.check(X, Y, chunk_size=5)
        assert found.has_fixed_numbers
        assert not found.is_exact


def test_check_refuses_random_numbers_that_it_cannot_fix() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + np.random.normal()  # noqa: NPY002

    with BigBatch(mlp(Noise()), functional.cross_entropy, strategy="accumulate") as big:
        with pytest.raises(errors.ArgumentError, match="draws random numbers from numpy"):
            big.check(X, Y)
        assert big.check(X, Y, chunk_size=23).strategy == "accumulate"


@pytest.mark.parametrize("strategy", ["auto", "accumulate", "two_pass"])
def test_the_choice_says_that_chunks_draw_other_numbers(strategy: str) -> None:
    said = "; the model draws random numbers, and chunks draw others than the whole batch"
    model = dropouts()
    with BigBatch(model, functional.cross_entropy, chunk_size=5, strategy=strategy) as big:

        def why(inputs: Any, targets: Any = None) -> str:
            big.backward(inputs, targets)
            assert big.chosen is not None
            return big.chosen.why

        assert said in why(X, Y)
        assert said not in why(X[:5], Y[:5])
        for _ in range(0 if strategy == "two_pass" else 2):
            assert why(iter([(X, Y)])).count(said) == 1
        model.eval()
        assert said not in why(X, Y)


def test_check_of_a_model_that_chunks_would_change() -> None:
    with (
        BigBatch(mlp(), contrastive, chunk_size=4, strategy="accumulate") as big,
        pytest.raises(errors.ArgumentError, match="torch does not define this loss"),
    ):
        big.check(X, Y)
    with BigBatch(mlp(), functional.cross_entropy, strategy="accumulate") as big:
        assert big.check(X, Y).is_exact


def test_training_in_chunks_is_training() -> None:
    plain, model = mlp(), mlp()
    optimizers = [torch.optim.Adam(one.parameters()) for one in (plain, model)]
    with BigBatch(model, functional.cross_entropy, chunk_size=6) as big:
        for _ in range(10):
            functional.cross_entropy(plain(X), Y).backward()
            big.backward(X.numpy(), np.asarray(Y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@settings(max_examples=40)
@given(
    n=st.integers(1, 12),
    chunk_size=st.integers(1, 13),
    ignored=st.sets(st.integers(0, 11)),
    strategy=st.sampled_from(STRATEGIES),
)
def test_any_sizes(n: int, chunk_size: int, ignored: set[int], strategy: str) -> None:
    targets = Y[:n].clone()
    targets[[i for i in ignored if i < n - 1]] = -100
    plain, model = mlp(), mlp()
    want = functional.cross_entropy(plain(X[:n]), targets)
    want.backward()
    with BigBatch(model, functional.cross_entropy, chunk_size=chunk_size, strategy=strategy) as big:
        got = big.backward(X[:n], targets)
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"chunk_size": 0}, "chunk_size=0: expected a whole number, at least 1"),
        ({"strategy": "fast"}, "strategy='fast': expected 'auto', 'plain', 'accumulate'"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"model": 3}, "model=3: expected a torch module"),
        ({"loss": 3}, "loss=3: expected a function"),
        ({"loss": nn.MSELoss}, r"loss=MSELoss is a class; .*; give loss=MSELoss\(\)"),
        ({"config": 3}, "config=3: expected a pinfeed.Config"),
        ({"scaler": torch.amp.GradScaler}, "expected a torch.amp.GradScaler, or None"),
        ({"modules": 3}, "modules=3: expected a list of torch modules"),
        ({"modules": [3]}, r"modules=\[3\]: expected a list of torch modules"),
        ({"autocast": "bfloat16"}, "autocast='bfloat16': expected a floating-point dtype of torch"),
        ({"autocast": torch.int8}, "autocast=torch.int8: expected a floating-point dtype of torch"),
        ({"verify": "no"}, "verify='no': expected True or False"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        BigBatch(**({"model": mlp(), "loss": functional.cross_entropy} | arguments))


def test_invalid_batches_are_refused() -> None:
    with BigBatch(mlp(), functional.cross_entropy, chunk_size=4) as big:
        with pytest.raises(errors.ArgumentError, match="inputs have 23 samples and targets 22"):
            big.backward(X, Y[:22])
        with pytest.raises(errors.ArgumentError, match="the batch is empty"):
            big.backward(X[:0], Y[:0])
        with pytest.raises(errors.ArgumentError, match="expected a pair of inputs and targets"):
            big.backward(iter([X]))
        with pytest.raises(
            errors.ArgumentError,
            match=r"the batch has no targets, but cross_entropy compares outputs with targets; "
            r".*loader of pairs of inputs and targets$",
        ):
            big.backward(X)
        with pytest.raises(
            errors.ArgumentError,
            match=r"no targets, .*; the inputs are a pair, so give backward\(\*batch\)$",
        ):
            big.check((X, Y))
        said = (
            r"^the plain step fails on 3 samples of the batch \(.*dtype.*\), so no strategy "
            r"can be compared with it; expected inputs"
        )
        with pytest.raises(errors.ArgumentError, match=said):
            big.backward(X.double(), Y)
    with pytest.raises(errors.ClosedError, match="this BigBatch is closed"):
        big.check(X, Y)
    with (
        pytest.raises(errors.ArgumentError, match="unknown without chunk_size and config"),
        BigBatch(mlp(), functional.cross_entropy) as big,
    ):
        big.backward(X, Y)


def test_norms_of_batches_in_eval_mode() -> None:
    with pytest.raises(errors.ArgumentError, match=r"module '1' \(BatchNorm1d\) normalizes over"):
        gradients_of_both(
            mlp(nn.BatchNorm1d(50, track_running_stats=False)).eval(),
            functional.cross_entropy,
            "auto",
        )


def test_statistics_are_counted_once_in_two_passes() -> None:
    model = mlp(nn.BatchNorm1d(50))
    with (
        pytest.warns(UserWarning, match="normalizes"),
        BigBatch(model, contrastive, chunk_size=12, strategy="two_pass") as big,
    ):
        big.backward(X, Y)
    assert model[1].num_batches_tracked == 2


def test_a_model_that_gives_its_loss() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(20, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    with (
        BigBatch(Whole(), lambda loss, _: loss, chunk_size=5) as big,
        pytest.raises(errors.ArgumentError, match="one number for a whole batch, like a loss"),
    ):
        big.backward(X)


def test_outputs_that_want_no_gradient() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(20, 7)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), x

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs[0], targets) + outputs[1].mean()

    want, got = gradients_of_both(Passes(), loss, "two_pass")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_the_strategy_is_chosen_for_each_shape() -> None:
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    config = Config(
        cpu_memory_limit=MiB(4096), gpu_memory_limit=MiB(100), optimizer=torch.optim.SGD
    )
    with BigBatch(model, nn.MSELoss(), config=config) as big:
        big.backward(torch.zeros(64, 8, 8), torch.zeros(64, 8, 8))
        assert big.chosen is not None
        assert big.chosen.strategy == "plain"
        big.backward(torch.zeros(64, 1024, 8), torch.zeros(64, 1024, 8))
        assert big.chosen.strategy == "accumulate"
        assert big.chosen.chunk_size < 64


def test_the_strategy_is_chosen_for_each_mode() -> None:
    model = mlp(nn.BatchNorm1d(50)).eval()
    with BigBatch(model, functional.cross_entropy, chunk_size=5) as big:
        big.backward(X, Y)
        model.train()
        with pytest.raises(errors.ArgumentError, match="normalizes over the batch"):
            big.backward(X, Y)
        with pytest.raises(errors.ArgumentError, match="arrive one by one"):
            big.backward(iter([(X, Y)]))


def test_nothing_to_learn_from() -> None:
    model = mlp()
    plain = mlp()
    nothing = torch.full((23,), -100)
    functional.cross_entropy(plain(X), nothing).backward()
    with BigBatch(model, functional.cross_entropy, chunk_size=5, strategy="accumulate") as big:
        assert big.backward(X, nothing).isnan()
        torch.testing.assert_close(gradients(model), gradients(plain), equal_nan=True)
    with pytest.raises(errors.ClosedError, match="this BigBatch is closed"):
        big.backward(X, Y)
