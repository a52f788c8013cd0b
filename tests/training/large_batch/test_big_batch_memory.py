"""BigBatch when memory runs out, and after errors."""

import copy
from typing import Any

import pytest
import torch
from support.big_batches import IGNORED, X, Y, contrastive, gradients, mlp
from support.simulated_gpu import SimulatedGPU
from torch import nn
from torch.nn import functional

from pinfeed import BigBatch, Config, MiB, estimate
from pinfeed.errors import ArgumentError
from pinfeed.training.large_batch.strategy_choice import STRATEGIES


class Failing(torch.autograd.Function):
    """Copy of the input, whose backward pass runs out of memory above ``most`` samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: int) -> torch.Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient, None


class Small(nn.Module):
    """A model whose forward or backward pass runs out of memory above ``most`` samples."""

    def __init__(self, most: int, where: str, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 50)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(50, 7)
        self.most = most
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.relu(self.first(x)))
        if self.where == "forward" and torch.is_grad_enabled() and len(x) > self.most:
            raise RuntimeError("CUDA error: out of memory")
        if self.where == "backward":
            # The last layer has its gradients when this fails.
            y = Failing.apply(y, self.most)
        return self.last(y)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["auto", "accumulate", "two_pass"])
@pytest.mark.parametrize(("chunk_size", "most"), [(8, 3), (23, 1), (100, 5), (8, 8)])
def test_a_chunk_that_does_not_fit_is_cut(
    where: str, strategy: str, chunk_size: int, most: int
) -> None:
    """No sample is lost, none counts twice, and existing gradients stay."""
    plain, model = Small(100, where), Small(most, where)
    for one in (plain, model):
        one.last.weight.grad = torch.ones(7, 50)
    functional.cross_entropy(plain(X), IGNORED).backward()
    # If only one sample fits, the plain step of two samples for the comparison does not fit.
    with BigBatch(
        model, functional.cross_entropy, chunk_size=chunk_size, strategy=strategy, verify=most > 1
    ) as big:
        big.backward(X, IGNORED)
        first = big.n_halved
        assert (first > 0) == (min(chunk_size, 23) > most)
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)
        for one in (plain, model):
            one.zero_grad()
        functional.cross_entropy(plain(X), IGNORED).backward()
        big.backward(X, IGNORED)
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)


def test_random_numbers_are_the_same_when_it_is_cut() -> None:
    plain, model = Small(100, "backward", dropout=0.5), Small(3, "backward", dropout=0.5)
    torch.manual_seed(5)
    contrastive(plain(X), Y).backward()
    torch.manual_seed(5)
    with BigBatch(model, contrastive, chunk_size=12) as big:
        big.backward(X, Y)
        assert big.n_halved == 2
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)


def test_one_sample_that_does_not_fit() -> None:
    for strategy in ("accumulate", "two_pass", "auto"):
        model = Small(0, "backward")
        model.first.weight.grad = before = torch.ones(50, 20)
        with (
            pytest.raises(torch.OutOfMemoryError),
            BigBatch(
                model,
                contrastive if strategy == "two_pass" else functional.cross_entropy,
                chunk_size=4,
                strategy=strategy,
            ) as big,
        ):
            big.backward(X, Y)
        assert model.first.weight.grad is before
        assert torch.equal(before, torch.ones(50, 20))


def test_an_error_of_another_kind_surfaces() -> None:
    for strategy in STRATEGIES:
        with (
            pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
            BigBatch(
                mlp(), functional.cross_entropy, chunk_size=4, strategy=strategy, reduction="mean"
            ) as big,
        ):
            big.backward(torch.zeros(9, 19), torch.zeros(9, dtype=torch.int64))


@pytest.mark.filterwarnings(
    "ignore:pinfeed. strategy='accumulate' does not give the gradients of the plain step. the loss"
)
@pytest.mark.parametrize("where", ["source", *STRATEGIES])
def test_after_an_error_gradients_are_as_before(where: str) -> None:
    model = mlp()
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if where not in ("source", "accumulate", "two_pass"):
            return functional.cross_entropy(Failing.apply(outputs, 0), targets)
        return functional.cross_entropy(outputs, targets)

    def source() -> Any:
        yield X[:6], Y[:6]
        raise ValueError("nothing more can be read")

    kind: Any = ValueError if where == "source" else (RuntimeError, IndexError)
    targets = Y.clone()
    targets[-1] = 99  # no class
    with BigBatch(
        model,
        failing,
        chunk_size=5,
        strategy="auto" if where == "source" else where,
        reduction="mean",
    ) as big:
        with pytest.raises(kind):
            if where == "source":
                big.backward(source())
            else:
                big.backward(X, targets)
        assert all(
            torch.equal(p.grad, torch.ones_like(p))
            for p in model.parameters()
            if p.grad is not None
        )
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(("strategy", "limit"), [("checkpoint_offload", 92), ("offload", 80)])
def test_activations_have_the_memory_that_the_rest_leaves(strategy: str, limit: int) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(300, 300))]
    model = nn.Sequential(nn.Linear(100, 300), nn.BatchNorm1d(300), nn.Dropout(), *layers)
    config = Config(
        cpu_memory_limit=MiB(4096), gpu_memory_limit=MiB(limit), optimizer=torch.optim.SGD
    )
    limits = []
    with BigBatch(model, nn.MSELoss(), config=config) as big:
        for n in (3000, 2900, 3000, 3050):
            x, y = torch.randn(n, 100), torch.zeros(n, 300)
            plain = copy.deepcopy(model)
            torch.manual_seed(1)
            nn.functional.mse_loss(plain(x), y).backward()
            torch.manual_seed(1)
            big.backward(x, y)
            assert torch.equal(gradients(model), gradients(plain))
            model.zero_grad()
            assert big.chosen is not None
            assert big.chosen.strategy == strategy
            offload = big._whole._offload
            assert offload is not None
            assert big._whole._device_limit <= big.chosen.device_limit
            limits.append(big._whole._device_limit)
            assert offload.stats.n_storages > 0
    first, second, third, larger = limits
    assert first == second == third > larger > 0
    if strategy == "checkpoint_offload":
        return
    # Inputs, gradients and temporary memory are not activations.
    step = estimate(
        model,
        3000,
        input_shape=(100,),
        output_shape=(300,),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
    )
    assert first + step.nbytes - step.breakdown["activations"] == MiB(limit)


class Full(nn.Module):
    """Runs out of memory in the first passes of a whole batch, whatever was predicted."""

    def __init__(self, n_passes: int) -> None:
        super().__init__()
        # A comparison of strategies restores numbers, but not lists.
        self.passes = [True] * n_passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 23 and self.passes:
            self.passes.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x


WHOLE = ["plain", "checkpoint", "checkpoint_offload", "offload"]


@pytest.mark.parametrize("n_passes", range(5))
def test_the_next_strategy_follows_one_that_does_not_fit(n_passes: int) -> None:
    """The batch counts once in running statistics, and has the random numbers of the plain step."""
    plain, model = (mlp(nn.BatchNorm1d(50), nn.Dropout(), Full(n)) for n in (0, n_passes))
    torch.manual_seed(1)
    functional.cross_entropy(plain(X), Y).backward()
    torch.manual_seed(1)
    with BigBatch(model, functional.cross_entropy, chunk_size=23) as big:
        if n_passes == len(WHOLE):
            with pytest.raises(ArgumentError, match="no strategy that computes the whole batch"):
                big.backward(X, Y)
            return
        big.backward(X, Y)
        assert big.chosen is not None
        assert (big.chosen.strategy, big.n_halved) == (WHOLE[n_passes], 0)
        assert not n_passes or f"{WHOLE[n_passes - 1]!r} ran out of memory" in str(big.chosen)
        assert torch.equal(gradients(model), gradients(plain))
        assert all(map(torch.equal, model.buffers(), plain.buffers()))
        # The next batch begins with the strategy that fits.
        big.backward(X, Y)
        assert big.chosen.strategy == WHOLE[n_passes]


class Deep(nn.Module):
    """Blocks with dropout, after a normalization that chunks would change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64))
            for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("strategy", "limit"), [*zip(WHOLE, (10, 4, 2.25, 1.6), strict=True)])
def test_the_limit_of_an_allocator_decides(
    strategy: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds, because the next strategy follows where memory runs out."""
    n = 512
    x, plain, gpu = torch.randn(n, 64), Deep(), SimulatedGPU(monkeypatch, total=MiB(64))
    torch.manual_seed(1)
    plain(x).square().mean().backward()
    with gpu:
        model, inputs = Deep(), x.clone()
        gpu.caps.append(int(limit * MiB(1)))
        torch.manual_seed(1)
        with BigBatch(model, lambda y, _: y.square().mean(), chunk_size=n) as big:
            big.backward(inputs)
            assert big.chosen is not None
            assert big.chosen.strategy == strategy
        assert gpu.reserved <= gpu.cap
    assert torch.equal(gradients(model), gradients(plain))
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


@pytest.mark.parametrize("strategy", WHOLE)
def test_no_strategy_follows_one_that_was_named(strategy: str) -> None:
    model = mlp(Full(1))
    with (
        BigBatch(model, functional.cross_entropy, strategy=strategy) as big,
        pytest.raises(torch.OutOfMemoryError),
    ):
        big.backward(X, Y)


def test_after_an_error_the_next_batch_works() -> None:
    model, kept = Small(0, "forward"), []
    with BigBatch(model, functional.cross_entropy, chunk_size=3, strategy="accumulate") as big:
        for most in (0, 100):
            model.most = most
            try:
                big.backward(X, Y)
            except RuntimeError as error:
                kept.append(error)
    assert len(kept) == 1
    assert model.first.weight.grad is not None


def test_a_batch_is_not_kept() -> None:
    import gc
    import weakref

    x = torch.zeros(23, 20)
    seen = weakref.ref(x)
    with BigBatch(mlp(), functional.cross_entropy, chunk_size=5) as big:
        big.backward(x, Y)
        del x
        gc.collect()
        assert seen() is None
