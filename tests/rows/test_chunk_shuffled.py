"""chunk_shuffled: all rows once, chunk by chunk within windows, of any chunks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pinfeed import ArgumentError, Feeder, HDF5Store, Ranks, concat, rows
from pinfeed.readahead.resident_file import InMemoryCopy
from pinfeed.rows.orders import known

h5py = pytest.importorskip("h5py")


def order_of(sizes: list[int], **options: Any) -> Any:
    bounds = np.cumsum([0, *sizes])
    return rows.chunk_shuffled(SimpleNamespace(bounds=bounds), **options)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    window=st.integers(1, 7),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_each_window_has_the_rows_of_its_chunks(
    sizes: list[int], window: int, epoch: int, data: st.DataObject
) -> None:
    n = sum(sizes)
    order = order_of(sizes, seed=2, window_chunks=window)
    at = order.bind(n, epoch)
    found = at(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=9)), np.int64)
    np.testing.assert_array_equal(at(some), found[some])
    bounds = np.cumsum([0, *sizes])
    made = known(order).windows(n, epoch)
    assert made is not None
    of_epoch = list(made.needed(0, n))
    assert [one.begin for one in of_epoch[1:]] == [one.end for one in of_epoch[:-1]]
    for number, one in enumerate(of_epoch):
        assert len(one.runs) == window or number == len(of_epoch) - 1
        assert all(start in bounds and stop in bounds for start, stop in one.runs)
        here = [row for start, stop in one.runs for row in range(start, stop)]
        assert sorted(found[one.begin : one.end].tolist()) == here
        assert len(here) <= made.window_rows
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    some_windows = list(made.needed(start, stop))
    wanted = [one for one in of_epoch if one.begin < stop and one.end > start and start < stop]
    assert some_windows == wanted


def test_seeds_epochs_and_equality() -> None:
    order = order_of([3, 5, 2, 7], seed=1)
    assert order == order_of([3, 5, 2, 7], seed=1)
    assert repr(order) != repr(order_of([5, 3, 2, 7], seed=1))
    assert "array" not in repr(order)
    orders = [order_of([30] * 30, seed=seed) for seed in (0, 1)]
    found = [o.bind(900, epoch)(np.arange(900)).tolist() for o in orders for epoch in (0, 1)]
    assert len({tuple(one) for one in found}) == 4


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_chunk_is_decoded_once_in_an_epoch(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block-shuffled order begins within chunks, so it decodes some twice."""
    arrays = [np.arange(2100.0).reshape(300, 7), np.arange(700.0).reshape(100, 7)]
    decoded: list[int] = []
    read = HDF5Store.read_box

    def counted(self: HDF5Store, box: Any, out: Any) -> None:
        decoded.append(box[0].stop - box[0].start)
        read(self, box, out)

    monkeypatch.setattr(HDF5Store, "read_box", counted)
    monkeypatch.setattr(InMemoryCopy, "plan", lambda reads: None)
    stores = []
    for i, array in enumerate(arrays):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file.create_dataset("x", data=array, chunks=(40, 7), compression="gzip")
        stores.append(HDF5Store(tmp_path / f"{i}.h5"))
    whole = np.concatenate(arrays)
    with concat(stores) as store:
        order = rows.chunk_shuffled(store, seed=3, window_chunks=2)
        seen = []
        for rank in range(world_size):
            options: Any = {"rows": order, "batch_size": 16, "device": "cpu"}
            options["ranks"] = Ranks("join", rank=rank, world_size=world_size)
            with Feeder((store, whole), **options) as feeder:
                assert "each buffer decodes a chunk once" in feeder.plan.notes[-1]
                for x, y in feeder:
                    assert torch.equal(x, y)
                    seen += x[:, 0].tolist()
    assert sorted(seen) == sorted(whole[:, 0].tolist())
    # A chunk in which the share of a rank ends is decoded by the next rank, too.
    assert sum(decoded) <= len(whole) + 2 * 40 * 2 * (world_size - 1)
    for one in stores:
        one.close()


@pytest.mark.parametrize("is_by_axis", [False, True])
def test_later_epochs_have_larger_windows_of_unequal_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_axis: bool
) -> None:
    monkeypatch.setattr(InMemoryCopy, "plan", lambda reads: None)
    array = np.arange(500.0)
    stores = []
    for i, begin in enumerate(range(0, 500, 50)):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            part = array[begin : begin + 50]
            file.create_dataset("x", data=part, chunks=(i + 1,), compression="gzip")
        store = HDF5Store(tmp_path / f"{i}.h5")
        stores.append(store.windows(length=1, step=3) if is_by_axis else store)
    with concat(stores) as source:
        order = rows.chunk_shuffled(source, seed=10, window_chunks=3)
        expected = np.concatenate([array[i : i + 50 : 3] for i in range(0, 500, 50)])
        expected = expected if is_by_axis else array
        with Feeder(source, batch_size=16, rows=order, device="cpu") as feeder:
            assert "each buffer decodes a chunk once" in feeder.plan.notes[-1]
            for _ in range(4):
                found = torch.cat(list(feeder)).numpy().ravel()
                np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    for store in stores:
        store.close()


def test_windows_belong_to_the_chunk_in_which_they_begin(tmp_path: Path) -> None:
    array = np.arange(4 * 30).reshape(4, 30)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(1, 8), compression="gzip")
    with HDF5Store(tmp_path / "x.h5") as store:
        found = store.windows(1, length=5, step=3, start=1, span=9)
        starts = [(i, 3 * k + 1) for i in range(4) for k in range(8)]
        assert found.n_rows == len(starts)
        assert found.bounds is not None
        firsts = [i * 30 + t for i, t in starts]
        chunks = [i * 30 + t for i in range(4) for t in (0, 8, 16, 24)] + [120]
        assert found.bounds.tolist() == [sum(f < c for f in firsts) for c in chunks]
        order = rows.chunk_shuffled(found, seed=1)
        with Feeder(found, batch_size=5, rows=order, device="cpu") as feeder:
            seen = torch.cat(list(feeder))[:, 0].tolist()
        assert sorted(seen) == [int(array[i, t]) for i, t in starts]


def test_sources_without_chunks_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"expected a store of rows in chunks"):
        rows.chunk_shuffled(np.arange(10))
    with pytest.raises(ArgumentError, match="a store of 17 rows, but is used for 18 rows"):
        Feeder(np.arange(18), batch_size=2, rows=order_of([3, 5, 2, 7]), device="cpu")
