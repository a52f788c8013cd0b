"""Training with SpeedTorch's tables gives the results of training the whole table."""

import pickle

import numpy as np
import pytest
import torch
from support.speedtorch_training import (
    DIM,
    LAZY,
    MODELS,
    OTHERS,
    Make,
    Model,
    N,
    batches,
    by_block,
    made,
    start,
    train,
    whole,
)
from torch import nn

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it
from pinfeed.compat.speedtorch import tables

pytestmark = pytest.mark.usefixtures("in_a_folder", "one_thread")


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("optimizer", LAZY)
@pytest.mark.parametrize("name", MODELS)
def test_equals_training_the_whole_table(name: str, optimizer: str, repeat: bool) -> None:
    result = train(*made(name, LAZY[optimizer]), batches(repeat))
    expected = whole(LAZY[optimizer], batches(repeat))
    if repeat:
        # The gradients of a row are added in another order.
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)
    else:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [*LAZY, "sparse"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_training_the_whole_table_on_a_gpu(name: str, optimizer: str) -> None:
    sparse = optimizer == "sparse"
    make = LAZY.get(optimizer, lambda p: torch.optim.SparseAdam(p, lr=0.1))
    weights, states, model, inner = made(name, make, sparse=sparse)
    model.cuda()
    assert (weights.getTorchVar().device.type == "cuda") == (
        name in ("ModelFactory", "PytorchModelFactory", "GPUPytorchModelFactory")
    )
    # A GPU's generator draws other numbers than the CPU's.
    weights.customInit(lambda table: table.copy_(start()))
    train(weights, states, model, inner, batches(True, 4))
    assert model.inner.words.weight.device.type == "cuda"
    weights.saveCupy("weights")
    states.saveCupy("states")
    weights.loadCupy("weights")
    states.loadCupy("states")
    result = train(weights, states, model, inner, list(batches(True))[4:])
    np.testing.assert_allclose(result, whole(make, batches(True), sparse), rtol=0, atol=1e-10)


def test_equals_training_the_whole_table_in_a_table_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table for a GPU is tested on the CPU."""
    monkeypatch.setattr(
        tables.Place,
        "new_table",
        lambda _, shape, dtype, key="": tables.DeviceTable(
            torch.zeros(shape, dtype=tables.TORCH[dtype])
        ),
    )
    result = train(*made("PytorchModelFactory", LAZY["adagrad"]), batches(True))
    np.testing.assert_allclose(result, whole(LAZY["adagrad"], batches(True)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("optimizer", LAZY)
def test_equals_training_the_whole_table_bitwise_in_one_lookup(optimizer: str) -> None:
    ids = np.random.default_rng(1).integers(0, 5, (6, 16))
    model, embedding = Model(1), nn.Embedding.from_pretrained(start(), freeze=False)
    ours, plain = LAZY[optimizer]([model.inner.words.weight]), LAZY[optimizer]([embedding.weight])
    weights, states = (
        SpeedTorch.ModelFactory(model.inner.words, N, DIM, torch.float64),
        SpeedTorch.OptimizerFactory(ours, N, DIM, model, "inner.words", np.float64),
    )
    weights.customInit(lambda table: table.copy_(start()))
    states.optInit()
    slots = torch.from_numpy(weights.variableTransformer(16, 1))
    for batch in ids:
        weights.beforeForwardPass(batch)
        states.beforeForwardPass(batch)
        for lookup, each, at in [
            (model.inner.words, ours, slots[:, 0]),
            (embedding, plain, torch.from_numpy(batch)),
        ]:
            each.zero_grad()
            (
                lookup(at).sigmoid() * torch.arange(48, dtype=torch.float64).view(16, 3)
            ).sum().backward()
            each.step()
        weights.afterOptimizerStep(batch)
        states.afterOptimizerStep(batch)
    np.testing.assert_array_equal(weights.getNumpyVersion(), embedding.weight.detach().numpy())


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("optimizer", OTHERS)
def test_equals_the_plain_loop_over_blocks(optimizer: str, repeat: bool) -> None:
    result = train(*made("ModelFactory", OTHERS[optimizer]), batches(repeat))
    np.testing.assert_allclose(
        result, by_block(OTHERS[optimizer], batches(repeat)), rtol=0, atol=1e-10
    )


# torch's Adagrad makes sparse tensors without saying whether to check them.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SparseAdam(p, lr=0.1), LAZY["adagrad"], LAZY["sgd"]],
    ids=["adam", "adagrad", "sgd"],
)
def test_sparse_gradients_equal_training_the_whole_table(make: Make, repeat: bool) -> None:
    result = train(*made("ModelFactory", make, sparse=True), batches(repeat))
    np.testing.assert_allclose(
        result, whole(make, batches(repeat), sparse=True), rtol=0, atol=1e-12
    )


def test_sparse_rows_without_a_lookup_stay_unchanged() -> None:
    make = lambda p: torch.optim.SparseAdam(p, lr=0.1)  # noqa: E731
    weights, states, model, optimizer = made("ModelFactory", make, sparse=True)
    train(weights, states, model, optimizer, batches(True, 2))
    before, ids = weights.getNumpyVersion(), np.array([1, 2, 1, 3])
    weights.beforeForwardPass(ids)
    states.beforeForwardPass(ids)
    optimizer.zero_grad()
    model.inner.words(torch.tensor([0])).sum().backward()
    optimizer.step()
    block = model.inner.words.weight.detach().numpy().copy()
    weights.afterOptimizerStep(ids)
    states.afterOptimizerStep(ids)
    assert sorted(np.flatnonzero((weights.getNumpyVersion() != before).any(1))) == [1]
    # All slots of a row stay equal.
    np.testing.assert_array_equal(block[0], block[2])


def test_gradients_accumulate() -> None:
    weights, _, model, optimizer = made("ModelFactory", LAZY["sgd"])
    expected = start()
    weights.beforeForwardPass([7, 7, 5])
    for _ in range(2):
        model.inner.words(torch.arange(3)).sum().backward()
    optimizer.step()
    weights.afterOptimizerStep([7, 7, 5])
    expected[7] -= 0.4
    expected[5] -= 0.2
    np.testing.assert_allclose(weights.getNumpyVersion(), expected.numpy(), rtol=0, atol=1e-15)
    # No hook stays on the weight.
    assert not model.inner.words.weight._backward_hooks


def test_batches_may_differ_in_size_even_with_gradients_of_zero() -> None:
    weights, states, model, optimizer = made("ModelFactory", OTHERS["adam"])
    for n in (6, 4, 9):
        ids = torch.arange(n, dtype=torch.int32)
        weights.beforeForwardPass(ids)
        states.beforeForwardPass(ids)
        optimizer.zero_grad(set_to_none=False)
        model.inner.words(torch.arange(n)).sum().backward()
        optimizer.step()
        weights.afterOptimizerStep(ids)
        states.afterOptimizerStep(ids)
    assert int(optimizer.state[model.inner.words.weight]["step"]) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_may_differ_in_size_while_losses_are_held(dtype: torch.dtype) -> None:
    model = Model(1, dtype=dtype)
    weights = SpeedTorch.ModelFactory(model.inner.words, N, DIM, dtype)
    weights.zerosInit()
    optimizer = torch.optim.SGD([model.inner.words.weight], lr=1.0)
    losses = []
    for n in (4, 4, 3, 5, 5, 2):
        ids = np.arange(n) // 2
        weights.beforeForwardPass(ids)
        optimizer.zero_grad()
        losses.append(model.inner.words(torch.arange(n)).sum())
        losses[-1].backward()
        optimizer.step()
        weights.afterOptimizerStep(ids)
    assert weights.getNumpyVersion()[:4, 0].tolist() == [-12, -9, -2, 0]
    assert model.inner.words.weight.dtype is dtype


def test_a_new_table_takes_over_the_weight() -> None:
    """After an interrupted batch, the slots of the next table have gradients of their own."""
    embedding = nn.Embedding(4, DIM)
    for ids in ([1, 1, 2, 2], [3, 4, 5, 6]):
        weights = SpeedTorch.ModelFactory(embedding, N, DIM)
        weights.zerosInit()
        weights.beforeForwardPass(ids)
        pickle.loads(pickle.dumps(embedding))
    embedding(torch.arange(4)).sum().backward()
    assert (embedding.weight.grad == 1).all()
