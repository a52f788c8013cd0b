"""Items of ragged rows that are decoded or remote: each is read once if they fit in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ragged import Ragged
from support.stores import saved

from pinfeed import Feeder, HDF5Store, RaggedStore, RemoteStore, StoreError, rows
from pinfeed.readahead.resident_file import InMemoryCopy, ResidentFile

h5py = pytest.importorskip("h5py")

PLAIN = Ragged(60, 9, (2,), gap=3)
SHUFFLED = rows.shuffled(3)
QUARTER = rows.per_rank(SHUFFLED, rank=1, world_size=4)
BLOCKS = rows.block_shuffled(1, block_rows=4, window_blocks=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("data", data=PLAIN.values, chunks=(7, 2), compression="gzip")
        file.create_dataset("plain", data=PLAIN.values)
        file["indptr"] = PLAIN.offsets
    return tmp_path / "x.h5"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each decoded run of chunks appends its number of rows."""
    found: list[int] = []
    read = HDF5Store._read_chunks

    def counted(self: HDF5Store, start: int, stop: int, out: Any) -> None:
        found.append(stop - start)
        read(self, start, stop, out)

    monkeypatch.setattr(HDF5Store, "_read_chunks", counted)
    return found


def require_equal(feeder: Feeder, order: Any, layout: Any) -> None:
    """Read three epochs, and compare them with a plain loop."""
    for epoch in range(3):
        wanted = np.asarray(order.bind(60, epoch)(np.arange(order.length(60))))
        for i, (values, bounds) in enumerate(feeder):
            expected = PLAIN.batch(wanted[i * 8 : i * 8 + 8].tolist(), layout)
            np.testing.assert_array_equal(values.numpy(), expected[0])
            np.testing.assert_array_equal(bounds.numpy(), expected[1])


@pytest.mark.parametrize("layout", ["offsets", "padded"])
@pytest.mark.parametrize("order", [SHUFFLED, BLOCKS])
def test_chunks_of_items_that_fit_are_decoded_once(
    path: Path, decoded: list[int], order: Any, layout: Any
) -> None:
    with (
        HDF5Store(path, "data") as items,
        RaggedStore(items, PLAIN.offsets, layout=layout) as store,
        Feeder(store, batch_size=8, rows=order, device="cpu") as feeder,
    ):
        assert feeder.plan.notes[-1].endswith(
            "ragged rows, decoded into RAM during the first epoch (it fits in the free memory)"
        )
        assert any(item.what == "rows of a file" for item in feeder.plan.items)
        require_equal(feeder, order, layout)
    assert sum(decoded) == len(PLAIN.values)


def test_the_second_epoch_in_sequence_copies_chunks(path: Path, decoded: list[int]) -> None:
    order = rows.sequential()
    with (
        HDF5Store(path, "data") as items,
        RaggedStore(items, PLAIN.offsets) as store,
        Feeder(store, batch_size=8, rows=order, device="cpu") as feeder,
    ):
        assert feeder.plan.notes[-1].endswith(
            "decoded in sequence, each chunk once; a second epoch loads it into RAM (it fits in "
            "the free memory)"
        )
        list(feeder)
        decoded.clear()
        require_equal(feeder, order, "offsets")
    assert sum(decoded) == len(PLAIN.values)


@pytest.mark.parametrize("n_epochs", [1, 2])
def test_no_epoch_that_may_not_come_loads_a_copy(
    path: Path, n_epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A continuous loop reads the next epoch ahead, but not if that loads the copy."""
    opened = []

    def open_epoch(self: InMemoryCopy, *args: Any) -> Any:
        opened.append(self)
        return ResidentFile.open_epoch(self, *args)

    monkeypatch.setattr(InMemoryCopy, "open_epoch", open_epoch)
    with (
        HDF5Store(path, "data") as items,
        RaggedStore(items, PLAIN.offsets) as store,
        Feeder(
            store, batch_size=8, rows=rows.sequential(), device="cpu", depth=2, continuous=True
        ) as feeder,
    ):
        list(feeder)
        assert not opened
        for _ in range(1, n_epochs):
            require_equal(feeder, rows.sequential(), "offsets")
    assert bool(opened) == (n_epochs > 1)


@pytest.mark.parametrize(
    ("name", "order"), [("data", QUARTER), ("plain", QUARTER), ("plain", rows.sequential())]
)
def test_items_that_are_not_copied(path: Path, name: str, order: Any) -> None:
    with (
        HDF5Store(path, name) as items,
        RaggedStore(items, PLAIN.offsets) as store,
        Feeder(store, batch_size=8, rows=order, device="cpu") as feeder,
    ):
        assert "RAM" not in feeder.plan.notes[-1]
        assert feeder.plan.notes[-1].startswith(f"x.h5:/{name}, ")
        require_equal(feeder, order, "offsets")


def test_a_batch_decodes_each_chunk_once(path: Path, decoded: list[int]) -> None:
    with HDF5Store(path, "data") as items, RaggedStore(items, PLAIN.offsets) as store:
        wanted = np.random.default_rng(0).permutation(60)
        np.testing.assert_array_equal(
            store.read(wanted)[0], PLAIN.batch(wanted.tolist(), "offsets")[0]
        )
    assert max(decoded) <= 7
    assert sum(decoded) <= len(PLAIN.values)


def test_remote_items_that_fit_are_loaded_once(tmp_path: Path) -> None:
    url = saved(tmp_path / "x.npy", PLAIN.values).as_uri()
    with (
        RemoteStore(url) as items,
        RaggedStore(items, PLAIN.offsets) as store,
        Feeder(store, batch_size=8, rows=SHUFFLED, device="cpu") as feeder,
    ):
        assert "ragged rows, loaded into RAM" in feeder.plan.notes[-1]
        require_equal(feeder, SHUFFLED, "offsets")


def test_offsets_of_a_dataset(path: Path) -> None:
    with h5py.File(path) as file:
        with RaggedStore(file["data"], file["indptr"]) as store:
            np.testing.assert_array_equal(store.offsets, PLAIN.offsets)
        assert file["indptr"][0] == PLAIN.offsets[0]
        with pytest.raises(StoreError, match=r"offsets: shape .*expected integers"):
            RaggedStore(PLAIN.values, file["data"])
