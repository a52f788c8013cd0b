"""The state that a RowOptimizer keeps for each row: how it is found, stored and resumed."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.row_optimizers import DIM, KEEPS, N, batches, itself, simple, state_of, train_rows
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from pinfeed import ArrayStore, HostEmbedding, RowOptimizer, errors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", [name for name in KEEPS if hasattr(torch.optim, name)])
def test_the_state_of_an_optimizer_is_found(name: str) -> None:
    table = HostEmbedding(N, DIM)
    layout = RowOptimizer(getattr(torch.optim, name), [table]).tables[table].layout
    assert ({row.key for row in layout.rows}, set(layout.tables)) == KEEPS[name]
    assert layout.sparse == (name == "SparseAdam")


def test_every_optimizer_of_torch_is_known_here() -> None:
    classes = {
        key
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer", "LBFGS"} <= set(KEEPS)


def test_optimizers_that_cannot_train_rows() -> None:
    table = HostEmbedding(N, DIM, name="users")
    for kind, options, match in [
        (torch.optim.LBFGS, {}, "LBFGS cannot train rows.*closure"),
        (SGD, {"lr": -1}, "SGD cannot train rows.*Invalid learning rate: -1"),
        (Adam, {"no_such": 1}, "Adam cannot train rows.*no_such"),
        (table, {}, "expected the class of an optimizer, then the tables"),
        (nn.Linear, {}, "Linear cannot train rows"),
    ]:
        with pytest.raises(errors.ArgumentError, match=match):
            RowOptimizer(kind, [table], **options)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            RuntimeError(),
            errors.ArgumentError,
            r"Failing cannot train rows: a step on a small table failed \(RuntimeError\); expected",
        ),
        (KeyError("x"), errors.ArgumentError, r"a step on a small table failed \(KeyError: 'x'\)"),
        (
            MemoryError(),
            MemoryError,
            r"does not have enough memory to run Failing on a small table \(MemoryError\)",
        ),
    ],
    ids=repr,
)
def test_the_cause_of_a_failing_optimizer_is_reported(
    error: Exception, expected: type[Exception], message: str
) -> None:
    """Some errors have no text, for example Python's MemoryError."""

    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            raise error

    with pytest.raises(expected, match=message) as refusal:
        RowOptimizer(Failing, [HostEmbedding(3, 2)], lr=1)
    assert refusal.value.__cause__ is error


class Anchored(torch.optim.Optimizer):
    """Pulls every row back to its first value, and keeps a count and one scalar for each row."""

    def __init__(self, params: Any, pull: float) -> None:
        super().__init__(params, {"pull": pull})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state.update(
                        anchor=weight.clone(), seen=torch.full((len(weight),), 0.5), count=0
                    )
                state["count"] += 1
                state["seen"] += 1
                weight.sub_(weight.grad).add_(state["anchor"] - weight, alpha=group["pull"])


def test_a_custom_optimizer() -> None:
    table = HostEmbedding(N, DIM)
    before = table.read(range(N)).numpy()
    optimizer = RowOptimizer(Anchored, [table], pull=0.25)
    for ids in train_rows(
        [torch.tensor([1, 1, 2]), torch.tensor([2, 3])], {table: itself}, optimizer=optimizer
    ):
        simple(optimizer, table, ids)
        assert torch.equal(
            optimizer.state[table.weight]["anchor"], torch.from_numpy(before)[ids.unique()]
        )
    state = state_of(optimizer, table)
    np.testing.assert_array_equal(state["anchor"], before)
    assert state["seen"].tolist() == [0.5, 1.5, 2.5, 1.5] + [0.5] * (N - 4)
    assert optimizer.state_dict()["tables"][0]["state"] == {"count": 2}
    assert not np.array_equal(table.read(range(4)).numpy()[1:], before[1:4])


@pytest.mark.parametrize(
    ("kind", "options", "key", "value", "own"),
    [
        # torch's Adagrad ignores this option of a group.
        (Adagrad, {"initial_accumulator_value": 0.5}, "sum", 0.5, 0.5),
        (torch.optim.Rprop, {"lr": 0.25}, "step_size", 0.25, 0.5),
    ],
)
def test_the_initial_state_of_rows(
    kind: Any, options: dict[str, float], key: str, value: float, own: float
) -> None:
    """Every row has its initial state, in its own group, and after another table was trained."""
    first, second = HostEmbedding(N, DIM), HostEmbedding(N, 3)
    groups = [
        {"params": [first], **{option: 2 * number for option, number in options.items()}},
        {"params": second},
    ]
    optimizer = RowOptimizer(kind, groups, **options)
    for ids in train_rows(
        [torch.tensor([2])], {first: itself, second: itself}, optimizer=optimizer
    ):
        simple(optimizer, first, ids)
    state = state_of(optimizer, first)[key]
    assert (np.delete(state, 2, 0) == own).all()
    assert (state_of(optimizer, second)[key] == value).all()


@pytest.mark.parametrize("fused", [None, True])
def test_state_dict_resumes_training(fused: bool | None, tmp_path: Path) -> None:
    whole = HostEmbedding(N, DIM)
    stores = [ArrayStore(whole.read(range(N)).numpy())]
    half, optimizer = (
        HostEmbedding(N, DIM, store=stores[0]),
        RowOptimizer(Adam, [whole], lr=0.1, fused=fused),
    )
    for ids in train_rows(batches(6), {whole: itself}, optimizer=optimizer):
        simple(optimizer, whole, ids)
    kept: dict[str, ArrayStore] = {}

    def state(_: HostEmbedding, key: str, shape: tuple[int, ...], dtype: np.dtype) -> ArrayStore:
        return kept.setdefault(key, ArrayStore(np.zeros(shape, dtype)))

    first = RowOptimizer(Adam, [half], lr=0.1, fused=fused, state=state)
    for ids in train_rows(batches(6)[:3], {half: itself}, optimizer=first):
        simple(first, half, ids)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    rows = {key: store.array.copy() for key, store in kept.items()}
    second = RowOptimizer(Adam, [half], lr=0.5, fused=fused, state=state)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.param_groups[0]["lr"] == 0.1
    for key, store in kept.items():
        # A new optimizer fills its state.
        store.array[...] = rows[key]
    for ids in train_rows(batches(6)[3:], {half: itself}, optimizer=second):
        simple(second, half, ids)
    assert torch.equal(half.read(range(N)), whole.read(range(N)))
    for wrong in (
        {},
        None,
        RowOptimizer(Adam, [whole, half]).state_dict(),
        Adam([nn.Parameter(torch.zeros(2))]).state_dict(),
    ):
        with pytest.raises(errors.ArgumentError):
            second.load_state_dict(wrong)


def test_the_state_of_a_table_in_a_file_is_next_to_it(tmp_path: Path) -> None:
    table = HostEmbedding(N, DIM, store=tmp_path / "users.npy")
    optimizer = RowOptimizer(Adam, [table])
    for ids in train_rows(batches(), {table: itself}, optimizer=optimizer):
        simple(optimizer, table, ids)
    optimizer.close()
    optimizer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "users.exp_avg.npy",
        "users.exp_avg_sq.npy",
        "users.npy",
    ]
    seen = torch.cat(batches()).unique().tolist()
    assert np.load(tmp_path / "users.exp_avg.npy").any(1).nonzero()[0].tolist() == seen
    (tmp_path / "users.exp_avg.npy").unlink()
    other = HostEmbedding(N, DIM, store=tmp_path / "items.npy")
    content = (tmp_path / "users.exp_avg_sq.npy").read_bytes()
    again = RowOptimizer(Adam, [other, table])
    with pytest.raises(
        errors.StoreError,
        match=r"users\.exp_avg_sq\.npy existed before the optimizer was made",
    ):
        next(iter(train_rows(batches(), {table: itself}, optimizer=again)))
    again.close()
    assert (tmp_path / "users.exp_avg_sq.npy").read_bytes() == content
    for name in ("items.exp_avg", "items.exp_avg_sq", "users.exp_avg", "users.exp_avg_sq"):
        (tmp_path / f"{name}.npy").unlink()
    np.save(tmp_path / "users.exp_avg_sq.npy", np.ones(3))
    with pytest.raises(
        errors.StoreError,
        match=r"users\.exp_avg_sq\.npy exists, but is not a \.npy file of shape",
    ):
        RowOptimizer(Adam, [other, table])
    assert np.load(tmp_path / "users.exp_avg_sq.npy").tolist() == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "items.npy",
        "users.exp_avg_sq.npy",
        "users.npy",
    ]
    other.close()
    table.close()


def test_the_files_of_a_table_stay_if_the_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = HostEmbedding(N, DIM, store="users.npy")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir("run")
    optimizer = RowOptimizer(Adam, [table])
    for ids in train_rows(batches(), {table: itself}, optimizer=optimizer):
        simple(optimizer, table, ids)
    optimizer.close()
    table.close()
    names = ["run", "users.exp_avg.npy", "users.exp_avg_sq.npy", "users.npy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert not list((tmp_path / "run").iterdir())


def test_stores_of_state_are_checked() -> None:
    table = HostEmbedding(N, DIM, name="users")
    for make in (
        lambda *_: ArrayStore(np.zeros((N, 3), np.float32)),
        lambda _, key, shape, dtype: ArrayStore(np.zeros(shape, np.float64)),
    ):
        with pytest.raises(errors.StoreError, match="state 'exp_avg' of users: a store of shape"):
            RowOptimizer(Adam, [table], state=make)


def test_nothing_of_a_batch_is_left_between_two_batches() -> None:
    """Neither gradients of no rows, nor state that an interrupt left in the optimizer."""
    table = HostEmbedding(8, 2)
    optimizer = RowOptimizer(torch.optim.Adam, [table], lr=0.1)
    (empty,) = optimizer.parameters()
    empty.grad = torch.zeros_like(empty)
    optimizer.inner.state[torch.nn.Parameter(torch.ones(1))] = {"step": torch.ones(())}
    twice = [torch.tensor([1, 3])] * 2
    for ids in train_rows(twice, {table: lambda ids: ids}, optimizer=optimizer, device="cpu"):
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.parameters() == [empty]
    assert empty.grad is None
    assert list(optimizer.inner.state) == [empty]
