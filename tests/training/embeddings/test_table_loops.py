"""HostEmbedding in loops over train_rows: lookups, bags, loaders, and how a loop ends."""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.table_loops import DIM, FLOATS, SGD, N, batches, itself, step_ones, train_rows
from torch import nn
from torch.utils.data import DataLoader

from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    HostEmbeddingBag,
    RowOptimizer,
    errors,
)

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
Loss = Callable[[nn.Module, Any], torch.Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def squares(module: nn.Module, ids: Any) -> torch.Tensor:
    out: torch.Tensor = module(ids)
    return (out.double() * torch.linspace(0.1, 0.9, out.numel()).view(out.shape)).square().sum()


def trained_as(
    table: HostEmbedding,
    dense: nn.Module,
    loader: list[Any],
    loss_of: Loss = squares,
    **options: Any,
) -> None:
    """Train both with SGD, and compare losses and rows bit for bit."""
    optimizer, plain = SGD([table]), torch.optim.SGD(dense.parameters(), lr=0.1)
    got, want = [], []
    for batch in train_rows(
        loader, {table: options.pop("ids_of", itself)}, optimizer=optimizer, **options
    ):
        got.append(loss_of(table, batch))
        got[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for batch in loader:
        want.append(loss_of(dense, batch))
        want[-1].backward()
        plain.step()
        plain.zero_grad()
    assert torch.equal(torch.stack(got), torch.stack(want))
    assert torch.equal(table.read(range(N)), dense.weight.detach())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 3},
    {"padding_idx": -1},
    {"max_norm": 1.5},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 5, "max_norm": 2.5},
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("depth", "cache"), [(0, None), (3, None), (0, 0.2), (3, 0.5)])
def test_options_are_those_of_nn_embedding(
    options: dict[str, Any], depth: int, cache: float | None
) -> None:
    table = HostEmbedding(N, DIM, device_cache=cache, **options)
    trained_as(
        table,
        table.to_embedding(),
        [*batches(), torch.empty(0, 2, dtype=torch.int64), *batches()],
        depth=depth,
    )


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(dtype, dim) for dtype in FLOATS for dim in (1, 7, 16, 64) if dtype.itemsize > 2 or dim == 64],
    ids=str,
)
def test_every_dtype_trains(dtype: torch.dtype, dim: int) -> None:
    """Tables of every floating point dtype train as nn.Embedding does.

    Short floats are tested in whole vectors, because torch rounds the remainder of a tensor in
    another way, and a batch of rows has another remainder than a table.
    """
    table = HostEmbedding(N, dim, dtype=dtype)
    trained_as(table, table.to_embedding(), batches(shape=(50,)))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3, 4), (0,), (2, 0)], ids=str)
def test_ids_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table, ids = HostEmbedding(N, DIM), batches(1, shape)[0]
    want = table.to_embedding()(ids)
    for batch in train_rows([ids.to(dtype)], {table: itself}):
        assert torch.equal(table(batch), want)
        assert torch.equal(table.read(batch), want)
    with torch.no_grad():
        assert torch.equal(table(ids.to(dtype)), want)


def test_ids_may_be_announced_in_any_form() -> None:
    """Ids are tensors of several dtypes, arrays, lists or numbers, nested or by a key."""
    table = HostEmbedding(N, DIM)
    batch = {
        "a": torch.tensor([1, 2]),
        "b": torch.tensor([[3]], dtype=torch.uint64),
        "c": np.array([4], np.uint16),
        "d": [[5, 6], [7]],
    }
    for _ in train_rows([batch], {table: lambda b: [(b["a"], b["b"]), {"c": b["c"]}, b["d"], 8]}):
        assert table.block.rows.tolist() == list(range(1, 9))
    for got in train_rows([batch], {table: "a"}):
        assert table.block.rows.tolist() == [1, 2]
        assert table(got["a"]).shape == (2, DIM)


BAD = [
    (torch.tensor([4, -2]), "-2"),
    (torch.tensor([4, N]), str(N)),
    (torch.tensor([2**63 + 5], dtype=torch.uint64), ""),
    (torch.tensor([1.0]), "float"),
    (torch.tensor([True]), "bool"),
]


@pytest.mark.parametrize(("ids", "word"), BAD, ids=["negative", "large", "huge", "float", "bool"])
@pytest.mark.parametrize("depth", [0, 2])
def test_bad_ids(ids: torch.Tensor, word: str, depth: int) -> None:
    """The error names table and id; earlier batches count, and nothing else has changed."""
    table = HostEmbedding(N, DIM, init="zeros", name="users")
    optimizer, match = SGD([table]), f"users.*{word}"
    with pytest.raises(errors.RowIndexError, match=match):
        for batch in train_rows(
            [torch.tensor([4]), ids, torch.tensor([5])],
            {table: itself},
            optimizer=optimizer,
            depth=depth,
        ):
            with pytest.raises(errors.RowIndexError, match=match):
                table(ids)
            step_ones(optimizer, table(batch))
    with torch.no_grad(), pytest.raises(errors.RowIndexError, match=match):
        table(ids)
    with pytest.raises(errors.RowIndexError, match=match):
        table.read(ids)
    assert table.read(range(N)).sum(1).nonzero().tolist() == [[4]]


def test_ids_that_were_not_announced() -> None:
    table = HostEmbedding(N, DIM, name="users")
    for ids in train_rows(
        [torch.tensor([4, 6]), torch.tensor([], dtype=torch.int64)], {table: itself}
    ):
        assert table(ids).shape == (*ids.shape, DIM)
        for other in (5, 0, N - 1):
            with pytest.raises(errors.RowIndexError, match=f"users: id {other} was not announced"):
                table(torch.tensor([[other]]))


def test_outside_a_loop() -> None:
    table = HostEmbedding(N, DIM, name="users", padding_idx=0)
    ids, want = torch.tensor([[3, 3], [0, 9]]), table.to_embedding()
    with pytest.raises(
        errors.ClosedError, match="users was called in training mode outside a loop"
    ):
        table(ids)
    with pytest.raises(errors.ClosedError, match="users has rows on the device only in"):
        _ = table.weight
    with torch.no_grad():
        assert torch.equal(table(ids), want(ids))
    with torch.inference_mode():
        assert torch.equal(table(ids), want(ids))
    table.eval()
    assert torch.equal(table(ids), want(ids))
    assert not table(ids).requires_grad
    assert torch.equal(table.train().requires_grad_(False)(ids), want(ids))


def test_read_sees_the_latest_rows() -> None:
    table = HostEmbedding(N, DIM, init="zeros")
    optimizer = SGD([table])
    for number, ids in enumerate(
        train_rows([torch.tensor([1, 2])] * 5, {table: itself}, optimizer=optimizer)
    ):
        assert torch.equal(table.read([2, 9])[0], table(torch.tensor(2)).detach())
        step_ones(optimizer, table(ids))
        assert table.read([1])[0, 0].item() == pytest.approx(-0.1 * (number + 1))
        assert table.read([[9]]).shape == (1, 1, DIM)
        table.flush_writes()
        assert table.store.array[1].tolist() == table.read(1).tolist()
        # The loop continues after a read.
        step_ones(optimizer, table(ids) * 0)


def test_two_tables_and_one_looked_up_twice() -> None:
    items, users = HostEmbedding(N, DIM), HostEmbedding(N + 1, DIM)
    dense = nn.ModuleList([items.to_embedding(), users.to_embedding()])
    loader = [
        {"had": had, "next": had.flip(0)[:2] // 2, "user": torch.tensor([i, 40])}
        for i, had in enumerate(batches(6, (4,)))
    ]

    def loss_of(tables: Any, batch: Any) -> Any:
        return (
            (tables[0](batch["had"]).sum() * tables[0](batch["next"]) * tables[1](batch["user"]))
            .square()
            .mean()
        )

    optimizers, plain = [SGD([items]), SGD([users])], torch.optim.SGD(dense.parameters(), lr=0.1)
    for batch in train_rows(
        loader, {items: lambda b: (b["had"], b["next"]), users: "user"}, optimizer=optimizers
    ):
        loss_of([items, users], batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for batch in loader:
        plain.zero_grad()
        loss_of(dense, batch).backward()
        plain.step()
    assert torch.equal(items.read(range(N)), dense[0].weight.detach())
    assert torch.equal(users.read(range(N + 1)), dense[1].weight.detach())


def test_one_loop_over_a_table_at_a_time() -> None:
    table, other = HostEmbedding(N, DIM, name="users"), HostEmbedding(N, DIM)
    for _ in train_rows(batches(2), {table: itself}):
        assert len(list(train_rows(batches(3), {other: itself}))) == 3
        with pytest.raises(errors.ClosedError, match="a loop over rows of users is running"):
            table.reset_parameters()
    older = iter(train_rows(batches(2), {table: itself}))
    next(older)
    assert len(list(train_rows(batches(3), {table: itself, other: itself}))) == 3
    with pytest.raises(errors.ClosedError, match="another loop over one of its tables began"):
        next(older)
    with pytest.raises(errors.ArgumentError, match="rows in common"):
        train_rows(batches(), {table: itself, HostEmbedding(N, DIM, store=table.store): itself})


class Once:
    """A loader that returns a new generator for every epoch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from batches()


LOADERS: dict[str, Callable[[], Any]] = {
    "list": batches,
    "generator": lambda: (ids for ids in batches()),
    "generators": Once,
    "DataLoader": lambda: DataLoader(torch.stack(batches()).flatten(0, 1), batch_size=5),
    "workers": lambda: DataLoader(
        torch.stack(batches()).flatten(0, 1), batch_size=5, num_workers=2
    ),
    "Feeder": lambda: Feeder(torch.stack(batches()).flatten(0, 1), batch_size=5, device="cpu"),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders(kind: str) -> None:
    table = HostEmbedding(N, DIM)
    dense, loader = table.to_embedding(), LOADERS[kind]()
    optimizer, plain = SGD([table]), torch.optim.SGD(dense.parameters(), lr=0.1)
    for epoch in range(1 if kind == "generator" else 2):
        for ids, same in zip(
            train_rows(loader, {table: itself}, optimizer=optimizer), batches(), strict=True
        ):
            assert torch.equal(ids, same), epoch
            step_ones(optimizer, squares(table, ids))
            plain.zero_grad()
            squares(dense, same).backward()
            plain.step()
    if isinstance(loader, Feeder):
        loader.close()
    assert torch.equal(table.read(range(N)), dense.weight.detach())


@pytest.mark.parametrize("how", ["break", "error", "close", "dropped"])
@pytest.mark.parametrize(("depth", "cache"), [(0, None), (2, None), (0, 1.0), (2, 0.1)])
def test_completed_steps_are_in_the_store(how: str, depth: int, cache: float | None) -> None:
    table = HostEmbedding(N, DIM, init="zeros", device_cache=cache)
    optimizer = SGD([table])
    loop = train_rows(
        [torch.tensor([i, i + 1]) for i in range(9)],
        {table: itself},
        optimizer=optimizer,
        depth=depth,
    )

    def body() -> None:
        for number, ids in enumerate(loop):
            step_ones(optimizer, table(ids))
            if number == 2:
                if how == "error":
                    raise KeyError("the body's own")
                if how == "close":
                    loop.close()
                return

    if how == "error":
        with pytest.raises(KeyError, match="the body's own"):
            body()
    else:
        body()
    if how != "close":
        # The table can be used again.
        assert next(iter(loop)).tolist() == [0, 1]
    assert (table.read(range(N))[:, 0] * -10).round().tolist() == [1, 2, 2, 1] + [0] * (N - 4)
    with pytest.raises(errors.ClosedError):
        _ = table.weight
    loop.close()
    loop.close()


def test_losses_that_are_kept_do_no_harm() -> None:
    table = HostEmbedding(N, DIM)
    twin = HostEmbedding(N, DIM, store=ArrayStore(table.read(range(N))))
    optimizer = SGD([table])
    kept = []
    losses = []
    for ids in train_rows(batches(8), {table: itself}, optimizer=optimizer):
        loss = squares(table, ids)
        kept.append((loss, table.weight, table(ids)))
        step_ones(optimizer, loss)
    optimizer = SGD([twin])
    for ids in train_rows(batches(8), {twin: itself}, optimizer=optimizer):
        losses.append(squares(twin, ids))
        step_ones(optimizer, losses[-1])
        losses[-1] = losses[-1].item()
    assert [loss.item() for loss, _, _ in kept] == losses
    assert torch.equal(table.read(range(N)), twin.read(range(N)))


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *itertools.product(["sum", "mean", "max"], ["2-d", "offsets", "last offset"]),
        ("sum", "weights"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"max_norm": 1.5}], ids=str)
@pytest.mark.parametrize("cache", [None, 0.3])
def test_bags(mode: str, form: str, options: dict[str, Any], cache: float | None) -> None:
    table = HostEmbeddingBag(
        N, DIM, mode=mode, include_last_offset=form == "last offset", **options
    )
    table.device_cache = cache
    dense = nn.EmbeddingBag(N, DIM, mode=mode, include_last_offset=form == "last offset", **options)
    dense.weight.data.copy_(table.read(range(N)))
    offsets = {
        "offsets": torch.tensor([0, 2, 2, 7]),
        "last offset": torch.tensor([0, 2, 2, 20]),
    }.get(form)
    weights = torch.linspace(-1, 1, 20).view(5, 4) if form == "weights" else None

    def loss_of(module: Any, ids: torch.Tensor) -> torch.Tensor:
        return squares(functools.partial(module, offsets=offsets, per_sample_weights=weights), ids)

    loader = batches(shape=(5, 4) if offsets is None else (20,))
    for ids in loader:
        # torch adds weighted rows in another order if there is a padding row.
        ids.view(-1)[7] = 3
    trained_as(table, dense, loader, loss_of)


def test_bags_outside_a_loop_and_of_other_modes() -> None:
    table = HostEmbeddingBag.from_pretrained(torch.arange(6.0).view(3, 2), mode="sum")
    assert table(torch.tensor([[0, 2], [1, 1]])).tolist() == [[4, 6], [4, 6]]
    with pytest.raises(errors.ArgumentError, match="mode='median'"):
        HostEmbeddingBag(N, DIM, mode="median")


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("closes", ["table", "optimizer"])
def test_a_table_cannot_be_closed_in_its_loop(tmp_path: Path, closes: str, depth: int) -> None:
    """The changes of the current step would be lost."""
    table = HostEmbedding(10, 2, init="zeros", store=tmp_path / "table.npy")
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=1.0, momentum=0.5)
    loader = [torch.arange(10)] * 3
    for ids in train_rows(loader, {table: itself}, optimizer=optimizer, depth=depth):
        table(ids).sum().backward()
        optimizer.step()
        with pytest.raises(errors.ClosedError, match="end it first"):
            {"table": table, "optimizer": optimizer}[closes].close()
        break
    optimizer.close()
    table.close()
    assert np.array_equal(np.load(tmp_path / "table.npy"), np.full((10, 2), -1, np.float32))
