"""What every Store and every Device must pass. Subclass in a test file, and say how one is made.

    class TestMyStore(StoreTests):
        def make(self, array, tmp_path):
            return MyStore(array)

Needs pytest.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pinfeed.devices.base import Device, Stream, Tensor
from pinfeed.errors import ArgumentError, RowIndexError, WriteBackError
from pinfeed.pipeline.sources.base import part_nbytes
from pinfeed.readahead.base import StoreRows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import HostArray, Store
from pinfeed.tensors.dtypes import DTYPES

Array = npt.NDArray[Any]

ROW_SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)]


BAD_ROWS: list[Any] = [[-1], [3, 50], [5000], [2**40], [1.0], [True], [[1]], 3, None, "x"]
"""Row numbers that a store of 50 rows refuses."""


def sample(n: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Rows that differ from each other, whatever the dtype."""
    numbers = np.arange(n * int(np.prod(row_shape))).reshape(n, *row_shape)
    return (numbers % 2 == 0) if dtype.kind == "b" else (numbers % 251).astype(dtype)


class ReadOnlyStoreTests:
    """The contract of a Store, as far as it is about reading."""

    def make(self, array: Array, tmp_path: Path) -> Store:
        """A store of the rows of ``array``; a new one in each call."""
        raise NotImplementedError

    @pytest.fixture(params=sorted(DTYPES))
    def dtype(self, request: pytest.FixtureRequest) -> np.dtype[Any]:
        return DTYPES[request.param]

    @pytest.fixture(params=ROW_SHAPES, ids=str)
    def row_shape(self, request: pytest.FixtureRequest) -> tuple[int, ...]:
        shape: tuple[int, ...] = request.param
        return shape

    @pytest.fixture
    def rows(self, tmp_path: Path) -> Iterator[tuple[Array, Store]]:
        """Some rows, and a store of them."""
        array = sample(50, (6,), np.dtype(np.float32))
        store = self.make(array.copy(), tmp_path)
        yield array, store
        store.close()

    def test_what_it_says_of_itself(self, rows: tuple[Array, Store]) -> None:
        _, store = rows
        assert isinstance(store, Store)
        assert (store.n_rows, store.row_shape, store.dtype) == (50, (6,), np.dtype(np.float32))
        assert store.resident_bytes >= 0

    def test_gather_of_every_dtype_and_rank(
        self, dtype: np.dtype[Any], row_shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        array = sample(13, row_shape, dtype)
        store = self.make(array.copy(), tmp_path)
        wanted = np.array([12, 0, 5, 5, 1])
        out = np.empty((5, *row_shape), dtype)
        store.gather(wanted, out)
        np.testing.assert_array_equal(out, array[wanted])
        store.close()

    @pytest.mark.parametrize(
        "wanted",
        [
            [],
            [0],
            [49],
            [3, 4, 5],
            [5, 4, 3],
            [0, 2, 4],
            [7, 7, 7],
            [10, 11, 40, 41, 42, 12],
            list(range(50)),
            list(range(49, -1, -1)),
        ],
        ids=str,
    )
    def test_gather_of_any_rows(self, rows: tuple[Array, Store], wanted: list[int]) -> None:
        array, store = rows
        out = np.empty((len(wanted), 6), np.float32)
        store.gather(np.array(wanted, np.int64), out)
        np.testing.assert_array_equal(out, array[np.array(wanted, np.int64)])

    def test_gather_into_a_part_of_a_larger_buffer(self, rows: tuple[Array, Store]) -> None:
        array, store = rows
        out = np.zeros((10, 6), np.float32)
        store.gather(np.array([8, 2, 30]), out[4:7])
        np.testing.assert_array_equal(out[4:7], array[[8, 2, 30]])
        assert not out[:4].any()
        assert not out[7:].any()

    @pytest.mark.parametrize("wanted", BAD_ROWS, ids=repr)
    def test_gather_refuses_rows_that_are_none(
        self, rows: tuple[Array, Store], wanted: Any
    ) -> None:
        out = np.full((np.size(wanted), 6), 7, np.float32)
        for given in (wanted, np.array(wanted)):
            with pytest.raises(RowIndexError):
                rows[1].gather(given, out)
        np.testing.assert_array_equal(out, np.full_like(out, 7))

    @pytest.mark.parametrize(
        "out",
        [
            np.zeros((2, 6)),
            np.zeros((2, 6), ">f4"),
            np.zeros((3, 6), np.float32),
            np.zeros((1, 6), np.float32),
            np.zeros((2, 7), np.float32),
            np.zeros((2, 3, 2), np.float32),
            np.zeros(12, np.float32),
            np.zeros((6, 2), np.float32).T,
            np.broadcast_to(np.zeros(6, np.float32), (2, 6)),
            [[0.0] * 6] * 2,
            None,
        ],
        ids=lambda out: (
            f"{type(out).__name__}{getattr(out, 'shape', '')}{getattr(out, 'dtype', '')}"
        ),
    )
    def test_gather_refuses_an_array_that_does_not_fit(
        self, rows: tuple[Array, Store], out: Any
    ) -> None:
        with pytest.raises(ArgumentError):
            rows[1].gather(np.array([3, 1]), out)
        assert out is None or not np.any(out)

    def test_gather_refuses_memory_that_is_read_only(self, rows: tuple[Array, Store]) -> None:
        out = np.zeros((2, 6), np.float32)
        out.flags.writeable = False
        with pytest.raises(ArgumentError):
            rows[1].gather(np.array([3, 1]), out)
        assert not out.any()

    def test_several_gathers_at_the_same_time(self, rows: tuple[Array, Store]) -> None:
        array, store = rows

        def gather(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(50):
                wanted = rng.integers(0, 50, rng.integers(1, 40))
                out = np.empty((len(wanted), 6), np.float32)
                store.gather(wanted, out)
                np.testing.assert_array_equal(out, array[wanted])

        with ThreadPoolExecutor(3) as threads:
            for done in [threads.submit(gather, seed) for seed in range(3)]:
                done.result()

    def test_close_twice(self, rows: tuple[Array, Store]) -> None:
        _, store = rows
        store.close()
        store.close()


class StoreTests(ReadOnlyStoreTests):
    """The contract of a Store whose rows can be written."""

    def contents(self, store: Store) -> Array:
        """All rows, read past the store where that can be done; else through it."""
        out = np.empty((store.n_rows, *store.row_shape), store.dtype)
        store.gather(np.arange(store.n_rows), out)
        return out

    def test_it_is_writable(self, rows: tuple[Array, Store]) -> None:
        assert rows[1].writable

    def test_scatter_of_every_dtype_and_rank(
        self, dtype: np.dtype[Any], row_shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        array = sample(13, row_shape, dtype)
        store = self.make(array.copy(), tmp_path)
        wanted = np.array([12, 0, 5, 6])
        values = sample(40, row_shape, dtype)[-4:]
        array[wanted] = values
        store.scatter(wanted, values)
        store.flush()
        np.testing.assert_array_equal(self.contents(store), array)
        store.close()

    @pytest.mark.parametrize(
        "wanted",
        [[], [0], [49], [3, 4, 5], [5, 4, 3], [10, 11, 40, 41, 42, 12], list(range(50))],
        ids=str,
    )
    def test_scatter_of_any_rows(self, rows: tuple[Array, Store], wanted: list[int]) -> None:
        array, store = rows
        values = -1 - sample(len(wanted), (6,), np.dtype(np.float32))
        array[np.array(wanted, np.int64)] = values
        store.scatter(np.array(wanted, np.int64), values)
        np.testing.assert_array_equal(self.contents(store), array)

    @pytest.mark.parametrize("wanted", BAD_ROWS, ids=repr)
    def test_scatter_refuses_rows_that_are_none(
        self, rows: tuple[Array, Store], wanted: Any
    ) -> None:
        array, store = rows
        for given in (wanted, np.array(wanted)):
            with pytest.raises(RowIndexError):
                store.scatter(given, np.full((np.size(wanted), 6), 7, np.float32))
        store.flush()
        np.testing.assert_array_equal(self.contents(store), array)

    @pytest.mark.parametrize(
        "values",
        [
            np.ones((2, 6)),
            np.ones((2, 6), ">f4"),
            np.ones((2, 6), np.int32),
            np.ones((1, 6), np.float32),
            np.ones((3, 6), np.float32),
            np.ones((2, 7), np.float32),
            np.ones((2, 1), np.float32),
            np.ones(6, np.float32),
            [[1.0] * 6] * 2,
            1.0,
            None,
        ],
        ids=lambda values: (
            f"{type(values).__name__}{getattr(values, 'shape', '')}{getattr(values, 'dtype', '')}"
        ),
    )
    def test_scatter_refuses_values_that_do_not_fit(
        self, rows: tuple[Array, Store], values: Any
    ) -> None:
        array, store = rows
        with pytest.raises(WriteBackError):
            store.scatter(np.array([3, 1]), values)
        store.flush()
        np.testing.assert_array_equal(self.contents(store), array)

    def test_values_are_copied(self, rows: tuple[Array, Store]) -> None:
        array, store = rows
        values = np.full((2, 6), -3, np.float32)
        store.scatter(np.array([1, 0]), values)
        values[:] = 9
        array[:2] = -3
        np.testing.assert_array_equal(self.contents(store), array)

    def test_gather_and_scatter_at_the_same_time(self, rows: tuple[Array, Store]) -> None:
        """Rows that are not written stay what they are; those that are, end as written."""
        array, store = rows
        written, others = np.arange(0, 50, 2), np.arange(1, 50, 2)

        def write() -> None:
            for value in range(100):
                store.scatter(written, np.full((25, 6), value, np.float32))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            out = np.empty((25, 6), np.float32)
            for _ in range(100):
                store.gather(others, out)
                np.testing.assert_array_equal(out, array[others])
        finally:
            writer.join()
        array[written] = 99
        np.testing.assert_array_equal(self.contents(store), array)


class DeviceTests:
    """The contract of a Device: what transfer.py relies on.

    ``delay`` makes a stream late, so that missing order shows.
    """

    def make(self) -> Device:
        """A new device."""
        raise NotImplementedError

    def delay(self, device: Device, stream: Any) -> None:
        """Queue something slow; a simulated device is late anyway, the host never is."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.make()
        yield device
        device.close()

    def upload(self, device: Device, values: Array, stream: Stream) -> tuple[Tensor, Array]:
        """A tensor of these values, and the staging memory that must live until the copy is done."""
        staged = device.staging(values.nbytes).view(values.dtype).reshape(values.shape)
        staged[...] = values
        tensor = device.tensor(device.empty(values.nbytes, stream), values.shape, values.dtype)
        device.copy(staged, tensor, stream)
        return tensor, staged

    def download(
        self, device: Device, tensor: Tensor, shape: tuple[int, ...], dtype: Any, stream: Stream
    ) -> Array:
        """The values of a tensor once ``stream`` has done its work."""
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        staged: Array = device.staging(size).view(dtype).reshape(shape)
        device.copy(tensor, staged, stream)
        stream.record().sync()
        return staged.copy()

    @pytest.mark.parametrize("name", sorted(DTYPES))
    @pytest.mark.parametrize("shape", [(4,), (3, 2), (2, 3, 4, 5)], ids=str)
    def test_round_trip(self, device: Device, name: str, shape: tuple[int, ...]) -> None:
        stream, values = device.current_stream(), sample(shape[0], shape[1:], DTYPES[name])
        tensor, _staged = self.upload(device, values, stream)
        np.testing.assert_array_equal(
            self.download(device, tensor, shape, DTYPES[name], stream), values
        )
        assert device.describe(tensor) == (shape, DTYPES[name], True)

    @pytest.mark.parametrize("name", sorted(DTYPES))
    def test_copy_rows(self, device: Device, name: str) -> None:
        stream, dtype = device.current_stream(), DTYPES[name]
        src, dst = sample(6, (3,), dtype), sample(20, (3,), dtype)[-5:]
        a, _x = self.upload(device, src, stream)
        b, _y = self.upload(device, dst, stream)
        device.copy_rows(a, np.array([5, 0]), b, np.array([1, 4]), stream)
        dst = dst.copy()
        dst[[1, 4]] = src[[5, 0]]
        np.testing.assert_array_equal(self.download(device, b, (5, 3), dtype, stream), dst)

    def store(self, array: Array) -> ArrayStore:
        """Rows that the device may reach."""
        return ArrayStore(array)

    @pytest.mark.parametrize("rows", [[4, 0, 2], [], [1]], ids=str)
    def test_rows_of_stores_that_it_reaches(self, device: Device, rows: list[int]) -> None:
        """Come, several stores at once, and go."""
        wanted, stream = np.array(rows, np.int64), device.current_stream()
        arrays = [
            sample(6, shape, np.dtype(dtype))
            for shape, dtype in (
                ((3,), "f4"),
                ((), "i8"),
                ((5, 2), "u1"),
                ((7,), "f8"),
                ((1,), "i2"),
            )
        ]
        stores = [self.store(array.copy()) for array in arrays]
        if not all(map(device.reaches, stores)):
            pytest.skip("it reaches none")
        parts: list[HostArray] = [StoreRows(store, wanted) for store in stores]
        into = [
            device.tensor(device.empty(max(1, part_nbytes(part)), stream), part.shape, part.dtype)
            for part in parts
        ]
        for _ in device.read(list(zip(parts, into, strict=True)), stream):
            pass
        for array, tensor, part in zip(arrays, into, parts if rows else [], strict=bool(rows)):
            np.testing.assert_array_equal(
                self.download(device, tensor, part.shape, part.dtype, stream), array[wanted]
            )
        back = np.array([5 - row for row in rows], np.int64)
        device.write(list(zip(stores, into, strict=True)), back, stream)
        stream.record().sync()
        for array, store in zip(arrays, stores, strict=True):
            array[back] = array[wanted]
            np.testing.assert_array_equal(store.array, array)

    def test_tensor_of_a_larger_buffer(self, device: Device) -> None:
        stream = device.current_stream()
        tensor = device.tensor(device.empty(1000, stream), (2, 3), np.dtype(np.int16))
        assert device.describe(tensor) == ((2, 3), np.dtype(np.int16), True)

    def test_a_stream_waits_for_an_event_of_another(self, device: Device) -> None:
        one, other = device.stream("one"), device.stream("other")
        self.delay(device, one)
        tensor, _staged = self.upload(device, np.arange(8.0), one)
        other.wait(one.record())
        np.testing.assert_array_equal(
            self.download(device, tensor, (8,), np.float64, other), np.arange(8.0)
        )

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
        # The first one may have to look for the time.
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
        # Two clocks may differ by so much.
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
        np.testing.assert_array_equal(
            self.download(device, again, (512,), np.float64, home), np.full(512, 2.0)
        )

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
