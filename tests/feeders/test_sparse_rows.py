"""Rows of sparse matrices in a Feeder: batches equal the dense rows, in every order and limit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.sparse import Sparse

from pinfeed import (
    ArgumentError,
    ArrayStore,
    Config,
    Feeder,
    HDF5Store,
    MiB,
    SparseStore,
    StoreError,
    VerificationError,
    WriteBackError,
    rows,
)

h5py = pytest.importorskip("h5py")

N = 60
MATRIX = Sparse(N)
LARGE = Sparse(3000, 400, most=300)
ORDERS = [rows.sequential(), rows.shuffled(3), rows.block_shuffled(1, block_rows=4)]
LAYOUTS: list[Any] = ["csr", "dense"]


def require_equal(batch: Any, wanted: Any, layout: str, matrix: Sparse = MATRIX) -> None:
    assert batch.layout is (torch.sparse_csr if layout == "csr" else torch.strided)
    assert batch.shape == (len(wanted), matrix.shape[1])
    if layout == "csr":
        # This raises an error for invalid indices.
        torch.sparse_csr_tensor(
            batch.crow_indices(),
            batch.col_indices(),
            batch.values(),
            size=batch.shape,
            check_invariants=True,
        )
        batch = batch.to_dense()
    np.testing.assert_array_equal(batch, matrix.dense[wanted])


def drawn(order: Any, epoch: int, n_rows: int = N) -> Any:
    return np.asarray(order.bind(n_rows, epoch)(np.arange(order.length(n_rows))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [0, 1, 3, None])
def test_batches_equal_the_dense_rows(layout: Any, order: Any, depth: int | None) -> None:
    store = SparseStore(MATRIX, layout=layout)
    source = {"x": [store], "number": np.arange(N)}
    for chosen in (
        {"batch_size": 7, "rows": order},
        {"rows": rows.element_batches(store.lengths, 25, order=order)},
        {"rows": rows.bucketed(store.lengths, batch_size=8, order=order), "batch_size": 8},
    ):
        options: dict[str, Any] = {"depth": depth, "device": "cpu", **chosen}
        with Feeder(source, **options) as feeder:
            for _ in range(2):
                # All batches are kept and stay unchanged.
                kept = list(feeder)
                for batch in kept:
                    require_equal(batch["x"][0], batch["number"].numpy(), layout)
                found = torch.cat([batch["number"] for batch in kept])
                assert found.sort().values.tolist() == list(range(N))


@pytest.mark.parametrize("columns", [np.uint8, np.uint16, np.int16, np.uint32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_other_dtypes(layout: Any, columns: Any) -> None:
    matrix = Sparse(N, columns=columns, most=4)
    with Feeder(SparseStore(matrix, layout=layout), batch_size=7, device="cpu") as feeder:
        for i, batch in enumerate(feeder):
            require_equal(batch, range(i * 7, min(i * 7 + 7, N)), layout, matrix)
            if layout == "csr":
                # torch has no other dtypes of indices.
                assert batch.col_indices().dtype is batch.crow_indices().dtype
        assert i == 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_the_rows(layout: Any) -> None:
    found = []
    for rank in range(3):
        order = rows.per_rank(rows.shuffled(2), rank=rank, world_size=3)
        store = SparseStore(MATRIX, layout=layout)
        with Feeder(store, batch_size=6, rows=order, device="cpu") as feeder:
            for i, batch in enumerate(feeder):
                wanted = drawn(order, 0)[i * 6 : i * 6 + 6]
                require_equal(batch, wanted, layout)
                found += wanted.tolist()
    assert sorted(found) == list(range(N))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_continues_with_the_next_batch(layout: Any) -> None:
    store = SparseStore(MATRIX, layout=layout)
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "device": "cpu"}
    with Feeder(store, **options) as feeder:
        for number, _ in enumerate(feeder):
            if number == 2:
                break
        state = feeder.state_dict()
    with Feeder(store, **options) as resumed:
        resumed.load_state_dict(state)
        found = list(resumed)
    wanted = drawn(rows.shuffled(0), 0)[21:]
    assert len(found) == 6
    for i, batch in enumerate(found):
        require_equal(batch, wanted[i * 7 : i * 7 + 7], layout)


# -- transforms ------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [0, 2])
def test_transforms_take_the_batch_of_the_layout(layout: Any, depth: int) -> None:
    def double(batch: torch.Tensor) -> torch.Tensor:
        assert batch.layout is (torch.sparse_csr if layout == "csr" else torch.strided)
        return (batch.to_dense() if layout == "csr" else batch) * 2

    store = SparseStore(MATRIX, layout=layout)
    for name in ("host_transform", "device_transform"):
        options: dict[str, Any] = {name: double, "depth": depth, "device": "cpu"}
        with Feeder(store, batch_size=9, **options) as feeder:
            for i, batch in enumerate(feeder):
                np.testing.assert_array_equal(batch, MATRIX.dense[i * 9 : i * 9 + 9] * 2)
            assert i == 6


def test_dense_batches_cannot_be_written_back_or_verified() -> None:
    weights = np.zeros(N, np.float32)
    source = (SparseStore(MATRIX, layout="dense"), weights)
    with Feeder(source, batch_size=30, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(WriteBackError):
                batch.write_back((None, batch.data[1] + 1))
    assert not weights.any()
    with pytest.raises(ArgumentError, match=r"SparseStore whose batches are dense.*layout='csr'"):
        Feeder(source, batch_size=30, device="cpu", verify=True)


def test_other_parts_are_written_back_next_to_sparse_rows() -> None:
    weights = np.zeros(N, np.float32)
    with Feeder((SparseStore(MATRIX), weights), batch_size=7, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back((None, batch.data[1] + 1))
    assert (weights == 1).all()


class Changing(ArrayStore):
    """Values, of which every second gather returns others."""

    n_gathers = 0

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        self.n_gathers += 1
        out += self.n_gathers % 2


def test_verification_finds_changed_values() -> None:
    store = SparseStore(MATRIX)
    with Feeder(store, batch_size=10, device="cpu", verify=True) as feeder:
        assert len(list(feeder)) == 6
    store.parts[0] = Changing(MATRIX.data)
    n = np.count_nonzero(store.lengths[:10])
    with (
        Feeder(store, batch_size=10, device="cpu", verify=True, depth=0) as feeder,
        pytest.raises(VerificationError, match=f"batch 0: {n} of 10 rows of source differ"),
    ):
        list(feeder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_column_out_of_range_ends_the_loop(layout: Any) -> None:
    matrix = Sparse(N)
    matrix.indices[matrix.indptr[33]] = 99
    assert matrix.indptr[33] < matrix.indptr[34]
    with Feeder(SparseStore(matrix, layout=layout), batch_size=10, device="cpu") as feeder:
        found = []
        with pytest.raises(StoreError, match="an element of the batch has column 99"):
            found.extend(feeder)
    assert len(found) <= 3


# -- memory and files ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "x.h5ad"
    return LARGE.write_hdf5(path, chunks=(2000,), compression="gzip")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_counts_dense_rows(layout: Any) -> None:
    store = SparseStore(LARGE, layout=layout)
    config = Config(cpu_memory_limit=MiB(12), depth=2)
    with Feeder(store, config=config, shuffle=True, device="cpu") as feeder:
        size = feeder.batch_size
        assert size is not None
        found = {item.what: item for item in feeder.plan.items}
        if layout == "dense":
            results = found["results of device_transform"]
            assert 400 * 4 * size <= results.nbytes <= 1.6 * 400 * 4 * size
        assert feeder.plan.host_bytes <= MiB(12)
        for i, batch in enumerate(feeder):
            wanted = drawn(rows.shuffled(0), 0, 3000)[i * size : i * size + size]
            require_equal(batch, wanted, layout, LARGE)
    if layout == "csr":
        assert "results of device_transform" not in found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("limit", [None, 5, 64])
def test_files_that_fit_and_files_that_do_not(
    layout: Any, order: Any, limit: int | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = {"X/data": 0, "X/indices": 0}
    read = HDF5Store._read_chunks

    def counted(self: HDF5Store, start: int, stop: int, out: Any) -> None:
        decoded[self.label.partition(":/")[2]] += stop - start
        read(self, start, stop, out)

    monkeypatch.setattr(HDF5Store, "_read_chunks", counted)
    chosen: dict[str, Any] = {"batch_size": 50}
    if limit is not None:
        config = Config(cpu_memory_limit=MiB(limit), preferred_batch_size=50, depth=1)
        chosen = {"config": config}
    with (
        SparseStore(path, layout=layout) as store,
        Feeder(store, rows=order, device="cpu", **chosen) as feeder,
    ):
        assert feeder.batch_size == 50
        notes = "".join(feeder.plan.notes)
        for name in decoded:
            decoded[name] = 0
        n_epochs = 2
        for epoch in range(n_epochs):
            wanted = drawn(order, epoch, 3000)
            for i, batch in enumerate(feeder):
                require_equal(batch, wanted[i * 50 : i * 50 + 50], layout, LARGE)
            assert i == 59
    n = len(LARGE.data)
    if limit != 5 and order is not ORDERS[0]:
        assert "decoded into RAM during the first epoch" in notes
        assert list(decoded.values()) == [n, n]
    if limit == 5 and order is ORDERS[2]:
        assert "each buffer decodes a chunk once" in notes
        # Windows of 64 rows in blocks of 4 rows, which are shorter than a chunk.
        assert max(decoded.values()) < 20 * n_epochs * n
