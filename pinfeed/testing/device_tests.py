"""DeviceTests: the tests of the contract of a Device; see pinfeed.testing.suites."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pinfeed.devices.device import Device, RowCopy, Stream, Tensor, TensorRange
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import StoreRows, UnreadPart, part_nbytes
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import DTYPES

# Shapes and dtypes of the rows of some stores that a cache holds together.
_CACHED = (((3,), "f4"), ((), "f8"), ((5, 2), "u1"))
# The same for stores whose rows a device reads and writes itself.
_TABLES = (((3,), "f4"), ((), "i8"), ((5, 2), "u1"), ((7,), "f8"), ((1,), "i2"))


def sample(n: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make ``n`` rows that differ from each other, whatever the dtype."""
    numbers = np.arange(n * int(np.prod(row_shape))).reshape(n, *row_shape)
    return (numbers % 2 == 0) if dtype.kind == "b" else (numbers % 251).astype(dtype)


class DeviceTests:
    """Test suite that every device must pass: the behaviour that the transfer of batches needs.

    Override ``delay`` to make a stream late, so that a missing wait fails a test.

    Examples:
        >>> from pinfeed.testing.sim import SimDevice
        >>> from pinfeed.testing.suites import DeviceTests
        >>> class TestSimDevice(DeviceTests):  # pytest collects and runs it
        ...     def make(self):
        ...         return SimDevice()
    """

    # It is one class because a subclass inherits all tests.

    def make(self) -> Device:
        """Return a new device."""
        raise NotImplementedError

    def delay(self, device: Device, stream: Any) -> None:
        """Queue slow work in a stream; a simulated device needs none, and the CPU is never late."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.make()
        yield device
        device.close()

    def upload(self, device: Device, values: Array, stream: Stream) -> tuple[Tensor, Array]:
        """Return a tensor of values, and staging memory that must live until the copy has ended."""
        staged = device.staging(values.nbytes).view(values.dtype).reshape(values.shape)
        staged[...] = values
        tensor = device.tensor(device.empty(values.nbytes, stream), values.shape, values.dtype)
        device.copy(staged, tensor, stream)
        return tensor, staged

    def room(self, device: Device, part: UnreadPart, stream: Stream) -> Tensor:
        """Return a tensor for a part."""
        memory = device.empty(max(1, part_nbytes(part)), stream)
        return device.tensor(memory, part.shape, part.dtype)

    def expect(self, device: Device, tensor: Tensor, values: Array, stream: Stream) -> None:
        """Require that a tensor has these values once ``stream`` has done its work."""
        staged = device.staging(values.nbytes).view(values.dtype).reshape(values.shape)
        device.copy(tensor, staged, stream)
        stream.record().sync()
        np.testing.assert_array_equal(staged, values)

    @pytest.mark.parametrize("name", sorted(DTYPES))
    def test_round_trip(self, device: Device, name: str) -> None:
        stream, dtype = device.current_stream(), DTYPES[name]
        for shape in ((4,), (3, 2), (2, 3, 4, 5)):
            values = sample(shape[0], shape[1:], dtype)
            tensor, _staged = self.upload(device, values, stream)
            self.expect(device, tensor, values, stream)
            assert device.describe(tensor) == (shape, dtype, True)

    @pytest.mark.parametrize("name", sorted(DTYPES))
    @pytest.mark.parametrize(
        ("taken", "into"), [([5, 0], [1, 4]), ([5, 0], None), (None, [4, 0])], ids=str
    )
    def test_copy_rows(
        self, device: Device, name: str, taken: list[int] | None, into: list[int] | None
    ) -> None:
        stream, dtype = device.current_stream(), DTYPES[name]
        src = sample(2 if taken is None else 6, (3,), dtype)
        dst = sample(20, (3,), dtype)[-2 if into is None else -5 :].copy()
        (a, _x), (b, _y) = self.upload(device, src, stream), self.upload(device, dst, stream)
        # The numbers are a range of a longer tensor.
        numbers = [1000, *(taken or ()), *(into or ()), 1000]
        on_device, _n = self.upload(device, np.array(numbers, np.int32), stream)
        begins = 1, 1 + len(taken or ())
        at = [
            None if rows is None else TensorRange(on_device, begin, len(rows))
            for rows, begin in zip((taken, into), begins, strict=True)
        ]
        device.copy_rows([RowCopy(a, b, *at)], stream)
        dst[slice(None) if into is None else into] = src if taken is None else src[taken]
        self.expect(device, b, dst, stream)

    def test_copies_of_one_call(self, device: Device) -> None:
        """Rows of several stores go from and to several places, as they do in a cache."""
        stream = device.current_stream()
        numbers, _n = self.upload(device, np.array([3, 0, 1, 2, 4, 0, 2], np.int32), stream)
        into, hits, slots = (TensorRange(numbers, begin, 2) for begin in (0, 2, 4))
        leaving = TensorRange(numbers, 6, 1)
        copies = []
        staged = []
        expected = []
        for shape, dtype in _CACHED:
            arrays = [sample(n, shape, np.dtype(dtype)) for n in (2, 5, 4, 1)]
            uploads = [self.upload(device, array, stream) for array in arrays]
            gathered, cache, lent, left = (tensor for tensor, _ in uploads)
            copies += [
                RowCopy(gathered, lent, into=into),
                RowCopy(cache, lent, slots, hits),
                RowCopy(cache, left, taken=leaving),
            ]
            staged.append(uploads)
            wanted = np.concatenate([arrays[0][1:], arrays[1][[4, 0]], arrays[0][:1]])
            expected += [(lent, wanted), (left, arrays[1][[2]])]
        device.copy_rows(copies, stream)
        for tensor, values in expected:
            self.expect(device, tensor, values, stream)

    def test_no_rows_are_copied(self, device: Device) -> None:
        stream = device.current_stream()
        some, _x = self.upload(device, np.arange(6.0).reshape(2, 3), stream)
        none, _y = self.upload(device, np.empty((0, 3)), stream)
        numbers, _n = self.upload(device, np.empty(0, np.int32), stream)
        positions = TensorRange(numbers, 0, 0)
        device.copy_rows([RowCopy(some, none, taken=positions)], stream)
        device.copy_rows([RowCopy(none, some, into=positions)], stream)
        device.copy_rows([], stream)
        device.copy_rows([RowCopy(some, some, positions, positions)], stream)
        self.expect(device, none, np.empty((0, 3)), stream)
        self.expect(device, some, np.arange(6.0).reshape(2, 3), stream)

    def store(self, array: Array) -> ArrayStore:
        """Return a store whose rows the device may reach."""
        return ArrayStore(array)

    @pytest.mark.parametrize("are_on_device", [False, True])
    @pytest.mark.parametrize("rows", [[4, 0, 2], [], [1]], ids=str)
    def test_rows_of_stores_that_it_reaches(
        self, device: Device, rows: list[int], are_on_device: bool
    ) -> None:
        """Rows of several stores are read at once, and written; by indices on the device, too."""
        wanted, stream = np.array(rows, np.int64), device.current_stream()
        back = 5 - wanted
        arrays = [sample(6, shape, np.dtype(dtype)) for shape, dtype in _TABLES]
        stores = [self.store(array.copy()) for array in arrays]
        if not all(map(device.reaches, stores)):
            pytest.skip("it reaches none")
        indices: list[Any] = [(None, None), (None, None)]
        if are_on_device:
            dtype = device.index_dtype(stores, wanted)
            if dtype is None:
                pytest.skip("it needs no indices")
            indices = [self.upload(device, one.astype(dtype), stream) for one in (wanted, back)]
        parts: list[UnreadPart] = [StoreRows(store, wanted) for store in stores]
        into = [self.room(device, part, stream) for part in parts]
        device.read(list(zip(parts, into, strict=True)), stream, indices[0][0])
        for array, tensor in zip(arrays, into, strict=True):
            self.expect(device, tensor, array[wanted], stream)
        device.write(list(zip(stores, into, strict=True)), back, stream, indices[1][0])
        stream.record().sync()
        for array, store in zip(arrays, stores, strict=True):
            array[back] = array[wanted]
            np.testing.assert_array_equal(store.array, array)

    def test_tensors_that_share_a_buffer(self, device: Device) -> None:
        stream, values = device.current_stream(), np.arange(1536, dtype=np.int64) % 251
        whole, _staged = self.upload(device, values.astype(np.uint8), stream)
        buffer = device.empty(1536, stream)
        device.copy(whole, device.tensor(buffer, (1536,), np.dtype(np.uint8)), stream)
        for offset in (0, 512, 1024):
            tensor = device.tensor(buffer, (3, 2), np.dtype(np.int16), offset)
            assert device.describe(tensor) == ((3, 2), np.dtype(np.int16), True)
            expected = values[offset : offset + 12].astype(np.uint8).view(np.int16).reshape(3, 2)
            self.expect(device, tensor, expected, stream)

    def test_a_stream_waits_for_an_event_of_another(self, device: Device) -> None:
        one, other = device.stream("one"), device.stream("other")
        self.delay(device, one)
        tensor, _staged = self.upload(device, np.arange(8.0), one)
        other.wait(one.record())
        self.expect(device, tensor, np.arange(8.0), other)

    def test_an_event_stays_where_it_was_recorded(self, device: Device) -> None:
        stream = device.stream("one")
        early = stream.record()
        early.sync()
        self.delay(device, stream)
        late = stream.record()
        assert early.is_done()
        late.sync()
        assert late.is_done()

    def test_a_timed_event_tells_when_it_was_passed(self, device: Device) -> None:
        stream, other = device.stream("one"), device.stream("other")
        # The first timed event of a device may have to relate its clock to the host's.
        stream.record(timed=True).sync()
        before = time.perf_counter()
        early = stream.record(timed=True)
        early.sync()
        between = time.perf_counter()
        self.delay(device, stream)
        late = stream.record(timed=True)
        other.wait(late)
        last = other.record(timed=True)
        last.sync()
        after = time.perf_counter()
        times = [before, early.at_s(), between, late.at_s(), last.at_s(), after]
        # The clocks of host and device may differ by a millisecond.
        assert all(time <= following + 1e-3 for time, following in itertools.pairwise(times)), times

    def test_what_is_done_can_be_named(self, device: Device) -> None:
        with device.named("pinfeed outer"), device.named("pinfeed inner"):
            assert device.current_stream() == device.current_stream()
        with pytest.raises(ZeroDivisionError), device.named("pinfeed failing"):
            _ = 1 / 0

    def test_streams_are_told_apart(self, device: Device) -> None:
        assert device.current_stream() == device.current_stream()
        if not device.unified:
            assert device.stream("one") != device.stream("other")
            assert device.stream("one") != device.current_stream()

    def test_a_thread_works_in_the_stream_that_it_is_given(self, device: Device) -> None:
        before = device.current_stream()
        one = device.stream("one")
        with device.in_stream(one):
            assert device.current_stream() == one
        with pytest.raises(ZeroDivisionError), device.in_stream(one):
            _ = 1 / 0
        assert device.current_stream() == before

    def test_memory_of_the_host_and_arrays_on_it(self, device: Device) -> None:
        """A device with the memory of the host also takes arrays in the place of tensors."""
        if not device.unified:
            pytest.skip("its memory is not the host's")
        stream = device.current_stream()
        memory = device.empty(24, stream)
        np.ndarray((3,), np.float64, memory)[:] = [1, 2, 3]
        tensor = device.tensor(memory, (3,), np.dtype(np.float64))
        self.expect(device, tensor, np.array([1.0, 2.0, 3.0]), stream)
        store = self.store(np.zeros(4))
        assert device.reaches(store)
        values = np.array([1.0, 2.0])
        device.write([(store, values)], np.array([3, 1]), stream)
        np.testing.assert_array_equal(store.array, [0, 2, 0, 1])
        batch, _a = self.upload(device, np.zeros(3), stream)
        places, _b = self.upload(device, np.array([1, 2], np.int32), stream)
        one, other = TensorRange(places, 0, 1), TensorRange(places, 1, 1)
        device.copy_rows([RowCopy(values, batch, one, other)], stream)
        self.expect(device, batch, np.array([0.0, 0.0, 2.0]), stream)

    def test_memory_lent_to_another_stream_is_not_given_away(self, device: Device) -> None:
        home, other = device.stream("home"), device.stream("other")
        tensor, _a = self.upload(device, np.full(512, 1.0), home)
        other.wait(home.record())
        self.delay(device, other)
        out = device.staging(4096).view(np.float64)
        device.copy(tensor, out, other)
        device.share(tensor, other)
        del tensor
        again, _b = self.upload(device, np.full(512, 2.0), home)
        home.record().sync()
        other.record().sync()
        np.testing.assert_array_equal(out, np.full(512, 1.0))
        self.expect(device, again, np.full(512, 2.0), home)

    def test_a_worker_does_its_tasks_in_order_and_reports_errors(self, device: Device) -> None:
        worker = device.worker("pinfeed-test")
        done: list[int] = []
        futures = [worker.submit(done.append, i) for i in range(5)]
        failing = worker.submit(int, "x")
        for future in futures:
            future.result()
        assert done == list(range(5))
        assert isinstance(failing.exception(), ValueError)
        worker.shutdown(wait=True)

    def test_what_is_no_tensor_of_the_device(self, device: Device) -> None:
        assert device.describe(np.zeros(3)) is None
        assert device.describe(3) is None

    def test_free_memory_is_a_number_of_bytes(self, device: Device) -> None:
        assert device.free_bytes() > 0
