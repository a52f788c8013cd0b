"""Work of a batch is queued in the order that its hazards demand, also after an error."""

import ctypes
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.launches import moves_of
from support.sim_engine import _ARGUMENTS, MOVES

from benchmarks.host.cells import reached
from benchmarks.host.gpu import simulated_gpu
from pinfeed.devices.batch_copies import BatchCopies, PartReads, RowWrites
from pinfeed.devices.cuda_driver import CudaDriver
from pinfeed.devices.layout import RowLayout
from pinfeed.errors import DeviceError
from pinfeed.native.driver import DriverTable
from pinfeed.native.library import library, why_not
from pinfeed.native.row_moves import RowMover
from pinfeed.stores.host_rows import StoreRows

BEFORE, SIDE, WRITTEN = 71, 72, 73

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Noting:
    """A driver that notes its calls, of which one may fail.

    Args:
        failing: Number of the call that fails; -1 for none.
    """

    def __init__(self, failing: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._failing = failing
        self._events = iter(range(1, 100))
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(getattr(self, f"_{name}", self._pass))
            for name, types in _ARGUMENTS.items()
        }
        self.table = DriverTable.of(0, self._functions)

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return 700 if len(self.calls) - 1 == self._failing else 0

    def _pass(self, *_: Any) -> int:
        return 0

    def _create(self, event: Any, flags: int) -> int:
        event[0] = next(self._events)
        return 0

    def _record(self, event: int, stream: int) -> int:
        return self._note("record", event, stream)

    def _wait(self, stream: int, event: int, flags: int) -> int:
        return self._note("wait", stream, event)

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        return self._note("copy", to, source, nbytes, stream)

    def _launch(self, kernel: int, *rest: Any) -> int:
        *_, stream, arguments, _ = rest
        moves = np.frombuffer(ctypes.string_at(arguments[0], MOVES.itemsize), MOVES)[0]
        return self._note("launch", int(moves["rows"]), int(moves["n_rows"]), stream)


def queued(failing: int) -> list[tuple[Any, ...]]:
    driver = Noting(failing)
    found = library()
    assert found is not None
    cuda = CudaDriver(driver.table, found, torch.device("cuda", 0))
    store: Any = SimpleNamespace(n_rows=9, row_shape=(16,), dtype=np.dtype(np.uint8))
    store.array = np.zeros((9, 16), np.uint8)
    mover = RowMover(moves_of([store], "gather", 4), "gather")
    moves = [mover.move(-1, 5, 1000, [2000]), mover.move(-1, 3, 3000, [4000])]
    copies = [10, 20, 30, 11, 21, 0, 12, 22, 32]
    fails = pytest.raises(DeviceError, match="error 700") if failing >= 0 else nullcontext()
    with fails, pytest.MonkeyPatch.context() as patch:
        # torch raises the error of a GPU here.
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        cuda.queue(BEFORE, SIDE, copies, moves, WRITTEN)
    return driver.calls


def test_the_stream_waits_for_the_other_one_and_rows_for_writes() -> None:
    assert queued(-1) == [
        ("record", 1, BEFORE),
        ("wait", SIDE, 1),
        ("copy", 10, 20, 30, SIDE),
        ("copy", 12, 22, 32, SIDE),
        ("wait", SIDE, WRITTEN),
        ("launch", 1000, 5, SIDE),
        ("launch", 3000, 3, SIDE),
        ("record", 2, SIDE),
    ]


@pytest.mark.parametrize("failing", range(8))
def test_after_an_error_only_the_event_is_recorded(failing: int) -> None:
    """The caller waits for what was queued before the error."""
    expected = queued(-1)
    assert queued(failing) == [*expected[: failing + 1], *expected[max(7, failing + 1) :]]


@pytest.mark.parametrize("kind", ["read", "written"])
def test_uploaded_indices_live_until_their_moves_are_queued(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator gives the memory of a freed tensor to the next upload in its stream."""
    last: list[weakref.ref[torch.Tensor]] = []
    memory = torch.empty(8, dtype=torch.int32)

    def upload(rows: np.ndarray, dtype: np.dtype[Any]) -> torch.Tensor:
        is_free = not last or last[-1]() is None
        tensor = (memory if is_free else torch.empty(8, dtype=torch.int32))[: len(rows)]
        tensor.numpy()[:] = rows
        last.append(weakref.ref(tensor))
        return tensor

    groups = [np.array([5, 1, 3]), np.array([0, 4, 2])]
    stores = [reached(np.arange(12.0).reshape(6, 2) + 100 * k) for k in range(2)]
    tensors = [torch.full((3, 2), -1.0, dtype=torch.float64) for _ in range(2)]
    with simulated_gpu(moves=True) as device:
        device.is_direct = True
        monkeypatch.setattr(device, "_upload", upload)
        streams = device.current_stream(), device.stream("read")
        before = [store.array.copy() for store in stores]
        each = list(zip(stores, groups, tensors, strict=True))
        if kind == "read":
            reads = [PartReads([(StoreRows(store, rows), tensor)]) for store, rows, tensor in each]
            layout = RowLayout.of([])
            copies = BatchCopies(np.empty(0, np.uint8), layout, [], reads)
            device.copy_batch(copies, streams, timed=False)
        else:
            writes = [RowWrites([(store, tensor)], rows) for store, rows, tensor in each]
            device.write_batch(writes, streams, timed=False)
    for (store, rows, tensor), old in zip(each, before, strict=True):
        if kind == "read":
            np.testing.assert_array_equal(tensor, old[rows])
        else:
            old[rows] = -1
            np.testing.assert_array_equal(store.array, old)
