"""What a user of RowOptimizer sees: any torch optimizer, on the rows of the batch."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, lr_scheduler

import pinfeed
from pinfeed import ArrayStore, HostEmbedding, MmapStore, RowOptimizer, errors

N, DIM = 12, 8
# Compared bit for bit with a loop on the CPU.
train_rows = functools.partial(pinfeed.train_rows, device="cpu")

# Row by row, and once for the table.
KEEPS: dict[str, tuple[set[str], set[str]]] = {
    "ASGD": ({"ax"}, {"eta", "mu", "step"}),
    "Adadelta": ({"acc_delta", "square_avg"}, {"step"}),
    "Adafactor": ({"row_var"}, {"col_var", "step"}),
    "Adagrad": ({"sum"}, {"step"}),
    "Adam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "AdamW": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "Adamax": ({"exp_avg", "exp_inf"}, {"step"}),
    "Muon": ({"momentum_buffer"}, set()),
    "NAdam": ({"exp_avg", "exp_avg_sq"}, {"mu_product", "step"}),
    "RAdam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "RMSprop": ({"square_avg"}, {"step"}),
    "Rprop": ({"prev", "step_size"}, {"step"}),
    "SGD": (set(), set()),
    "SparseAdam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "amsgrad": {"kind": Adam, "amsgrad": True, "weight_decay": 0.1},
    "centered": {"kind": torch.optim.RMSprop, "centered": True, "momentum": 0.9},
    "nesterov": {"kind": SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "fused": {"kind": Adam, "fused": True},
    "foreach": {"kind": Adam, "foreach": True},
    "maximize": {
        "kind": Adagrad,
        "maximize": True,
        "initial_accumulator_value": 0.5,
        "lr_decay": 0.1,
    },
}
for _name in KEEPS:
    if hasattr(torch.optim, _name):
        OPTIONS[_name] = {"kind": getattr(torch.optim, _name)}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def itself(batch: Any) -> Any:
    return batch


def batches(n: int = 6, size: int = 9, seed: int = 0) -> list[torch.Tensor]:
    """Some of the rows, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(N, (size,), generator=generator) for _ in range(n)]


def all_rows(n: int = 6) -> list[torch.Tensor]:
    """Every row in every batch, in another order, some of them twice: then lazy and dense are one."""
    generator = torch.Generator().manual_seed(0)
    return [torch.cat([torch.randperm(N, generator=generator), ids]) for ids in batches(n)]


def loss_of(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(ids)
    return (out.sigmoid() * torch.linspace(-1, 1, out.numel()).view(out.shape)).square().sum()


def state_of(optimizer: RowOptimizer, table: HostEmbedding) -> dict[str, np.ndarray]:
    """Row-wise state of the whole table."""
    kept = optimizer.tables[table]
    return {
        row.key: np.array(store.array)
        for row, store in zip(kept.layout.rows, kept.stores, strict=True)
    }


Body = Callable[[Any, nn.Module, torch.Tensor], None]


def simple(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
    loss_of(module, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def same_as_dense(
    kind: Any,
    loader: list[torch.Tensor],
    prepare: Callable[[Any], Body] = lambda _: simple,
    **options: Any,
) -> None:
    """Train a HostEmbedding and an nn.Embedding, and compare rows and state bit for bit."""
    table = HostEmbedding(N, options.pop("dim", DIM))
    dense = table.to_embedding()
    dense.sparse = kind is torch.optim.SparseAdam
    optimizer, plain = RowOptimizer(kind, [table], **options), kind(dense.parameters(), **options)
    body = prepare(optimizer)
    for ids in train_rows(loader, {table: itself}, optimizer=optimizer, depth=3):
        body(optimizer, table, ids)
    body = prepare(plain)
    for ids in loader:
        body(plain, dense, ids)
    want = plain.state[dense.weight]
    assert torch.equal(table.read(range(N)), dense.weight.detach())
    for key, value in state_of(optimizer, table).items():
        np.testing.assert_array_equal(value, want[key].numpy(), err_msg=key)
    for key in optimizer.tables[table].layout.tables:
        assert torch.equal(
            torch.as_tensor(optimizer.state_dict()["tables"][0]["state"][key]),
            torch.as_tensor(want[key]),
        ), key


# ---- what an optimizer keeps ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KEEPS if hasattr(torch.optim, name)])
def test_what_is_kept_is_found_out(name: str) -> None:
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
        (table, {}, "give the class of an optimizer, then the tables"),
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
            r"the system has no memory to try Failing on a small table \(MemoryError\)",
        ),
    ],
    ids=repr,
)
def test_the_cause_is_told_where_an_optimizer_fails(
    error: Exception, expected: type[Exception], message: str
) -> None:
    """Some errors have no text: Python's own of memory has none."""

    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            raise error

    with pytest.raises(expected, match=message) as refusal:
        RowOptimizer(Failing, [HostEmbedding(3, 2)], lr=1)
    assert refusal.value.__cause__ is error


def test_tables_that_cannot_be_trained(tmp_path: Path) -> None:
    table, frozen = (
        HostEmbedding(N, DIM, name="users"),
        HostEmbedding(N, DIM, name="old").requires_grad_(False),
    )
    np.save(tmp_path / "words.npy", np.zeros((N, DIM), np.float32))
    read_only = HostEmbedding(N, DIM, store=MmapStore(tmp_path / "words.npy"), name="words")
    for tables, match in [
        ([], "tables is empty"),
        ([frozen], "old is frozen"),
        ([read_only], "words is in a read-only store"),
        ([table, table], "stands twice"),
        ([{"params": table}, {"params": [table]}], "stands twice"),
        ([nn.Parameter(torch.zeros(3))], "parameter groups"),
        ([{"params": [nn.Linear(1, 1)]}], "got Linear; expected HostEmbeddings"),
        ([{"lr": 0.1}], "parameter groups"),
    ]:
        with pytest.raises(errors.ArgumentError, match=match):
            RowOptimizer(Adam, tables)
    read_only.store.close()
    with pytest.raises(errors.ArgumentError, match="all its tables at construction"):
        RowOptimizer(Adam, [table]).add_param_group({"params": [frozen]})
    with pytest.raises(errors.ArgumentError, match="users is trained by two optimizers"):
        train_rows(
            [], {table: itself}, optimizer=[RowOptimizer(SGD, [table]), RowOptimizer(SGD, [table])]
        )
    with pytest.raises(errors.ArgumentError, match="got SGD; expected RowOptimizers"):
        train_rows([], {table: itself}, optimizer=SGD([nn.Parameter(torch.zeros(1))]))


class Anchored(torch.optim.Optimizer):
    """Pulls every row back to where it began; counts in a number, and keeps one scalar for each row."""

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


def test_an_optimizer_that_was_made_up() -> None:
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
        # torch's Adagrad does not ask the group.
        (Adagrad, {"initial_accumulator_value": 0.5}, "sum", 0.5, 0.5),
        (torch.optim.Rprop, {"lr": 0.25}, "step_size", 0.25, 0.5),
    ],
)
def test_what_rows_begin_with(
    kind: Any, options: dict[str, float], key: str, value: float, own: float
) -> None:
    """In every row, also in a group of its own, and while another table has begun."""
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


# ---- equal to torch alone ------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_is_the_dense_one_where_every_row_comes(name: str) -> None:
    options = dict(OPTIONS[name])
    # It adds ids that repeat in an order of its own.
    loader = [ids[:N] for ids in all_rows(10)] if name == "SparseAdam" else all_rows(10)
    same_as_dense(options.pop("kind"), loader, **options)


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 16, 33])
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_rows_that_are_absent_rest_as_with_a_gradient_of_zero(kind: Any, dim: int) -> None:
    same_as_dense(kind, batches(12), dim=dim, lr=0.3)


@pytest.mark.parametrize(
    "name", ["Adam", "amsgrad", "nesterov", "centered", "NAdam", "Rprop", "SparseAdam"]
)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_lazy_is_the_rule_it_says(name: str, depth: int) -> None:
    """w[R], s[R], t <- U(w[R], s[R], g, t), with tables and torch alone."""
    options = dict(OPTIONS[name])
    kind, table = options.pop("kind"), HostEmbedding(N, DIM)
    optimizer = RowOptimizer(kind, [table], **options)
    weights = table.read(range(N))
    kept = {key: torch.from_numpy(value) for key, value in state_of(optimizer, table).items()}
    once = {}
    loader = [ids.unique() for ids in batches(10)] if name == "SparseAdam" else batches(10)
    for number, ids in enumerate(loader):
        block = nn.Embedding.from_pretrained(
            weights[ids.unique()], freeze=False, sparse=kind is torch.optim.SparseAdam
        )
        plain = kind(block.parameters(), **options)
        if number:
            plain.state[block.weight] = {
                **once,
                **{key: value[ids.unique()] for key, value in kept.items()},
            }
        simple(plain, block, torch.searchsorted(ids.unique(), ids))
        weights[ids.unique()] = block.weight.detach()
        for key, value in plain.state[block.weight].items():
            if key in kept:
                kept[key][ids.unique()] = value
            else:
                once[key] = value
    for ids in train_rows(loader, {table: itself}, optimizer=optimizer, depth=depth):
        simple(optimizer, table, ids)
    assert torch.equal(table.read(range(N)), weights)
    for key, value in state_of(optimizer, table).items():
        np.testing.assert_array_equal(value, kept[key].numpy(), err_msg=key)


def step_lr(optimizer: Any) -> Body:
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        simple(optimizer, module, ids)
        scheduler.step()

    return body


def one_cycle(optimizer: Any) -> Body:
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12)

    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(module, ids).backward()
        optimizer.step()
        scheduler.step()

    return body


def clipped(_: Any) -> Body:
    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        loss_of(module, ids).backward()
        norm = nn.utils.clip_grad_norm_(
            optimizer.parameters() if isinstance(optimizer, RowOptimizer) else module.parameters(),
            0.1,
        )
        assert norm > 0.1
        optimizer.step()
        optimizer.zero_grad()

    return body


def with_closure(_: Any) -> Body:
    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, ids)
            loss.backward()
            return loss

        with torch.no_grad():
            want = loss_of(module, ids).item()
            assert optimizer.step(closure).item() == want

    return body


def scaled(_: Any) -> Body:
    scaler, count = (
        torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
        iter(range(100)),
    )

    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        # The step of the third batch is left out.
        factor = torch.inf if next(count) == 2 else 1.0
        scale = scaler.get_scale()
        scaler.scale(loss_of(module, ids) * factor).backward()
        scaler.unscale_(optimizer)
        before = module.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, module.weight) == (factor == torch.inf)
        assert (scaler.get_scale() < scale) == (factor == torch.inf)

    return body


def autocast(_: Any) -> Body:
    head = torch.linspace(-1, 1, DIM * 4).view(4, DIM)

    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = nn.functional.linear(module(ids), head)
            assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def twice(_: Any) -> Body:
    """Two backward passes and two steps in a batch."""

    def body(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
        loss_of(module, ids[:5]).backward()
        loss_of(module, ids[5:]).backward()
        optimizer.step()
        simple(optimizer, module, ids)

    return body


@pytest.mark.parametrize(
    "prepare",
    [step_lr, one_cycle, clipped, with_closure, scaled, autocast, twice],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_loops_as_they_are_written_with_torch(prepare: Callable[[Any], Body], kind: Any) -> None:
    same_as_dense(kind, all_rows(), prepare, lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))


def test_groups_of_their_own() -> None:
    """Other keys than the optimizer's own pass through, as they do in torch."""
    tables = [HostEmbedding(N, DIM), HostEmbedding(N, DIM)]
    dense = [table.to_embedding() for table in tables]
    options: list[dict[str, Any]] = [
        {"lr": 0.5, "name": "fast", "initial_lr": 0.5},
        {"weight_decay": 0.1},
    ]
    optimizer = RowOptimizer(
        Adam,
        [{"params": table, **own} for table, own in zip(tables, options, strict=True)],
        lr=0.01,
    )
    plain = Adam(
        [
            {"params": module.parameters(), **own}
            for module, own in zip(dense, options, strict=True)
        ],
        lr=0.01,
    )
    assert [(group["lr"], group.get("name")) for group in optimizer.param_groups] == [
        (0.5, "fast"),
        (0.01, None),
    ]
    for ids in train_rows(all_rows(), dict.fromkeys(tables, itself), optimizer=optimizer):
        (loss_of(tables[0], ids) + loss_of(tables[1], ids)).backward()
        optimizer.param_groups[1]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    for ids in all_rows():
        (loss_of(dense[0], ids) + loss_of(dense[1], ids)).backward()
        plain.param_groups[1]["lr"] *= 0.5
        plain.step()
        plain.zero_grad()
    for table, module in zip(tables, dense, strict=True):
        assert torch.equal(table.read(range(N)), module.weight.detach())


# ---- gradients live as long as their batch -------------------------------------------------------


def test_gradients_that_were_left_behind() -> None:
    table = HostEmbedding(N, DIM, name="users")
    optimizer = RowOptimizer(Adam, [table])
    with pytest.raises(
        errors.ArgumentError,
        match="gradients of an earlier batch of users were neither applied nor dropped",
    ):
        for number, ids in enumerate(train_rows(batches(), {table: itself}, optimizer=optimizer)):
            loss_of(table, ids).backward()
            if number:
                optimizer.step()
    before = table.read(range(N))
    for number, ids in enumerate(train_rows(batches(4), {table: itself}, optimizer=optimizer)):
        # As most loops begin: then nothing was lost in silence.
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss_of(table, ids).backward()
        if number == 3:
            optimizer.step()
    moved = (table.read(range(N)) != before).any(1)
    assert moved.nonzero().flatten().tolist() == batches(4)[3].unique().tolist()


def test_a_loss_that_is_kept_comes_too_late() -> None:
    table = HostEmbedding(N, DIM, name="users")
    optimizer, kept = RowOptimizer(SGD, [table]), []
    with pytest.raises(errors.ArgumentError, match="gradients of an earlier batch of users"):
        for ids in train_rows(batches(), {table: itself}, optimizer=optimizer):
            kept.append(loss_of(table, ids))
            if len(kept) == 2:
                kept[0].backward()
            optimizer.step()
    assert len(kept) == 2


def test_options_for_the_gpu_alone() -> None:
    assert RowOptimizer(Adam, [HostEmbedding(N, DIM)], capturable=True).param_groups[0][
        "capturable"
    ]


def test_a_table_that_a_loss_leaves_out_rests() -> None:
    used, idle = HostEmbedding(N, DIM), HostEmbedding(N, DIM)
    before, optimizer = idle.read(range(N)), RowOptimizer(Adam, [used, idle])
    for ids in train_rows(batches(), {used: itself, idle: itself}, optimizer=optimizer):
        simple(optimizer, used, ids)
        idle(ids)
    assert torch.equal(idle.read(range(N)), before)
    assert not any(value.any() for value in state_of(optimizer, idle).values())
    assert [table["begun"] for table in optimizer.state_dict()["tables"]] == [True, False]


# ---- state: saved, and in files ------------------------------------------------------------------


def test_state_dict_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = HostEmbedding(N, DIM)
    stores = [ArrayStore(whole.read(range(N)).numpy())]
    half, optimizer = HostEmbedding(N, DIM, store=stores[0]), RowOptimizer(Adam, [whole], lr=0.1)
    for ids in train_rows(batches(6), {whole: itself}, optimizer=optimizer):
        simple(optimizer, whole, ids)
    kept: dict[str, ArrayStore] = {}

    def state(_: HostEmbedding, key: str, shape: tuple[int, ...], dtype: np.dtype) -> ArrayStore:
        return kept.setdefault(key, ArrayStore(np.zeros(shape, dtype)))

    first = RowOptimizer(Adam, [half], lr=0.1, state=state)
    for ids in train_rows(batches(6)[:3], {half: itself}, optimizer=first):
        simple(first, half, ids)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    rows = {key: store.array.copy() for key, store in kept.items()}
    second = RowOptimizer(Adam, [half], lr=0.5, state=state)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.param_groups[0]["lr"] == 0.1
    for key, store in kept.items():
        # Making an optimizer begins its state.
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


def test_state_of_a_file_is_beside_it(tmp_path: Path) -> None:
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
        match=r"users\.exp_avg_sq\.npy was there already when the optimizer was made",
    ):
        next(iter(train_rows(batches(), {table: itself}, optimizer=again)))
    again.close()
    assert (tmp_path / "users.exp_avg_sq.npy").read_bytes() == content
    for name in ("items.exp_avg", "items.exp_avg_sq", "users.exp_avg", "users.exp_avg_sq"):
        (tmp_path / f"{name}.npy").unlink()
    np.save(tmp_path / "users.exp_avg_sq.npy", np.ones(3))
    with pytest.raises(
        errors.StoreError,
        match=r"users\.exp_avg_sq\.npy is there already, and is no \.npy file of shape",
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


def test_stores_of_state_are_checked() -> None:
    table = HostEmbedding(N, DIM, name="users")
    for make in (
        lambda *_: ArrayStore(np.zeros((N, 3), np.float32)),
        lambda _, key, shape, dtype: ArrayStore(np.zeros(shape, np.float64)),
    ):
        with pytest.raises(errors.StoreError, match="state 'exp_avg' of users: a store of shape"):
            RowOptimizer(Adam, [table], state=make)


def test_mistakes_are_told_apart(tmp_path: Path) -> None:
    table = HostEmbedding(N, DIM, store=tmp_path / "table.npy", name="table")
    dense = nn.Embedding(N, DIM)
    with pytest.raises(
        errors.ArgumentError, match=r"is a Adam that is made already; expected the class"
    ):
        RowOptimizer(torch.optim.Adam(dense.parameters()), [table])
    wrong: Any
    for wrong in ("adam", None, [table], table):
        with pytest.raises(
            errors.ArgumentError,
            match=r"optimizer_class=.*: give the class of an optimizer, then the tables, then its opt",
        ):
            RowOptimizer(wrong, [table])
    for wrong in (None, torch.optim.SGD):
        with pytest.raises(
            errors.ArgumentError,
            match=r"tables=.*: expected HostEmbeddings, or parameter groups of them",
        ):
            RowOptimizer(torch.optim.SGD, wrong, lr=0.1)
    with pytest.raises(
        errors.ArgumentError, match=r"tables: got Embedding; expected HostEmbeddings"
    ):
        RowOptimizer(torch.optim.Adam, [dense])
    with pytest.raises(
        errors.ArgumentError, match=r"tables: got Embedding; expected \{table: ids_of_batch\}"
    ):
        train_rows([torch.arange(3)], {dense: "ids"})
    with pytest.raises(
        errors.ArgumentError,
        match=r"frozen; expected one that can be trained: from_pretrained\(..., freeze=False\)",
    ):
        RowOptimizer(torch.optim.Adam, [HostEmbedding.from_pretrained(torch.zeros(3, 2))])
    with pytest.raises(
        errors.ArgumentError,
        match=r"table: ids at 'usr' of a batch that has keys 'user'; expected the key of its ids",
    ):
        list(train_rows([{"user": torch.arange(3)}], {table: "usr"}, device="cpu"))
    RowOptimizer(torch.optim.Adam, [table]).close()
    found = RowOptimizer(torch.optim.Adam, [table])
    with pytest.raises(
        errors.StoreError,
        match=r"state 'exp_avg' of table: .*table.exp_avg.npy; .* or give the table overwrite=True",
    ):
        iter(train_rows([torch.arange(3)], {table: itself}, optimizer=found))
    found.close()
    table.close()
