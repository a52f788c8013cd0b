"""Small parts of a batch share one buffer and one copy; large ones have their own."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reader_functions import StagingDevice
from support.simtorch import SimTorchDevice

from pinfeed import ArrayStore, Feeder, wrap_loader
from pinfeed.devices import layout
from pinfeed.devices.layout import BatchPart, RowLayout
from pinfeed.pipeline.part_memory import PartMemory
from pinfeed.testing import SimDevice, favour

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


@given(SIZES)
def test_parts_do_not_overlap(sizes: list[int]) -> None:
    device = SimDevice()
    parts = [BatchPart.of((size,), np.dtype(np.uint8)) for size in sorted(sizes)]
    found = RowLayout.of(parts)
    ends = [offset + part.nbytes for offset, part in zip(found.offsets, parts, strict=True)]
    assert all(offset % 512 == 0 for offset in found.offsets)
    assert all(end <= after for end, after in zip(ends, found.offsets[1:], strict=False))
    assert max(ends, default=0) <= found.nbytes
    assert sum(block.nbytes for block in found.blocks) == found.nbytes
    assert [part for block in found.blocks for part in block.parts] == parts
    for block in found.blocks:
        assert block.nbytes <= 1 << 20
        assert len(block.parts) == 1 or all(part.nbytes <= 64 * KIB for part in block.parts)
    tensors, wholes = device.empty_parts(found, device.current_stream())
    assert [tensor.shape for tensor in tensors] == [part.shape for part in parts]
    assert len(wholes) == len(found.blocks)
    staged = found.staged_blocks(found.nbytes)
    for (begin, end), whole, block in zip(staged, wholes, found.blocks, strict=False):
        assert end - begin == whole._array.nbytes, "a copy ends where its tensor does"
        assert end <= begin + block.nbytes
    assert max((end for _, end in staged), default=0) >= max(ends, default=0)
    for i, tensor in enumerate(tensors):
        tensor._array.fill(i % 251)
    assert all((tensor._array == i % 251).all() for i, tensor in enumerate(tensors))


def test_parts_of_several_dtypes_share_memory() -> None:
    parts = [BatchPart.of((3,), np.dtype("u1")), BatchPart.of((2, 5), np.dtype("f8"))]
    (block,) = RowLayout.of(parts).blocks
    assert (block.row, block.nbytes) == (((), np.dtype("u1")), 1024)
    assert block.sizes == [3, 509, 80, 432]
    (same,) = RowLayout.of([parts[1], parts[1]]).blocks
    assert (same.row, same.sizes) == (((), np.dtype("f8")), [10, 54, 10, 54])
    rows = BatchPart.of((3, 4, 2), np.dtype("f8"))
    (whole,) = RowLayout.of([rows, rows]).blocks
    assert (whole.row, whole.sizes) == (((4, 2), np.dtype("f8")), [3, 5, 3, 5])
    read, staged = rows, parts[0]
    blocks = RowLayout.of([staged, staged, read, read], 2).blocks
    assert [len(block.parts) for block in blocks] == [2, 2]


def test_staging_memory_grows() -> None:
    memory = PartMemory(SimDevice(), [100, 100])
    staging: dict[Any, Any] = {}
    assert memory.slot_staging(staging, 100).shape == (100,)
    kept = staging["whole"]
    assert memory.slot_staging(staging, 50).shape == (50,)
    assert staging["whole"] is kept
    assert memory.slot_staging(staging, 1001).shape == (1001,)
    assert len(staging["whole"]) >= 1001
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
    monkeypatch.setattr(layout, "SMALL_NBYTES", 64)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((24, *shape)).astype("f4")
        for name, shape in (("a", (2,)), ("b", (50,)), ("c", ()), ("d", (3,)))
    }

    class Some(SimDevice):
        def reaches(self, source: Any) -> bool:
            return direct and getattr(source, "store", source) is stores["c"]

    stores = {name: ArrayStore(array.copy()) for name, array in arrays.items()}
    device = Some(favour("read", "compute", "pinfeed-read"))
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


class Own:
    """An object of the user that moves itself, and can do nothing else."""

    def to(self, device: Any) -> Any:
        return self


class Adopting(StagingDevice):
    def adopts(self, part: Any) -> bool:
        return isinstance(getattr(part, "host_value", None), Own)

    def reaches(self, source: Any) -> bool:
        return bool(source.host_value.is_pinned())


def test_an_object_that_moves_itself_is_asked_for_nothing_else() -> None:
    one = Own()
    with wrap_loader([(one, torch.ones(3))], device=Adopting()) as feeder:
        ((found, values),) = feeder
    assert found is one
    assert values.tolist() == [1, 1, 1]
