"""RowOptimizer: loops with torch optimizers, and the mistakes that it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.row_optimizers import (
    DIM,
    KEEPS,
    N,
    batches,
    itself,
    loss_of,
    simple,
    state_of,
    train_rows,
)
from torch import nn
from torch.optim import SGD, Adagrad, Adam, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed import HostEmbedding, NpyStore, RowOptimizer, errors

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


def all_rows(n: int = 6) -> list[torch.Tensor]:
    """Every row in every batch, in another order, some twice: lazy and dense rules then agree."""
    generator = torch.Generator().manual_seed(0)
    return [torch.cat([torch.randperm(N, generator=generator), ids]) for ids in batches(n)]


Body = Callable[[Any, nn.Module, torch.Tensor], None]


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


def test_tables_that_cannot_be_trained(tmp_path: Path) -> None:
    table, frozen = (
        HostEmbedding(N, DIM, name="users"),
        HostEmbedding(N, DIM, name="old").requires_grad_(False),
    )
    np.save(tmp_path / "words.npy", np.zeros((N, DIM), np.float32))
    read_only = HostEmbedding(N, DIM, store=NpyStore(tmp_path / "words.npy"), name="words")
    for tables, match in [
        ([], r"tables is empty; .* give the tables themselves, such as \[users\]"),
        ([frozen], "old is frozen"),
        ([read_only], "words is in a read-only store"),
        ([table, table], "same table twice"),
        ([{"params": table}, {"params": [table]}], "same table twice"),
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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_equals_the_dense_one_on_whole_batches(name: str) -> None:
    options = dict(OPTIONS[name])
    # SparseAdam adds the gradients of repeated ids in another order, so it gets distinct ids.
    loader = [ids[:N] for ids in all_rows(10)] if name == "SparseAdam" else all_rows(10)
    same_as_dense(options.pop("kind"), loader, **options)


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 16, 33])
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_rows_that_are_absent_rest_as_with_a_gradient_of_zero(kind: Any, dim: int) -> None:
    same_as_dense(kind, batches(12), dim=dim, lr=0.3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name", ["Adam", "amsgrad", "fused", "nesterov", "centered", "NAdam", "Rprop", "SparseAdam"]
)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_lazy_is_the_rule_it_says(name: str, depth: int) -> None:
    """Updates are w[R], s[R], t = U(w[R], s[R], g, t), computed with torch alone."""
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
        # The third batch has no step.
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
    """Take two backward passes and two steps in a batch."""

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
@pytest.mark.parametrize(
    ("kind", "options"), [(SGD, {"momentum": 0.9}), (Adam, {}), (Adam, {"fused": True})], ids=str
)
def test_loops_as_they_are_written_with_torch(
    prepare: Callable[[Any], Body], kind: Any, options: dict[str, Any]
) -> None:
    same_as_dense(kind, all_rows(), prepare, lr=0.1, **options)


class Operators(TorchDispatchMode):
    """Names of the operators that would be kernels on a GPU."""

    # These copy nothing, or read a single number on the CPU.
    NO_KERNEL = ("detach", "lift_fresh", "_local_scalar_dense", "_record_function")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.__name__
        if not name.startswith(self.NO_KERNEL):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("device_cache", [None, 0.5])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"foreach": True}),
        (SGD, {"foreach": True, "momentum": 0.9}),
        (Adam, {"foreach": True}),
        (Adam, {"fused": True}),
    ],
)
def test_a_step_of_several_tables_is_one_step_of_torch(
    kind: Any, options: dict[str, Any], device_cache: float | None
) -> None:
    """The step of one parameter has as many operators."""
    tables = [HostEmbedding(N, DIM, device_cache=device_cache) for _ in range(3)]
    optimizer = RowOptimizer(kind, tables, lr=0.1, **options)
    dense = nn.Embedding(N, DIM)
    plain = kind(dense.parameters(), lr=0.1, **options)
    for ids in train_rows(batches(), dict.fromkeys(tables, itself), optimizer=optimizer):
        torch.stack([loss_of(module, ids) for module in (*tables, dense)]).sum().backward()
        with Operators() as found:
            optimizer.step()
        with Operators() as wanted:
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    # The first step also makes the state.
    assert found.names == wanted.names


def test_groups_of_their_own() -> None:
    """Keys of a group that the optimizer does not know are kept, as in torch."""
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


def test_gradients_that_were_left_behind() -> None:
    table = HostEmbedding(N, DIM, name="users")
    optimizer = RowOptimizer(Adam, [table])
    with pytest.raises(
        errors.ArgumentError,
        match=r"step\(\) found gradients of an earlier batch of users; call backward\(\) and step",
    ):
        for number, ids in enumerate(train_rows(batches(), {table: itself}, optimizer=optimizer)):
            loss_of(table, ids).backward()
            if number:
                optimizer.step()
    before = table.read(range(N))
    for number, ids in enumerate(train_rows(batches(4), {table: itself}, optimizer=optimizer)):
        # Most loops begin with zero_grad(), which drops the stale gradients visibly.
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss_of(table, ids).backward()
        if number == 3:
            optimizer.step()
    moved = (table.read(range(N)) != before).any(1)
    assert moved.nonzero().flatten().tolist() == batches(4)[3].unique().tolist()


def test_the_backward_pass_of_an_earlier_loss_is_refused() -> None:
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


def test_mistakes_have_errors_of_their_own(tmp_path: Path) -> None:
    table = HostEmbedding(N, DIM, store=tmp_path / "table.npy", name="table")
    dense = nn.Embedding(N, DIM)
    with pytest.raises(errors.ArgumentError, match=r"is an existing Adam; expected the class"):
        RowOptimizer(torch.optim.Adam(dense.parameters()), [table])
    wrong: Any
    for wrong in ("adam", None, [table], table):
        with pytest.raises(
            errors.ArgumentError,
            match=r"optimizer_class=.*; expected the class of an optimizer, then the tables",
        ):
            RowOptimizer(wrong, [table])
    for wrong in (None, torch.optim.SGD):
        with pytest.raises(
            errors.ArgumentError,
            match=r"tables=.*; expected HostEmbeddings, or parameter groups",
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
        match=r"frozen; expected a trainable table; use from_pretrained\(..., freeze=False\)",
    ):
        RowOptimizer(torch.optim.Adam, [HostEmbedding.from_pretrained(torch.zeros(3, 2))])
    with pytest.raises(
        errors.ArgumentError,
        match=r"table: no ids at 'usr', because the batch has keys 'user'; expected the key of its",
    ):
        list(train_rows([{"user": torch.arange(3)}], {table: "usr"}, device="cpu"))
    RowOptimizer(torch.optim.Adam, [table]).close()
    found = RowOptimizer(torch.optim.Adam, [table])
    with pytest.raises(
        errors.StoreError,
        match=r"state 'exp_avg' of table: .*table.exp_avg.npy; .* give the table overwrite=True",
    ):
        iter(train_rows([torch.arange(3)], {table: itself}, optimizer=found))
    found.close()
    table.close()
