"""Epochs over HDF5, Zarr and Parquet files equal those over the array that they hold."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pinfeed import Config, Feeder, HDF5Store, KiB, ParquetStore, RowDataset, ZarrStore, rows
from pinfeed.stores import chunked
from pinfeed.stores.chunked import ChunkedStore

N, WIDTH = 1200, 1024
ORDERS = [
    rows.sequential(),
    rows.shuffled(1),
    rows.block_shuffled(1, block_rows=50, window_blocks=2),
]
LIMIT = KiB(4600)


@pytest.fixture(scope="module")
def array() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (N, WIDTH), np.uint8)


def hdf5(path: Path, array: np.ndarray) -> Callable[[], ChunkedStore]:
    with h5py.File(path / "x.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(48, WIDTH))
    return lambda: HDF5Store(path / "x.h5")


def zarr(path: Path, array: np.ndarray) -> Callable[[], ChunkedStore]:
    library = pytest.importorskip("zarr")
    library.create_array(str(path / "x.zarr"), data=array, chunks=(64, WIDTH), compressors=None)
    return lambda: ZarrStore(path / "x.zarr")


def parquet(path: Path, array: np.ndarray) -> Callable[[], ChunkedStore]:
    column = pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), WIDTH)
    options: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
    table = pa.table({"x": column})
    pq.write_table(table[:500], path / "x-0.parquet", row_group_size=60, **options)
    pq.write_table(table[500:], path / "x-1.parquet", row_group_size=50, **options)
    return lambda: ParquetStore(path / "x-*.parquet", "x")


@pytest.fixture(scope="module", params=[hdf5, zarr, parquet], ids=lambda write: write.__name__)
def opened(
    request: pytest.FixtureRequest, array: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], ChunkedStore]:
    make: Callable[[], ChunkedStore] = request.param(tmp_path_factory.mktemp("formats"), array)
    return make


@pytest.fixture
def store(opened: Callable[[], ChunkedStore]) -> Iterator[ChunkedStore]:
    found = opened()
    yield found
    found.close()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "shuffled", "block_shuffled"])
def test_epochs_equal_those_of_the_array(
    store: ChunkedStore, array: np.ndarray, order: Any, depth: int
) -> None:
    with Feeder(store, batch_size=128, rows=order, depth=depth, device="cpu") as feeder:
        for _ in range(2):
            at = order.bind(N, feeder.epoch)
            for i, batch in enumerate(feeder):
                wanted = at(np.arange(i * 128, min((i + 1) * 128, N)))
                np.testing.assert_array_equal(batch.numpy(), array[wanted])
            assert i == N // 128


@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "shuffled", "block_shuffled"])
def test_epochs_within_a_limit(
    store: ChunkedStore, array: np.ndarray, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_KEPT_BYTES", KiB(400))
    monkeypatch.setattr(chunked, "DECODED_BYTES", KiB(256))
    monkeypatch.setattr(chunked, "_RUN_BYTES", KiB(128))
    store._init_process_state()
    limit = Config(cpu_memory_limit=LIMIT, preferred_batch_size=32, depth=1).for_feeder()
    with Feeder(store, config=limit, rows=order, device="cpu") as feeder:
        assert feeder.plan.host_bytes <= LIMIT
        assert "into RAM" not in feeder.plan.notes[0]
        size = feeder.batch_size
        assert size is not None
        assert ("read ahead into buffers" in feeder.plan.notes[0]) is (order == ORDERS[2])
        at = order.bind(N, 0)
        for i, batch in enumerate(feeder):
            wanted = at(np.arange(i * size, min((i + 1) * size, N)))
            np.testing.assert_array_equal(batch.numpy(), array[wanted])
        assert i == -(-N // size) - 1


def test_an_epoch_is_resumed(opened: Callable[[], ChunkedStore], array: np.ndarray) -> None:
    state = None
    seen = []
    for n in (5, N):
        store = opened()
        with Feeder(store, batch_size=128, shuffle=True, seed=3, device="cpu") as feeder:
            if state is not None:
                feeder.load_state_dict(state)
            for batch, _ in zip(feeder, range(n), strict=False):
                seen.append(batch.numpy().copy())
                state = feeder.state_dict()
                if len(seen) == n:
                    break
        store.close()
    order = rows.shuffled(3).bind(N, 0)(np.arange(N))
    np.testing.assert_array_equal(np.concatenate(seen), array[order])


def test_rows_by_index(store: ChunkedStore, array: np.ndarray) -> None:
    dataset = RowDataset({"x": store})
    np.testing.assert_array_equal(dataset[[5, 1199, 5]]["x"].numpy(), array[[5, 1199, 5]])
