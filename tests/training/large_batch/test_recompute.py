"""Recomputation of parts of a model."""

import copy
import random
from collections.abc import Iterable

import pytest
import torch
from support.big_batches import X, Y, gradients, gradients_of_both
from torch import nn
from torch.nn import functional

from pinfeed import BigBatch, Config, MiB
from pinfeed.errors import ArgumentError


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Listed(nn.Module):
    """Blocks with dropout that a forward pass of the model's own calls one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_parts_that_are_shared_or_have_residuals() -> None:
    torch.manual_seed(0)
    act = nn.Tanh()
    shared = nn.Sequential(nn.Linear(20, 20), act, nn.Linear(20, 20), act, nn.Linear(20, 7))
    blocks = Listed(nn.TransformerEncoderLayer(20, 4, 32) for _ in range(3))
    residual = nn.Sequential(
        Residual(nn.Linear(20, 20), nn.Tanh()),
        Residual(nn.Linear(20, 20), nn.Tanh()),
        nn.Linear(20, 7),
    )
    only = nn.ModuleDict({"a": Residual(nn.Linear(20, 20), nn.Tanh())})

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = only
            self.head = nn.Linear(20, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.parts["a"](x))

    for model in (shared, residual, Uses(), blocks):
        for strategy in ("checkpoint", "checkpoint_offload"):
            want, got = gradients_of_both(model, functional.cross_entropy, strategy)
            assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", ["checkpoint", "checkpoint_offload"])
def test_blocks_of_a_list_are_recomputed_one_by_one(strategy: str) -> None:
    blocks = [nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(3)]
    model = Listed(blocks)
    calls = []
    for i, block in enumerate(blocks):
        block[0].register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    with BigBatch(model, functional.cross_entropy, strategy=strategy, verify=False) as big:
        big.backward(X, Y)
    assert calls == [0, 1, 2, 2, 1, 0]


class Noisy(nn.Module):
    """Draws numbers of Python, which recomputation draws again; they change the last bits only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-6 * random.random())


@pytest.mark.parametrize("strategy", ["checkpoint", "checkpoint_offload"])
def test_recomputation_that_changes_a_bit_is_refused(strategy: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), Noisy(), nn.Linear(20, 7))
    with (
        BigBatch(model, functional.cross_entropy, strategy=strategy) as big,
        pytest.warns(UserWarning, match="does not give the gradients of the plain step: the grad"),
    ):
        big.backward(X, Y)
    layers = (layer for _ in range(8) for layer in (Noisy(), nn.Linear(300, 300)))
    wide = nn.Sequential(nn.BatchNorm1d(300), *layers)
    config = Config(cpu_memory_limit=MiB(12), gpu_memory_limit=MiB(100), optimizer=torch.optim.SGD)
    x = torch.randn(3000, 300)
    with (
        BigBatch(wide, functional.mse_loss, config=config) as big,
        pytest.raises(ArgumentError, match="checkpoint, checkpoint_offload: the gradient of"),
    ):
        big.backward(x, x)


def test_a_model_in_half_precision_is_recomputed_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20), nn.Tanh()) * 3, nn.Linear(20, 7)).bfloat16()
    want, got = gradients_of_both(
        model, functional.cross_entropy, "checkpoint_offload", X.bfloat16()
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", ["checkpoint", "two_pass"])
def test_recomputation_begins_with_the_same_buffers(strategy: str) -> None:
    """A power iteration and a counter take one step for one batch, whatever is computed twice."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(20, 20)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return self.inner(x) * self.count

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(20, 20)),
        nn.Tanh(),
        Counted(),
        nn.Linear(20, 7),
    )
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    functional.cross_entropy(plain(X), Y).backward()
    with BigBatch(other, functional.cross_entropy, chunk_size=23, strategy=strategy) as big:
        big.backward(X, Y)
    torch.testing.assert_close(gradients(other), gradients(plain), rtol=1e-4, atol=1e-6)
    for a, b in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
