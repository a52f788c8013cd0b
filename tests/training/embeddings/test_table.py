"""HostEmbedding: initial rows, stores, files, and conversion from and to nn.Embedding."""

import copy
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.table_loops import DIM, FLOATS, SGD, N, batches, itself, step_ones, train_rows
from torch import nn

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    HostEmbeddingBag,
    NpyStore,
    PinnedStore,
    RowOptimizer,
    errors,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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
            match=r"big: shape \(4611686018427387904, 8\) of float32 needs "
            "147,573,952,589,676,412,928 bytes",
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


def test_a_table_in_a_file(tmp_path: Path) -> None:
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
            match=r"users\.npy exists, but is not a \.npy file of shape .*; "
            "expected another path",
        ):
            other(N, 3 if other is HostEmbedding else DIM, store=path)
    found = HostEmbedding(N, DIM, store=path)
    with pytest.raises(
        errors.StoreError,
        match=r"users\.npy existed before .* overwrite=True or another path; .* "
        "HostEmbedding.from_pretrained",
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
            errors.StoreError, match="init cannot fill a read-only ArrayStore as one array"
        ):
            HostEmbedding(N, DIM, store=ArrayStore(shared), init="zeros")
        with pytest.raises(
            errors.ArgumentError,
            match=r"in a read-only store .* an array with separate memory for each element",
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
        # The padding row is not trained.
        rows[0] -= np.float32(0.1)
    np.testing.assert_array_equal(np.load(path) if kind == "path" else array, rows)


def test_from_pretrained_refuses_other_arrays(tmp_path: Path) -> None:
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


def test_from_pretrained_closes_its_file_if_it_fails(tmp_path: Path) -> None:
    class Refusing(HostEmbedding):
        def __init__(self, *shape: int, **options: Any) -> None:
            super().__init__(*shape, **options)
            # The first read opens the file.
            self.read([0])
            raise ZeroDivisionError

    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((2, 2), np.float32))
    # The error keeps the frames that raised it, and with them the store.
    with pytest.raises(ZeroDivisionError) as raised:
        Refusing.from_pretrained(path)
    open_paths = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert os.path.realpath(path) not in open_paths, raised


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
def test_sizes_past_two_to_the_31(
    n: int, dim: int, dtype: torch.dtype, kind: Any, tmp_path: Path
) -> None:
    """Rows that were not trained are holes in the file and take no disk space."""
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


def test_the_store_of_a_file_is_closed(tmp_path: Path) -> None:
    table = HostEmbedding(N, DIM, store=tmp_path / "t.npy")
    table.close()
    table.close()
    with pytest.raises(errors.ClosedError):
        table.read([0])
    with NpyStore(tmp_path / "t.npy") as store:
        HostEmbedding.from_pretrained(store).close()
        assert store.gather(np.array([1]), np.empty((1, DIM), np.float32)) is None


@pytest.mark.parametrize("kind", [HostEmbedding, HostEmbeddingBag])
def test_rows_that_exist_are_copied_to_be_pinned(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.ones((3, 2), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(errors.ArgumentError, match="pin='yes': expected True, False or 'auto'"):
        kind.from_pretrained(rows, pin="yes")
    for unpinned in ("auto", False):
        assert kind.from_pretrained(rows, pin=unpinned).store.array is rows
    # Memory that is locked here is ordinary, because the machine may have no GPU.
    asked = []

    def lock(store: PinnedStore, shape: Any, dtype: Any, pin: Any) -> None:
        asked.append(pin)
        allocate(store, shape, dtype, False)

    allocate = PinnedStore._allocate
    monkeypatch.setattr(PinnedStore, "_allocate", lock)
    for given in (rows, torch.from_numpy(rows), tmp_path / "rows.npy", ArrayStore(rows)):
        table = kind.from_pretrained(given, freeze=False, pin=True)
        assert isinstance(table.store, PinnedStore)
        assert table.read([0, 2]).tolist() == [[1, 1], [1, 1]]
        table.store.array[:] = 7
    assert asked == [True] * 4
    assert (rows == 1).all()
    assert (np.load(tmp_path / "rows.npy") == 1).all()
