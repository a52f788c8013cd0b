"""What a user of HostEmbedding sees: nn.Embedding, with its rows elsewhere."""

import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    HostEmbeddingBag,
    MmapStore,
    RowOptimizer,
    errors,
)

N, DIM = 40, 8
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
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
# Compared bit for bit with a loop on the CPU.
train_rows = functools.partial(pinfeed.train_rows, device="cpu")
SGD = functools.partial(RowOptimizer, torch.optim.SGD, lr=0.1)
Loss = Callable[[nn.Module, Any], torch.Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def batches(n: int = 6, shape: tuple[int, ...] = (5, 4), rows: int = N) -> list[torch.Tensor]:
    """Ids that repeat, in a batch and from one to the next."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(rows, shape, generator=generator) for _ in range(n)]


def itself(batch: Any) -> Any:
    return batch


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


def step_ones(optimizer: RowOptimizer, out: torch.Tensor) -> None:
    """One step that takes lr off every number that was looked up once."""
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- how a table begins --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("where", ["memory", "file"])
def test_the_same_seed_gives_the_same_table(dtype: torch.dtype, where: str, tmp_path: Path) -> None:
    drawn = []
    for make in (
        nn.Embedding,
        functools.partial(HostEmbedding, store=tmp_path / "t.npy" if where == "file" else None),
    ):
        torch.manual_seed(5)
        drawn.append((make(N, 7, dtype=dtype, padding_idx=-3), torch.rand(1)))
    (dense, after), (table, same) = drawn
    assert torch.equal(table.read(range(N)), dense.weight.detach())
    assert (table.read(0).dtype, table.padding_idx) == (dtype, N - 3)
    assert torch.equal(after, same)
    table.close()


@pytest.mark.parametrize(
    "init", ["xavier_uniform", "uniform", "kaiming_normal_", "zeros", "ones", nn.init.orthogonal_]
)
def test_initialisers_are_those_of_torch(init: Any) -> None:
    fill = init if callable(init) else getattr(nn.init, init.removesuffix("_") + "_")
    torch.manual_seed(1)
    table = HostEmbedding(N, DIM, init=init)
    torch.manual_seed(1)
    assert torch.equal(table.read(range(N)), fill(torch.empty(N, DIM)))
    table.reset_parameters(functools.partial(nn.init.constant_, val=2.5))
    assert torch.equal(table.read(range(N)), torch.full((N, DIM), 2.5))


def test_bad_sizes_and_initialisers(tmp_path: Path) -> None:
    for wrong in [(0, 4), (4, 0), (-1, 4), (2.5, 4), ("4", 4), (True, 4), (2**63, 4), (4, 2**70)]:
        with pytest.raises(
            errors.ArgumentError,
            match="expected a whole number, from 1 to 9,223,372,036,854,775,807",
        ):
            HostEmbedding(*wrong)
    for store in (None, tmp_path / "t.npy"):
        with pytest.raises(
            errors.StoreError,
            match=r"big: shape \(4611686018427387904, 8\) of float32 takes 147,573,952,589,676,412,928 bytes",
        ):
            HostEmbedding(2**62, 8, store=store, name="big")
    for init in ("no_such", "constant", 3):
        with pytest.raises(errors.ArgumentError, match=f"init={init!r}.*function"):
            HostEmbedding(4, 4, init=init, store=tmp_path / "t.npy")
    for padding in (4, -5):
        with pytest.raises(errors.ArgumentError, match=f"padding_idx={padding}"):
            HostEmbedding(4, 4, padding_idx=padding)
    with pytest.raises(
        errors.StoreError, match=r"dtype=torch.int64; expected a floating point dtype"
    ):
        HostEmbedding(4, 4, dtype=torch.int64, store=tmp_path / "t.npy")
    assert list(tmp_path.iterdir()) == []


# ---- where the rows are --------------------------------------------------------------------------


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "users.npy"
    table = HostEmbedding(N, DIM, store=path, init="zeros")
    optimizer = SGD([table])
    for ids in train_rows([torch.tensor([3, 7])], {table: itself}, optimizer=optimizer):
        step_ones(optimizer, table(ids))
    table.close()
    want = np.zeros((N, DIM), np.float32)
    want[[3, 7]] -= np.float32(0.1)
    np.testing.assert_array_equal(np.load(path), want)
    for other in (
        HostEmbedding,
        lambda *shape, **more: HostEmbedding(*shape, dtype=torch.bfloat16, **more),
    ):
        with pytest.raises(
            errors.StoreError,
            match=r"users\.npy is there already, and is no \.npy file of shape .*; expected another path",
        ):
            other(N, 3 if other is HostEmbedding else DIM, store=path)
    found = HostEmbedding(N, DIM, store=path)
    with pytest.raises(
        errors.StoreError,
        match=r"users\.npy was there already .* overwrite=True to begin anew, HostEmbedding.from_pre",
    ):
        found.read([0])
    found.close()
    np.testing.assert_array_equal(np.load(path), want)
    again = HostEmbedding.from_pretrained(path)
    assert again.read([3]).tolist() == want[[3]].tolist()
    again.close()
    HostEmbedding(N, 3, store=str(path), overwrite=True, init="ones").close()
    np.testing.assert_array_equal(np.load(path), np.ones((N, 3), np.float32))


def test_a_store_that_is_given() -> None:
    array = np.arange(N * DIM, dtype=np.float32).reshape(N, DIM)
    table = HostEmbedding(N, DIM, store=ArrayStore(array), padding_idx=2)
    assert torch.equal(table.read([2, 5]), torch.from_numpy(array[[2, 5]]))
    for shape, dtype in [((N, 9), None), ((N + 1, DIM), None), ((N, DIM), torch.float64)]:
        with pytest.raises(errors.StoreError, match="a store of"):
            HostEmbedding(*shape, store=ArrayStore(array), dtype=dtype)
    for shared in (torch.ones(1, DIM).expand(N, DIM), np.broadcast_to(np.float32(1), (N, DIM))):
        with pytest.raises(
            errors.StoreError, match="init cannot fill a read-only ArrayStore as a whole"
        ):
            HostEmbedding(N, DIM, store=ArrayStore(shared), init="zeros")
        with pytest.raises(
            errors.ArgumentError,
            match=r"in a read-only store .* an array with memory for each element",
        ):
            SGD([HostEmbedding.from_pretrained(shared, freeze=False)])
        assert (np.asarray(shared) == 1).all()
    with pytest.raises(errors.StoreError, match="floating point"):
        HostEmbedding(N, DIM, store=ArrayStore(array.astype(np.int64)))


@pytest.mark.parametrize("kind", ["tensor", "array", "path", "store"])
@pytest.mark.parametrize("freeze", [True, False])
def test_from_pretrained(kind: str, freeze: bool, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
    array, path = rows.copy(), tmp_path / "rows.npy"
    np.save(path, rows)
    given = {
        "tensor": torch.from_numpy(array),
        "array": array,
        "path": path,
        "store": ArrayStore(array),
    }[kind]
    table = HostEmbedding.from_pretrained(given, freeze=freeze, padding_idx=1, name="words")
    if freeze:
        with pytest.raises(errors.ArgumentError, match="words is frozen"):
            SGD([table])
    optimizers = () if freeze else SGD([table])
    for ids in train_rows([torch.tensor([0, 1])], {table: itself}, optimizer=optimizers):
        assert torch.equal(table(ids), torch.from_numpy(rows[:2]))
        assert table(ids).requires_grad is not freeze
        if not freeze:
            step_ones(optimizers, table(ids))
    table.close()
    if not freeze:
        # And not the padding.
        rows[0] -= np.float32(0.1)
    np.testing.assert_array_equal(np.load(path) if kind == "path" else array, rows)


def test_from_pretrained_of_what_is_no_table(tmp_path: Path) -> None:
    for wrong in (
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.int64),
        torch.zeros(2, 2, 2),
        [[1.0]],
    ):
        with pytest.raises(errors.StoreError):
            HostEmbedding.from_pretrained(wrong)
    with pytest.raises(errors.FileMissing):
        HostEmbedding.from_pretrained(tmp_path / "none.npy")


def test_to_embedding_is_a_copy() -> None:
    table = HostEmbedding(N, DIM, padding_idx=1, max_norm=2.0)
    dense = table.to_embedding()
    assert (dense.padding_idx, dense.max_norm, dense.weight.requires_grad) == (1, 2.0, True)
    before = table.read(range(N))
    dense.weight.data.zero_()
    assert torch.equal(table.read(range(N)), before)
    assert not table.requires_grad_(False).to_embedding().weight.requires_grad


@pytest.mark.parametrize(
    ("n", "dim", "dtype"),
    [(2**25, 65, torch.float32), (2**31 + 1000, 2, torch.float16)],
    ids=["items", "rows"],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_past_two_to_the_31(
    n: int, dim: int, dtype: torch.dtype, kind: Any, tmp_path: Path
) -> None:
    """A file of holes: what was not trained takes no room."""
    assert n * dim > 2**31
    table = HostEmbedding(n, dim, store=tmp_path / "t.npy", init="zeros", dtype=dtype)
    optimizer = RowOptimizer(kind, [table], lr=0.5)
    for ids in train_rows(
        [torch.tensor([n - 1, 0, n - 3]), torch.tensor([[n - 1], [n // 2]])],
        {table: itself},
        optimizer=optimizer,
    ):
        step_ones(optimizer, table(ids))
    want = (
        torch.tensor([-0.5, -0.5, -0.5, -1.0, 0])
        if kind is torch.optim.SGD
        else torch.tensor([-0.5, -0.5, -0.5, -0.8536, 0])
    )
    got = table.read([0, n // 2, n - 3, n - 1, n - 2])
    torch.testing.assert_close(got, want.to(dtype)[:, None].expand(5, dim), rtol=1e-3, atol=0)
    optimizer.close()
    table.close()
    for path in tmp_path.iterdir():
        assert path.stat().st_size > 2**31
        assert path.stat().st_blocks * 512 < 1 << 20
        os.truncate(path, 0)


# ---- as nn.Embedding -----------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 3},
    {"padding_idx": -1},
    {"max_norm": 1.5},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 5, "max_norm": 2.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("depth", [0, 3])
def test_options_are_those_of_nn_embedding(options: dict[str, Any], depth: int) -> None:
    table = HostEmbedding(N, DIM, **options)
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
    """Short floats in whole vectors: torch rounds what is left over of a tensor in another way, and a block has other ends than a table."""
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
    """Tensors of unequal dtypes, arrays, lists, numbers, nested; and by a key."""
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
    """Wherever they come from, the error names table and id; the batches before count, and nothing else has changed."""
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


# ---- in a loop and outside -----------------------------------------------------------------------


def test_outside_a_loop() -> None:
    table = HostEmbedding(N, DIM, name="users", padding_idx=0)
    ids, want = torch.tensor([[3, 3], [0, 9]]), table.to_embedding()
    with pytest.raises(errors.ClosedError, match="users was called outside a loop"):
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
        # Goes on after a read.
        step_ones(optimizer, table(ids) * 0)


def test_a_model_does_not_see_the_rows() -> None:
    model = nn.ModuleDict({"users": HostEmbedding(N, DIM), "head": nn.Linear(DIM, 1)})
    assert (
        [name for name, _ in model.named_parameters()]
        == list(model.state_dict())
        == ["head.weight", "head.bias"]
    )
    assert "40, 8, store=PinnedStore" in repr(model)
    before = model["users"].read(range(N))
    for ids in train_rows(batches(2), {model["users"]: itself}):
        assert len(list(model.parameters())) == len(model.state_dict()) == 2
        assert model.to(torch.float64)["users"](ids).dtype == torch.float32
    assert torch.equal(model["users"].read(range(N)), before)


def test_a_table_is_copied_with_its_rows() -> None:
    table = HostEmbedding(N, DIM)
    twin = copy.deepcopy(table)
    twin.reset_parameters("zeros")
    assert table.read(range(N)).count_nonzero() == N * DIM
    assert twin.read(range(N)).count_nonzero() == 0


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
        with pytest.raises(errors.ClosedError, match="a loop over rows of users is running"):
            next(iter(train_rows(batches(), {table: itself, other: itself})))
        assert len(list(train_rows(batches(3), {other: itself}))) == 3
    assert len(list(train_rows(batches(3), {table: itself}))) == 3
    with pytest.raises(errors.ArgumentError, match="rows in common"):
        train_rows(batches(), {table: itself, HostEmbedding(N, DIM, store=table.store): itself})


# ---- loaders, and how loops end ------------------------------------------------------------------


class Once:
    """A generator for every epoch."""

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
@pytest.mark.parametrize("depth", [0, 2])
def test_what_was_stepped_is_in_the_store(how: str, depth: int) -> None:
    table = HostEmbedding(N, DIM, init="zeros")
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
        # It can go on.
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


# ---- bags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *itertools.product(["sum", "mean", "max"], ["2-d", "offsets", "last offset"]),
        ("sum", "weights"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"max_norm": 1.5}], ids=str)
def test_bags(mode: str, form: str, options: dict[str, Any]) -> None:
    table = HostEmbeddingBag(
        N, DIM, mode=mode, include_last_offset=form == "last offset", **options
    )
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
        # torch adds weighted rows in another way where there is a padding.
        ids.view(-1)[7] = 3
    trained_as(table, dense, loader, loss_of)


def test_bags_outside_a_loop_and_of_other_modes() -> None:
    table = HostEmbeddingBag.from_pretrained(torch.arange(6.0).view(3, 2), mode="sum")
    assert table(torch.tensor([[0, 2], [1, 1]])).tolist() == [[4, 6], [4, 6]]
    with pytest.raises(errors.ArgumentError, match="mode='median'"):
        HostEmbeddingBag(N, DIM, mode="median")


def test_the_store_of_a_file_is_closed(tmp_path: Path) -> None:
    table = HostEmbedding(N, DIM, store=tmp_path / "t.npy")
    table.close()
    table.close()
    with pytest.raises(errors.ClosedError):
        table.read([0])
    with MmapStore(tmp_path / "t.npy") as store:
        HostEmbedding.from_pretrained(store).close()
        assert store.gather(np.array([1]), np.empty((1, DIM), np.float32)) is None
