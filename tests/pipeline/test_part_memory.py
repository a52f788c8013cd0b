"""Small parts of a batch share one buffer and one copy; large ones have their own."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pinfeed import ArrayStore, Feeder, wrap_loader
from pinfeed.pipeline import part_memory
from pinfeed.pipeline.part_memory import PartMemory, shared_nbytes
from pinfeed.testing import SimDevice, favour
from pinfeed.testing.simtorch import SimTorchDevice

KIB = 1 << 10
SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 200 * KIB)), max_size=40)


class Counting(SimTorchDevice):
    """Counts allocations, and copies to the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_allocated = 0
        self.n_copied = 0

    def empty(self, nbytes: int, stream: Any) -> Any:
        self.n_allocated += 1
        return super().empty(nbytes, stream)

    def copy(self, src: Any, dst: Any, stream: Any) -> None:
        self.n_copied += isinstance(src, np.ndarray)
        super().copy(src, dst, stream)


@given(SIZES, st.integers(1, 4))
def test_parts_do_not_overlap(sizes: list[int], n_batches: int) -> None:
    device = SimDevice()
    memory = PartMemory(device, sizes, shares=True)
    places = memory.reserve(n_batches, device.current_stream())
    assert [place is None for place in places] == [size == 0 for size in sizes]
    found = [place for place in places if place is not None]
    assert [place.nbytes for place in found] == [size * n_batches for size in sizes if size]
    shared = sorted((place for place in found if place.is_shared), key=lambda place: place.offset)
    assert len(shared) != 1
    assert all(place.offset % 512 == 0 for place in shared)
    assert all(place.nbytes <= 64 * KIB for place in shared)
    assert len({id(place.buffer) for place in shared}) <= 1
    for one, following in itertools.pairwise(shared):
        assert one.offset + one.nbytes <= following.offset
    assert shared_nbytes(places) == (shared[-1].offset + shared[-1].nbytes if shared else 0)
    assert shared_nbytes(places) <= 1 << 20
    for place in found:
        assert place.offset + place.nbytes <= len(place.buffer.contents)


def test_a_part_that_outgrows_its_place_gets_memory_of_its_own() -> None:
    device = SimDevice()
    stream = device.current_stream()
    memory = PartMemory(device, [100, 100], shares=True)
    reserved = memory.reserve(1, stream)
    assert memory.place(reserved, 0, 100, stream) == (reserved[0], True)
    grown, is_reserved = memory.place(reserved, 0, 101, stream)
    assert (grown.is_shared, grown.offset, is_reserved) == (False, 0, False)
    assert grown.nbytes >= 101
    assert memory.place(reserved, 2, 7, stream)[0].nbytes == 7
    memory.learn([90, 300, 7], 1)
    assert memory.capacity[0] == 100
    assert memory.capacity[1] >= 300
    assert memory.capacity[2] == 7


def test_many_small_tensors_take_one_allocation_and_one_copy() -> None:
    device = Counting(favour("compute", "read", "pinfeed-read"))
    n_tensors = 40
    batches = [
        {f"x{i}": torch.full((64, 2), 100.0 * b + i) for i in range(n_tensors)} for b in range(12)
    ]
    with device.factories(), wrap_loader(batches, device=device, depth=1) as loader:
        for b, batch in enumerate(loader):
            assert {name: device.host(x).unique().tolist() for name, x in batch.items()} == {
                f"x{i}": [100.0 * b + i] for i in range(n_tensors)
            }
            if b == 5:
                device.n_allocated = 0
                device.n_copied = 0
            del batch
    # The sizes are known by then. Six batches are read after that one, and one slot remains.
    assert device.n_copied <= 6
    assert device.n_allocated <= 7


@pytest.mark.parametrize("direct", [False, True])
def test_large_and_small_parts_of_rows(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part is large; and rows that the device reads itself lie between copied ones."""
    monkeypatch.setattr(part_memory, "_SMALL_NBYTES", 64)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((24, *shape)).astype("f4")
        for name, shape in (("a", (2,)), ("b", (50,)), ("c", ()), ("d", (3,)))
    }

    class Some(SimDevice):
        def reaches(self, source: Any) -> bool:
            return direct and getattr(source, "store", source) is stores["c"]

    stores = {name: ArrayStore(array.copy()) for name, array in arrays.items()}
    device = Some(favour("read", "index", "compute", "pinfeed-read"))
    order = rng.permutation(24)
    with Feeder(stores, rows=list(order.reshape(-1, 4)), device=device) as feeder:
        for i, batch in enumerate(feeder.batches()):
            rows = order[4 * i : 4 * i + 4]
            device.drain()
            for name, array in arrays.items():
                np.testing.assert_array_equal(batch.data[name]._array, array[rows])
            batch.write_back(batch.data)
    for name, array in arrays.items():
        np.testing.assert_array_equal(stores[name].array, array)


def test_the_bytes_of_a_batch_are_those_of_its_parts() -> None:
    device = SimDevice()
    rows = [np.array([0, 1, 2])] * 5
    with Feeder(ArrayStore(np.zeros((6, 2))), rows=rows, device=device) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
        assert feeder.stats.bytes == 5 * 3 * 16
