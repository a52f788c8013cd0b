"""The documented API of SpeedTorch: each class and method, and results that equal training the whole table."""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it
from pinfeed import errors
from pinfeed.compat.speedtorch import factories, placement
from pinfeed.memory.host import resident_bytes
from pinfeed.training.atomic_write import atomic_write

N = 40
DIM = 3
BATCH = 4
POS = 2
NEG = 3
Make = Callable[..., torch.optim.Optimizer]

MODELS = [
    "ModelFactory",
    "ModelFactoryMM",
    "PytorchModelFactory",
    "GPUPytorchModelFactory",
    "CPUPytorchModelFactory",
]
STATES = [name.replace("Model", "Optimizer") for name in MODELS]
COMS = ["COM", "COMMM", "PytorchCOM", "GPUPytorchCOM", "CPUPytorchCOM"]

# A row whose gradient is zero stays as it is.
LAZY: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
}
OTHERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    # Tiny tensors: threads would only wait for each other.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Inner(nn.Module):
    def __init__(self, rows: int, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, DIM, sparse=sparse, dtype=dtype)


class Model(nn.Module):
    """A nested embedding, after a parameter that the optimizer has not."""

    def __init__(self, rows: int, sparse: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)
        self.inner = Inner(rows, sparse, dtype)

    def forward(self, pos: Any, neg: Any) -> torch.Tensor:
        words = self.inner.words
        return score(
            *(words(torch.as_tensor(slots, device=words.weight.device)) for slots in (pos, neg))
        )


def score(pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, NEG, dtype=pos.dtype, device=pos.device)
    return (pos.sum(1, keepdim=True) * neg).sum(2).sigmoid().mul(
        weights
    ).sum() + pos.square().sum() / 7


def batches(repeat: bool, steps: int = 8) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    for _ in range(steps):
        ids = (
            rng.integers(0, 9, BATCH * (POS + NEG))
            if repeat
            else rng.permutation(N)[: BATCH * (POS + NEG)]
        )
        yield ids[: BATCH * POS].reshape(BATCH, POS), ids[BATCH * POS :].reshape(BATCH, NEG)


def made(
    model_name: str, make: Make, *, sparse: bool = False, seed: int = 0
) -> tuple[Any, Any, Model, torch.optim.Optimizer]:
    model = Model(5, sparse)
    optimizer = make([model.inner.words.weight])
    weights = getattr(SpeedTorch, model_name)(model.inner.words, N, DIM, datatype="float64")
    states = getattr(SpeedTorch, model_name.replace("Model", "Optimizer"))(
        optimizer, N, DIM, model, "inner.words", dtype="float64"
    )
    torch.manual_seed(seed)
    weights.uniformDistributionInit(-1, 1)
    states.optInit()
    return weights, states, model, optimizer


def train(
    weights: Any, states: Any, model: Model, optimizer: torch.optim.Optimizer, ids: Any
) -> np.ndarray:
    static = weights.variableTransformer(BATCH, POS, NEG)
    for pos, neg in ids:
        weights.beforeForwardPass(pos, neg)
        states.beforeForwardPass(pos, neg)
        optimizer.zero_grad()
        model(*static).backward()
        optimizer.step()
        weights.afterOptimizerStep(pos, neg)
        states.afterOptimizerStep(pos, neg)
    return weights.getNumpyVersion()


def start(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return nn.init.uniform_(torch.empty(N, DIM, dtype=torch.float64), -1, 1)


def whole(make: Make, ids: Any, sparse: bool = False) -> np.ndarray:
    """The plain loop over the whole table."""
    embedding = nn.Embedding.from_pretrained(start(), freeze=False, sparse=sparse)
    optimizer = make([embedding.weight])
    for pos, neg in ids:
        optimizer.zero_grad()
        score(embedding(torch.from_numpy(pos)), embedding(torch.from_numpy(neg))).backward()
        optimizer.step()
    return embedding.weight.detach().numpy()


def by_block(make: Make, ids: Any) -> np.ndarray:
    """The plain loop over blocks of rows, each of them once, whose state is kept in tables of full length."""
    table = start()
    kept = dict[str, torch.Tensor]()
    shared = dict[str, Any]()
    # Of Rprop; all others of OTHERS begin with zeros.
    initial = {"step_size": 0.1}
    for pos, neg in ids:
        rows, inverse = np.unique(
            np.concatenate([pos.reshape(-1), neg.reshape(-1)]), return_inverse=True
        )
        block, inverse = nn.Parameter(table[rows].clone()), torch.from_numpy(inverse)
        optimizer = make([block])
        optimizer.state[block] = {
            **shared,
            **{key: value[rows].clone() for key, value in kept.items()},
        }
        if not optimizer.state[block]:
            del optimizer.state[block]
        looked_up = block[inverse]
        score(
            looked_up[: pos.size].view(BATCH, POS, DIM), looked_up[pos.size :].view(BATCH, NEG, DIM)
        ).backward()
        optimizer.step()
        for key, value in optimizer.state[block].items():
            if isinstance(value, torch.Tensor) and value.shape == block.shape:
                full = kept.setdefault(
                    key, torch.full((N, DIM), initial.get(key, 0.0), dtype=torch.float64)
                )
                full[rows] = value
            else:
                shared[key] = value
        table[rows] = block.detach()
    return table.numpy()


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("optimizer", LAZY)
@pytest.mark.parametrize("name", MODELS)
def test_equals_training_the_whole_table(name: str, optimizer: str, repeat: bool) -> None:
    result = train(*made(name, LAZY[optimizer]), batches(repeat))
    expected = whole(LAZY[optimizer], batches(repeat))
    if repeat:
        # Sums in another order.
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
    # A GPU draws other numbers.
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
    """What is kept on a GPU, on the CPU."""
    monkeypatch.setattr(
        factories,
        "on_device",
        lambda *_: (
            lambda shape, dtype, key: placement.DeviceTable(
                torch.zeros(shape, dtype=placement.TORCH[dtype])
            )
        ),
    )
    result = train(*made("PytorchModelFactory", LAZY["adagrad"]), batches(True))
    np.testing.assert_allclose(result, whole(LAZY["adagrad"], batches(True)), rtol=0, atol=1e-13)


def test_several_tables_in_one_optimizer() -> None:
    """As word2vec has them: one table of centres, one of contexts."""
    rng = np.random.default_rng(5)
    ids = [(rng.integers(0, N, (6, 1)), rng.integers(0, 9, (6, 4))) for _ in range(5)]
    ours = nn.ModuleDict({"u": nn.Embedding(1, DIM), "v": nn.Embedding(1, DIM)})
    full = nn.ModuleDict({"u": nn.Embedding(N, DIM), "v": nn.Embedding(N, DIM)})
    by_ids, by_slots = (torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (full, ours))
    switchers, slots = [], []
    for name, per_row in (("u", 1), ("v", 4)):
        initial = full[name].weight.detach().clone()
        switchers.append(
            (
                SpeedTorch.ModelFactory(ours[name], N, DIM),
                SpeedTorch.OptimizerFactory(by_slots, N, DIM, ours, name),
            )
        )
        switchers[-1][0].customInit(torch.Tensor.copy_, initial)
        switchers[-1][1].optInit()
        slots.append(torch.from_numpy(switchers[-1][0].variableTransformer(6, per_row)))
    for batch in ids:
        for rows, both in zip(batch, switchers, strict=True):
            for switcher in both:
                switcher.beforeForwardPass(rows)
        for model, optimizer, (u, v) in [
            (full, by_ids, map(torch.from_numpy, batch)),
            (ours, by_slots, slots),
        ]:
            optimizer.zero_grad()
            (model["u"](u) * model["v"](v)).sum().sigmoid().backward()
            optimizer.step()
        for rows, both in zip(batch, switchers, strict=True):
            for switcher in both:
                switcher.afterOptimizerStep(rows)
    for name, (weights, states) in zip("uv", switchers, strict=True):
        np.testing.assert_allclose(
            weights.getNumpyVersion(), full[name].weight.detach().numpy(), atol=1e-6
        )
        np.testing.assert_allclose(
            states.getNumpyVersion()["sum"],
            by_ids.state[full[name].weight]["sum"].numpy(),
            atol=1e-6,
        )


def test_loading_begins_where_saving_was() -> None:
    """Tables that were saved before the first step, into an optimizer that has taken some."""
    states = made("ModelFactory", OTHERS["momentum"])[1]
    assert (
        states.getCupyVar()["momentum_buffer"].shape
        == states.getTorchVar()["momentum_buffer"].shape
        == (N, DIM)
    )
    for optimizer in ("momentum", "adam"):
        weights, states, model, inner = made("ModelFactory", OTHERS[optimizer])
        states.saveCupy("new")
        expected = train(weights, states, model, inner, batches(True))
        weights.customInit(lambda table: table.copy_(start()))
        states.loadCupy("new")
        np.testing.assert_array_equal(train(weights, states, model, inner, batches(True)), expected)


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


# torch's Adagrad makes sparse tensors and does not say whether to check.
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


def test_sparse_rows_that_are_lent_and_not_looked_up_stay() -> None:
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
    # All slots of a row evolve alike.
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
    # Nothing stays on the model's weight.
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


def step_of(
    ids: Any, *switchers: Any, model: Model, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """Up to the optimizer's step; the rows are not brought back."""
    for switcher in switchers:
        switcher.beforeForwardPass(ids)
    optimizer.zero_grad()
    loss = model.inner.words(torch.arange(len(ids))).square().sum()
    loss.backward()
    optimizer.step()
    return loss


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
    """After a batch that was interrupted, slots of the next one have gradients of their own."""
    embedding = nn.Embedding(4, DIM)
    for ids in ([1, 1, 2, 2], [3, 4, 5, 6]):
        weights = SpeedTorch.ModelFactory(embedding, N, DIM)
        weights.zerosInit()
        weights.beforeForwardPass(ids)
        pickle.loads(pickle.dumps(embedding))
    embedding(torch.arange(4)).sum().backward()
    assert (embedding.weight.grad == 1).all()


def test_rows_of_another_width_are_refused() -> None:
    weights, states, model, optimizer = made("ModelFactory", OTHERS["momentum"])
    for wrong in (DIM - 1, DIM + 1):
        with pytest.raises(
            errors.ArgumentError,
            match=rf"embed_dimension={wrong}: Embedding has a weight of shape \(5, 3\)",
        ):
            SpeedTorch.ModelFactory(model.inner.words, N, wrong)
        with pytest.raises(
            errors.ArgumentError, match=rf"embed_dimension={wrong}: inner.words has a weight"
        ):
            SpeedTorch.OptimizerFactory(optimizer, N, wrong, model, "inner.words")
    step_of([0, 1], weights, states, model=model, optimizer=optimizer)
    model.inner.words.weight.data = torch.ones(2, DIM + 1, dtype=torch.float64)
    optimizer.state[model.inner.words.weight]["momentum_buffer"] = torch.ones(2, DIM + 1)
    for table, name in [(weights, "weight"), (states, "momentum_buffer")]:
        with pytest.raises(
            errors.WriteBackError, match=rf"{name} is of shape \(2, 4\); expected \(2, 3\)"
        ):
            table.afterOptimizerStep([0, 1])
    np.testing.assert_array_equal(weights.getNumpyVersion(), start().numpy())
    assert not states.getNumpyVersion()["momentum_buffer"].any()


def test_state_without_its_factory_is_told() -> None:
    weights, _, model, optimizer = made("ModelFactory", OTHERS["momentum"])
    step_of([1, 2, 3], weights, model=model, optimizer=optimizer)
    weights.afterOptimizerStep([1, 2, 3])
    before = weights.getNumpyVersion()
    step_of([4, 4, 5], weights, model=model, optimizer=optimizer)
    with pytest.raises(errors.WriteBackError, match="slots of one row differ"):
        weights.afterOptimizerStep([4, 4, 5])
    np.testing.assert_array_equal(weights.getNumpyVersion(), before)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rprop"])
def test_a_first_batch_may_be_interrupted(optimizer: str) -> None:
    weights, states, model, inner = made("ModelFactory", OTHERS[optimizer])
    step_of([1, 2], weights, states, model=model, optimizer=inner)
    step_of([3, 4], weights, states, model=model, optimizer=inner)
    weights.afterOptimizerStep([3, 4])
    states.afterOptimizerStep([3, 4])
    changed = (weights.getNumpyVersion() != start().numpy()).any(1)
    assert np.flatnonzero(changed).tolist() == [3, 4]


def test_the_optimizer_may_be_loaded_after_its_tables_are_made() -> None:
    weights, states, model, optimizer = made("ModelFactory", OTHERS["adam"])
    step_of([1, 2], weights, states, model=model, optimizer=optimizer)
    saved = optimizer.state_dict()
    weights, states, model, optimizer = made("ModelFactory", OTHERS["adam"])
    optimizer.load_state_dict(saved)
    step_of([3, 4, 5], weights, states, model=model, optimizer=optimizer)
    states.afterOptimizerStep([3, 4, 5])
    assert np.flatnonzero(states.getNumpyVersion()["exp_avg"].any(1)).tolist() == [3, 4, 5]
    states.saveCupy("states")
    states.loadCupy("states")


def test_the_model_may_change_its_dtype_before_optinit() -> None:
    model = Model(2, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.inner.words.parameters())
    weights = SpeedTorch.ModelFactory(model.inner.words, N, DIM)
    states = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "inner.words")
    model.double()
    weights.zerosInit()
    states.optInit()
    for _ in range(2):
        step_of([1, 2], weights, states, model=model, optimizer=optimizer)
        weights.afterOptimizerStep([1, 2])
        states.afterOptimizerStep([1, 2])
    assert optimizer.state[model.inner.words.weight]["exp_avg"].dtype is torch.float64


@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_loading_ends_the_batch(way: str) -> None:
    weights, states, model, _ = made("ModelFactory", OTHERS["momentum"])
    for table in (weights, states):
        getattr(table, f"save{way}")("table")
        table.beforeForwardPass([1, 1])
        getattr(table, f"load{way}")("table")
        with pytest.raises(errors.WriteBackError, match="not in the model"):
            table.afterOptimizerStep([1, 1])
    assert not model.inner.words.weight._backward_hooks


def test_a_default_device_is_not_for_tables() -> None:
    with torch.device("meta"):
        model = Model(2).to_empty(device="cpu")
        weights = SpeedTorch.ModelFactory(model.inner.words, N, DIM)
        states = SpeedTorch.OptimizerFactory(
            OTHERS["momentum"]([model.inner.words.weight]), N, DIM, model, "inner.words"
        )
        weights.zerosInit()
        states.optInit()
        for table in (weights, states):
            table.beforeForwardPass([1, 1])
            table.afterOptimizerStep([1, 1])
            table.saveCupy("table")
            table.loadCupy("table")
        gadget = SpeedTorch.DataGadget(ARRAY)
        gadget.gadgetInit()
        np.testing.assert_array_equal(gadget.getData(1).cpu().numpy(), ARRAY[1])


def test_rows_of_files_are_found_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("data.npy", ARRAY)
    weights, gadget = (
        SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), N, DIM),
        SpeedTorch.DataGadgetMM("data.npy"),
    )
    weights.zerosInit()
    gadget.gadgetInit()
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    weights.beforeForwardPass([1])
    weights.afterOptimizerStep([1])
    assert not weights.getNumpyVersion().any()
    np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY)
    assert os.listdir() == []


def test_saving_into_the_tables_own_file() -> None:
    rows = np.arange(1 << 14, dtype=np.float32).reshape(-1, DIM + 1)
    np.save("data.npy", rows)
    os.symlink("data.npy", "link.npy")
    gadget = SpeedTorch.DataGadgetMM("data.npy")
    gadget.gadgetInit()
    gadget.insertData(-1.0, 0)
    rows[0] = -1
    for name in ("data", "data.npy", "link"):
        gadget.saveCupy(name)
        np.testing.assert_array_equal(np.load("data.npy"), rows)
    gadget.insertData(-2.0, 1)
    assert (np.load("data.npy")[1] == -2).all()
    states = made("ModelFactoryMM", OTHERS["momentum"])[1]
    for table, name in [
        (gadget, "link.npy"),
        (states, "inner.wordsSGD0.memmapmomentum_buffer.cpy.npy"),
    ]:
        with pytest.raises(errors.ArgumentError, match="has its rows in this file"):
            table.saveTorch(name)


def test_saved_files_are_there_whole_or_as_they_were() -> None:
    weights, states, _, _ = made("ModelFactory", OTHERS["adam"])
    for save, name in [
        (weights.saveCupy, "a.npy"),
        (weights.saveTorch, "a"),
        (states.saveCupy, "s.npz"),
        (states.saveTorch, "s"),
    ]:
        save(name)
        first = os.stat(name).st_ino
        save(name)
        # Another file has taken the name.
        assert os.stat(name).st_ino != first
    with pytest.raises(ZeroDivisionError), atomic_write("a.npy") as file:
        file.write(b"half")
        raise ZeroDivisionError
    np.testing.assert_array_equal(np.load("a.npy"), start().numpy())
    assert sorted(os.listdir()) == ["a", "a.npy", "s", "s.npz"]
    # What saveCupy has made of this name, and not saveTorch.
    weights.loadCupy("a")


def test_files_of_tables_that_could_not_be_filled_do_not_stay() -> None:
    weights, states, _, optimizer = made("ModelFactory", OTHERS["adam"])
    np.save("wrong.npy", np.zeros((3, 3)))
    states.saveTorch("states")
    saved = torch.load("states")
    before = sorted(os.listdir())
    weights = SpeedTorch.ModelFactoryMM(weights.model_variable, N, DIM)
    with pytest.raises(ZeroDivisionError):
        weights.customInit(lambda table: 1 / 0)
    with pytest.raises(errors.StoreError, match="was saved"):
        weights.loadCupy("wrong")
    states = SpeedTorch.OptimizerFactoryMM(
        optimizer, N, DIM, states.model, "inner.words", dtype="float64"
    )
    with pytest.raises(errors.StoreError, match="was saved"):
        states.restore(saved | {"rows.exp_avg": torch.zeros(3, 3)})
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows.exp_avg_sq": torch.zeros(N, 2)},
        {"rows.more": torch.zeros(N, DIM)},
        {"number.more": 1},
        {"begun.more": True},
    ],
    ids=str,
)
def test_state_is_taken_over_as_a_whole_or_not_at_all(wrong: dict[str, Any]) -> None:
    states = made("ModelFactory", OTHERS["adam"])[1]
    saved = states.snapshot()
    with pytest.raises(errors.StoreError, match="was saved; Adam has"):
        states.restore(saved | {"rows.exp_avg": torch.ones(N, DIM)} | wrong)
    assert not states.getNumpyVersion()["exp_avg"].any()


@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_state_of_another_class_is_refused(way: str) -> None:
    train(
        *(saving := made("ModelFactory", lambda p: torch.optim.SparseAdam(p), sparse=True)),
        batches(True, 1),
    )
    getattr(saving[1], f"save{way}")("states")
    with pytest.raises(
        errors.StoreError, match="state of SparseAdam was saved; the optimizer is Adam"
    ):
        getattr(made("ModelFactory", OTHERS["adam"])[1], f"load{way}")("states")


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "complex64"]
)
def test_tables_of_torch_have_every_dtype(dtype: str) -> None:
    table = placement.DeviceTable(torch.zeros(5, 2, dtype=getattr(torch, dtype)))
    values = torch.tensor([[1, 0], [0, 1]]).to(getattr(torch, dtype))
    table.write(np.array([3, 1]), values)
    assert torch.equal(table.read(np.array([3, 1]), torch.device("cpu"), values.dtype), values)


@pytest.mark.parametrize(
    ("name", "options", "place"),
    [
        (name, {}, ("cuda", False))
        for name in ("ModelFactory", "PytorchModelFactory", "GPUPytorchModelFactory")
    ]
    + [
        ("ModelFactory", {"CPUPinn": True}, ("cpu", True)),
        ("PytorchModelFactory", {"deviceType": "cpu"}, ("cpu", False)),
    ]
    + [("CPUPytorchModelFactory", {}, ("cpu", True))],
)
def test_where_tables_are(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], place: tuple[str, bool]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(factories, "on_device", lambda *where: asked.append(where))
    model = Model(2)
    getattr(SpeedTorch, name)(model.inner.words, N, DIM, **options)
    optimizer = LAZY["sgd"](model.inner.words.parameters())
    getattr(SpeedTorch, name.replace("Model", "Optimizer"))(
        optimizer, N, DIM, model, "inner.words", **options
    )
    getattr(SpeedTorch, name.replace("ModelFactory", "COM"))(N, **options)
    assert asked == [place] * 3


def test_attributes_that_programs_read() -> None:
    embedding = nn.Embedding(2, DIM)
    weights = SpeedTorch.ModelFactory(embedding, N, DIM, CPUPinn=True)
    weights.zerosInit()
    assert weights.CUPYcorpus.device == "cpu"
    assert weights.CPUPinn
    mapped, gadget = (
        SpeedTorch.ModelFactoryMM(embedding, N, DIM, "mine"),
        SpeedTorch.DataGadgetMM(ARRAY, diskname="data"),
    )
    assert (mapped.diskname, mapped.CPUPinn, gadget.diskname, gadget.CPUPinn) == (
        "mine",
        False,
        "data",
        False,
    )
    torch_weights = SpeedTorch.CPUPytorchModelFactory(embedding, N, DIM)
    assert (torch_weights.deviceType, torch_weights.pinType) == ("cpu", True)
    assert not hasattr(SpeedTorch.ModelFactory, "getCupyMM")


def test_a_batch_without_a_step_changes_nothing() -> None:
    weights, states, _, _ = made("ModelFactory", OTHERS["momentum"])
    weights.beforeForwardPass([1, 1])
    states.beforeForwardPass([1, 1])
    weights.afterOptimizerStep([1, 1])
    states.afterOptimizerStep([1, 1])
    np.testing.assert_array_equal(weights.getNumpyVersion(), start().numpy())
    assert not states.getNumpyVersion()["momentum_buffer"].any()


def test_state_is_found_by_parameter() -> None:
    """In an optimizer over some of the parameters, in another order and in groups with options of their own."""
    model = nn.Module()
    model.u, model.v, model.w = (nn.Embedding(2, DIM) for _ in range(3))
    optimizer = torch.optim.Adagrad(
        [
            {"params": [model.w.weight]},
            {"params": [model.v.weight], "initial_accumulator_value": 0.5, "initial_lr": 1},
        ]
    )
    states = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "v")
    states.optInit()
    assert (states.getNumpyVersion()["sum"] == 0.5).all()
    states.beforeForwardPass(np.arange(6))
    assert (optimizer.state[model.v.weight]["sum"] == 0.5).all()
    assert optimizer.state[model.v.weight]["sum"].shape == (6, DIM)
    assert optimizer.state[model.w.weight]["sum"].shape == (2, DIM)
    with pytest.raises(errors.ArgumentError, match="does not have this parameter"):
        SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "u")
    with pytest.raises(
        errors.ArgumentError, match=r"no x\.weight; expected one of \['u', 'v', 'w'\]"
    ):
        SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "x")
    with pytest.raises(errors.ArgumentError, match="cannot train rows"):
        SpeedTorch.OptimizerFactory(torch.optim.LBFGS([model.u.weight]), N, DIM, model, "u")


@pytest.mark.parametrize("name", MODELS)
def test_initialisers(name: str) -> None:
    weights = getattr(SpeedTorch, name)(nn.Embedding(2, DIM), N, DIM)
    with pytest.raises(errors.ClosedError, match="no table yet"):
        weights.beforeForwardPass([0])
    weights.zerosInit()
    assert weights.getNumpyVersion().shape == (N, DIM)
    assert weights.getNumpyVersion().dtype == np.float32
    assert not weights.getNumpyVersion().any()
    for method, arguments, function in [
        ("uniformDistributionInit", (2.0, 3.0), nn.init.uniform_),
        ("normalDistributionInit", (5.0, 0.5), nn.init.normal_),
    ]:
        torch.manual_seed(4)
        getattr(weights, method)(*arguments)
        torch.manual_seed(4)
        expected = function(torch.empty(N, DIM), *arguments)
        np.testing.assert_array_equal(weights.getNumpyVersion(), expected.numpy())
        torch.manual_seed(4)
        weights.customInit(function, *arguments)
        assert torch.equal(weights.getTorchVar().cpu(), expected)
        np.testing.assert_array_equal(weights.getCupyVar(), expected.numpy())
    weights.close()
    if not name.endswith("MM"):
        weights.getTorchVar()[1] = 9  # shared
        weights.beforeForwardPass([1])
        assert (weights.model_variable.weight == 9).all()


@pytest.mark.parametrize(
    "datatype",
    ["float16", np.float16, np.dtype("float16"), torch.float16, "bfloat16", torch.bfloat16],
)
def test_datatypes(datatype: Any) -> None:
    weights = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), N, DIM, "table", datatype)
    weights.normalDistributionInit(0, 1)
    weights.beforeForwardPass([3, 2])
    assert weights.model_variable.weight.dtype is torch.float32
    assert torch.equal(
        weights.model_variable.weight.detach(), weights.getTorchVar()[[3, 2]].float()
    )
    weights.saveCupy("saved")
    other = SpeedTorch.ModelFactory(nn.Embedding(2, DIM), N, DIM, datatype, CPUPinn=True)
    other.loadCupy("saved.npy")
    assert torch.equal(other.getTorchVar(), weights.getTorchVar())


def test_what_cannot_be_is_refused() -> None:
    embedding = nn.Embedding(2, DIM)
    with pytest.raises(errors.StoreError, match="datatype"):
        SpeedTorch.ModelFactory(embedding, N, DIM, torch.complex32)
    with pytest.raises(errors.StoreError, match="random rows of int32"):
        SpeedTorch.ModelFactory(embedding, N, DIM, "int32").uniformDistributionInit(0, 1)
    with pytest.raises(errors.ArgumentError, match="deviceType='mps'"):
        SpeedTorch.PytorchModelFactory(embedding, N, DIM, deviceType="mps")
    with pytest.raises(errors.ArgumentError, match="deviceType='gpu'"):
        SpeedTorch.PytorchModelFactory(embedding, N, DIM, deviceType="gpu")
    with pytest.raises(errors.ArgumentError, match="padding_idx"):
        SpeedTorch.ModelFactory(nn.Embedding(2, DIM, padding_idx=0), N, DIM)
    with pytest.raises(errors.ArgumentError, match="model_variable=ReLU"):
        SpeedTorch.ModelFactory(nn.ReLU(), N, DIM)


def test_variable_transformer() -> None:
    weights = SpeedTorch.ModelFactory(nn.Embedding(2, DIM), N, DIM)
    np.testing.assert_array_equal(weights.variableTransformer(2, 3), [[0, 1, 2], [3, 4, 5]])
    pos, neg = weights.variableTransformer(2, 1, negPerBatch=2)
    np.testing.assert_array_equal(pos, [[0], [1]])
    np.testing.assert_array_equal(neg, [[2, 3], [4, 5]])
    assert pos.dtype == neg.dtype == np.int64


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "wrong", [[0, -1], np.array([[0], [N]]), torch.tensor([1.0]), np.array([True, False])]
)
def test_ids_out_of_range(name: str, wrong: Any) -> None:
    weights, states, _, _ = made(name, LAZY["adagrad"])
    for table in (weights, states):
        with pytest.raises(errors.RowIndexError):
            table.beforeForwardPass(np.array([[0]]), wrong)
    np.testing.assert_array_equal(weights.getNumpyVersion(), start().numpy())


def test_only_rows_that_were_lent_come_back() -> None:
    weights, states, model, _ = made("ModelFactory", OTHERS["adam"])
    with pytest.raises(errors.WriteBackError, match="not in the model"):
        weights.afterOptimizerStep([0])
    weights.beforeForwardPass([0, 1])
    states.beforeForwardPass([0, 1])
    for table in (weights, states):
        with pytest.raises(errors.WriteBackError, match="not in the model"):
            table.afterOptimizerStep([1, 0])
    model.inner.words.weight.data = torch.zeros(3, DIM)
    with pytest.raises(errors.WriteBackError, match=r"shape \(3, 3\); expected \(2, 3\)"):
        weights.afterOptimizerStep([0, 1])


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "adam") for name in MODELS]
    + [("ModelFactory", each) for each in ("momentum", "rprop", "asgd", "adamw fused", "sparse")],
)
@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_training_goes_on_after_save_and_load(name: str, optimizer: str, way: str) -> None:
    make = OTHERS.get(optimizer, lambda p: torch.optim.SparseAdam(p, lr=0.1))
    sparse = optimizer == "sparse"
    ids = list(batches(True, 6))
    expected = train(*made(name, make, sparse=sparse), ids)
    weights, states, model, inner = made(name, make, sparse=sparse)
    train(weights, states, model, inner, ids[:3])
    getattr(weights, f"save{way}")("weights")
    getattr(states, f"save{way}")("states")
    weights, states, model, inner = made(name, make, sparse=sparse, seed=1)
    getattr(weights, f"load{way}")("weights")
    getattr(states, f"load{way}")("states")
    np.testing.assert_array_equal(train(weights, states, model, inner, ids[3:]), expected)


def test_loading_refuses_what_is_not_this() -> None:
    weights, states, model, _ = made("ModelFactory", OTHERS["adam"])
    states.saveTorch("adam.pt")
    np.save("other.npy", np.zeros((N, 2)))
    with pytest.raises(errors.StoreError, match=r"shape \(40, 2\) was saved; expected \(40, 3\)"):
        weights.loadCupy("other")
    other = SpeedTorch.OptimizerFactory(
        LAZY["adagrad"]([model.inner.words.weight]), N, DIM, model, "inner.words"
    )
    for without, problem in [
        ((), "state of Adam was saved; the optimizer is Adagrad"),
        (("optimizer",), "Adagrad has"),
    ]:
        with pytest.raises(errors.StoreError, match=problem):
            other.restore(
                {key: value for key, value in torch.load("adam.pt").items() if key not in without}
            )
    torch.save(torch.zeros(2), "tensor.pt")
    with pytest.raises(errors.StoreError, match="expected tables of an optimizer"):
        other.loadTorch("tensor.pt")
    for load in (weights.loadCupy, weights.loadTorch, states.loadCupy, states.loadTorch):
        with pytest.raises(errors.FileMissing):
            load("absent")


def test_files_hold_the_rows() -> None:
    weights, states, model, optimizer = made("ModelFactoryMM", OTHERS["adam"])
    train(weights, states, model, optimizer, batches(True))
    weights.close()
    states.close()
    assert sorted(os.listdir()) == [
        "inner.wordsAdam0.memmapexp_avg.cpy.npy",
        "inner.wordsAdam0.memmapexp_avg_sq.cpy.npy",
        "variable0.memmap.cpy.npy",
    ]
    expected = train(*made("ModelFactory", OTHERS["adam"]), batches(True))
    np.testing.assert_array_equal(np.load("variable0.memmap.cpy.npy"), expected)
    np.testing.assert_array_equal(weights.getCupyMM(), expected)
    assert np.load("inner.wordsAdam0.memmapexp_avg.cpy.npy").any()
    made("ModelFactoryMM", OTHERS["adam"])
    assert "variable1.memmap.cpy.npy" in os.listdir()
    named = SpeedTorch.OptimizerFactoryMM(optimizer, N, DIM, model, "inner.words", diskname="mine")
    named.optInit()
    assert "mine0.memmapexp_avg.cpy.npy" in os.listdir()


def test_modelfactory_takes_the_diskname_of_the_first_readmes() -> None:
    embedding = nn.Embedding(4, DIM)
    weights = SpeedTorch.ModelFactory(
        embedding,
        total_classes=N,
        embed_dimension=DIM,
        diskname="words",
        datatype="float32",
        CPUPinn=False,
    )
    weights.uniformDistributionInit(-1, 1)
    saved = np.load("words0.memmap.cpy.npy")
    assert saved.shape == (N, DIM)
    weights.beforeForwardPass(np.arange(4))
    np.testing.assert_array_equal(embedding.weight.detach().numpy(), saved[:4])
    embedding.weight.data.fill_(2)
    weights.afterOptimizerStep(np.arange(4))
    weights.close()
    assert (np.load("words0.memmap.cpy.npy")[:4] == 2).all()


@pytest.mark.parametrize("rest", [("words",), ("words", "float32"), ("words", "float32", True)])
def test_a_diskname_in_the_place_of_the_datatype_is_refused(rest: tuple[Any, ...]) -> None:
    with pytest.raises(
        errors.StoreError,
        match=r"datatype='words' is not a dtype; .*passed by keyword, as diskname=",
    ):
        SpeedTorch.ModelFactory(nn.Embedding(4, DIM), N, DIM, *rest)
    assert not os.listdir()


@pytest.mark.parametrize("name", MODELS)
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(
        errors.StoreError,
        match=r"datatype='float23' is not a dtype; expected one of bfloat16, bool",
    ):
        getattr(SpeedTorch, name)(nn.Embedding(4, DIM), N, DIM, datatype="float23")


@pytest.mark.parametrize("pinned", [False, True])
def test_pytorchoptimizerfactory_takes_cpupinn(pinned: bool) -> None:
    model = Model(4)
    states = SpeedTorch.PytorchOptimizerFactory(
        torch.optim.Adagrad(model.inner.words.parameters()),
        N,
        DIM,
        model,
        "inner.words",
        dtype="float32",
        CPUPinn=pinned,
    )
    assert (states.deviceType, states.pinType) == (("cpu", True) if pinned else ("cuda", False))
    states.optInit()
    assert states.getNumpyVersion()["sum"].shape == (N, DIM)


def test_rows_of_files_are_not_in_memory() -> None:
    rows = 1 << 20
    weights = SpeedTorch.ModelFactoryMM(nn.Embedding(2, 64), rows, 64)
    before = resident_bytes()
    weights.zerosInit()
    ids = np.arange(0, rows, 4097)
    weights.beforeForwardPass(ids)
    with torch.no_grad():
        weights.model_variable.weight += 1
    weights.afterOptimizerStep(ids)
    after = resident_bytes()
    weights.close()
    assert os.path.getsize("variable0.memmap.cpy.npy") > rows * 256
    assert sum(after.values()) - sum(before.values()) < rows * 256 // 8
    table = np.load("variable0.memmap.cpy.npy", mmap_mode="r")
    assert (table[ids] == 1).all()
    assert not table[ids + 1].any()


@pytest.mark.parametrize("name", COMS)
def test_co_occurrences(name: str) -> None:
    com = getattr(SpeedTorch, name)(12)
    with pytest.raises(errors.ClosedError, match=r"comInit\(\)"):
        com.getNumpyVersion()
    com.comInit(CPUPinn=False)
    assert com.getNumpyVersion().shape == (12, 12)
    assert com.getNumpyVersion().dtype == (np.int32 if "Pytorch" in name else np.uint32)
    assert com.getTorchVar().dtype == (torch.int32 if "Pytorch" in name else torch.uint32)
    com.getTorchVar()[3, 4] = 7
    assert com.getNumpyVersion()[3, 4] == 7
    com.saveCupy("com.npy")
    com.saveTorch("com.pt")
    for load, file in [("loadCupy", "com.npy"), ("loadTorch", "com.pt")]:
        other = getattr(SpeedTorch, name)(12)
        getattr(other, load)(file)
        np.testing.assert_array_equal(other.getCupyVar(), com.getNumpyVersion())


ARRAY = np.arange(7 * 4 * 3, dtype=np.float32).reshape(7, 4, 3)
INDEXES: list[Any] = [
    2,
    slice(1, 5),
    slice(None, None, -2),
    slice(0, 0),
    [5, 1, 5],
    np.array([[5, 1], [5, 0]], np.uint8),
    torch.tensor([6, 0]),
    np.arange(7) % 2 == 0,
    ARRAY > 40,
    ...,
    (),
    (3, 2, 1),
    (3, slice(1, 3)),
    (slice(1, 3), 2),
    (slice(1, 3), ..., [0, 2, 0]),
    ([5, 1, 5], [0, 3, 1]),
    ([[5], [1]], slice(None), [[0, 1]]),
    ([4, 4], slice(0, 2), slice(None)),
    (0, None, 1),
    -1,
    [[0, -7], [-1, 3]],
    (..., -2),
    (slice(None), torch.tensor([1, 1])),
    (torch.arange(7) > 3, slice(0, 2)),
    (torch.tensor(2), torch.tensor([0, 3])),
    None,
    True,
]


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
@pytest.mark.parametrize("indexes", INDEXES, ids=repr)
def test_gadget_indexes_as_numpy_does(name: str, indexes: Any) -> None:
    plain = ARRAY.copy()
    as_array = lambda each: each.numpy() if isinstance(each, torch.Tensor) else each  # noqa: E731
    numpy_indexes = (
        tuple(map(as_array, indexes)) if isinstance(indexes, tuple) else as_array(indexes)
    )
    gadget = getattr(SpeedTorch, name)(ARRAY)
    gadget.gadgetInit()
    got = gadget.getData(indexes)
    assert tuple(got.shape) == plain[numpy_indexes].shape
    np.testing.assert_array_equal(got.cpu().numpy(), plain[numpy_indexes])
    values = -np.arange(got.numel(), dtype=np.float64).reshape(tuple(got.shape)) - 1
    plain[numpy_indexes] = values
    gadget.insertData(torch.as_tensor(values), indexes)
    np.testing.assert_array_equal(gadget.getNumpyVersion(), plain)
    gadget.insertData(0.5, indexes)
    plain[numpy_indexes] = 0.5
    np.testing.assert_array_equal(gadget.getNumpyVersion(), plain)


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
def test_gadget_of_files(name: str) -> None:
    np.save("data.npy", ARRAY)
    gadget = getattr(SpeedTorch, name)("data.npy", CPUPinn=True)
    gadget.gadgetInit()
    gadget.insertData(torch.full((4, 3), -1.0), 2)
    # Written through, or a copy.
    assert (np.load("data.npy")[2] == -1).all() == (name == "DataGadgetMM")
    gadget.saveCupy("copy")
    gadget.saveTorch("copy.pt")
    for load, file in [("loadCupy", "copy"), ("loadTorch", "copy.pt")]:
        np.save("small.npy", np.zeros((2, 2), np.int8))
        other = getattr(SpeedTorch, name)("small.npy")
        other.gadgetInit()
        getattr(other, load)(file)
        np.testing.assert_array_equal(other.getNumpyVersion(), gadget.getNumpyVersion())
        assert (other.getData(2) == -1).all()
    with pytest.raises(errors.FileMissing):
        getattr(SpeedTorch, name)("absent.npy").gadgetInit()


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
def test_gadget_runs_as_documented_without_gadgetinit(name: str) -> None:
    make = getattr(SpeedTorch, name)
    np.save("data.npy", ARRAY)
    np.testing.assert_array_equal(
        make("data.npy", CPUPinn=False).getData([6, 0]).cpu().numpy(), ARRAY[[6, 0]]
    )
    np.testing.assert_array_equal(make("data.npy").getNumpyVersion(), ARRAY)
    gadget = make("data.npy")
    gadget.insertData(torch.full((4, 3), -1.0), 2)
    np.testing.assert_array_equal(
        gadget.getNumpyVersion(), np.concatenate([ARRAY[:2], -np.ones((1, 4, 3)), ARRAY[3:]])
    )
    make("data.npy").saveCupy("copy")
    np.testing.assert_array_equal(np.load("copy.npy"), np.load("data.npy"))
    other = make("absent.npy")
    with pytest.raises(errors.FileMissing, match=r"absent\.npy"):
        other.getData(0)
    other.loadCupy("copy.npy")
    np.testing.assert_array_equal(other.getData(0).cpu().numpy(), ARRAY[0])


def test_gadget_reads_its_file_again_only_at_gadgetinit() -> None:
    np.save("data.npy", ARRAY)
    gadget = SpeedTorch.DataGadget("data.npy")
    gadget.insertData(-1.0, 0)
    np.save("data.npy", ARRAY + 1)
    assert (gadget.getData(0) == -1).all()
    gadget.gadgetInit()
    np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY + 1)


def test_gadget_takes_files_of_any_order() -> None:
    np.save("fortran.npy", np.asfortranarray(ARRAY))
    np.save("swapped.npy", ARRAY.astype(">f4"))
    for number in range(2):
        np.save(f"part{number}.npy", ARRAY[3 * number :][: 3 + number])
    for name in ("fortran.npy", "swapped.npy", "part*.npy"):
        gadget = SpeedTorch.DataGadget(name)
        gadget.gadgetInit()
        np.testing.assert_array_equal(gadget.getData([6, 0]).cpu().numpy(), ARRAY[[6, 0]])
        np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY)
        with pytest.raises(
            errors.StoreError,
            match=r"is in Fortran order|expected one file in this machine's byte order",
        ):
            SpeedTorch.DataGadgetMM(name).gadgetInit()


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint32", "complex64"])
def test_gadget_dtypes(name: str, dtype: str) -> None:
    rows = torch.arange(12).view(4, 3).to(getattr(torch, dtype))
    gadget = getattr(SpeedTorch, name)(rows)
    gadget.gadgetInit()
    gadget.insertData(gadget.getData([0, 0]), (slice(None, 2),))
    assert torch.equal(gadget.getData(-1).cpu(), rows[-1])
    assert torch.equal(
        gadget.getTorchVar(), torch.arange(12).view(4, 3)[[0, 0, 2, 3]].to(rows.dtype)
    )


def test_gadget_says_what_is_wrong() -> None:
    gadget = SpeedTorch.DataGadget(torch.from_numpy(ARRAY))
    gadget.gadgetInit()
    for wrong in (
        -8,
        7,
        [0, -8],
        torch.tensor([0, 99]),
        [0.5],
        "rows",
        np.ones(3, bool),
        (0, 0, 3),
        slice(0, 1, 0),
        [[0], [1, 2]],
    ):
        with pytest.raises(errors.RowIndexError):
            gadget.getData(wrong)
        with pytest.raises(errors.RowIndexError):
            gadget.insertData(1.0, wrong)
    for values in (np.zeros((5, 4, 3)), "none", torch.eye(3).to_sparse()):
        with pytest.raises(errors.WriteBackError, match=r"expected values of shape \(2, 4, 3\)"):
            gadget.insertData(values, [1, 2])
    np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY)


def test_rows_lie_beyond_two_to_the_31_elements() -> None:
    rows = (1 << 31) // 512 + 9
    # A file with holes.
    weights = SpeedTorch.ModelFactoryMM(nn.Embedding(1, 512), rows, 512, datatype="float16")
    weights.zerosInit()
    ids = np.array([0, rows - 1, rows - 1, rows - 9])
    for value in (2.0, 3.0):
        weights.beforeForwardPass(ids)
        weights.model_variable.weight.data.fill_(value)
        weights.afterOptimizerStep(ids)
    weights.beforeForwardPass(np.array([rows - 1, rows - 2, 0]))
    assert weights.model_variable.weight[:, 0].tolist() == [3, 0, 3]


def test_every_name_is_there() -> None:
    assert set(MODELS + STATES + COMS + ["DataGadget", "DataGadgetMM"]) == set(SpeedTorch.__all__)
