"""Test suites that every Store and every Device must pass.

Subclass a suite in a test file, and override ``make``. The suites need pytest.

    class TestMyStore(StoreTests):
        def make(self, array, tmp_path):
            return MyStore(array)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed.errors import ArgumentError, RowIndexError, WriteBackError
from pinfeed.stores.store import Array, Store
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.device_tests import DeviceTests, sample

__all__ = ["BAD_ROWS", "ROW_SHAPES", "DeviceTests", "ReadOnlyStoreTests", "StoreTests", "sample"]

ROW_SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)]

ANY_ROWS = [[], [0], [49], [3, 4, 5], [5, 4, 3], [10, 11, 40, 41, 42, 12], list(range(50))]
"""Distinct row indices in some orders."""
REPEATED_ROWS = [[0, 2, 4], [7, 7, 7], list(range(49, -1, -1))]
"""Further row indices, which may repeat."""

BAD_ROWS: list[Any] = [[-1], [3, 50], [5000], [2**40], [1.0], [True], [[1]], 3, None, "x"]
"""Row indices that a store of 50 rows refuses."""


def misfits(*shapes: tuple[int, ...]) -> list[Any]:
    """Return zeros that do not fit two float32 rows of shape (6,), also of other shapes."""
    dtypes = ("f8", ">f4", "i4")
    others = ((1, 6), (3, 6), (2, 7), *shapes)
    arrays = [np.zeros((2, 6), dtype) for dtype in dtypes]
    return [*arrays, *(np.zeros(shape, "f4") for shape in others), [[0.0] * 6] * 2, None]


def _id(value: Any) -> str:
    return f"{type(value).__name__}{getattr(value, 'shape', '')}{getattr(value, 'dtype', '')}"


class ReadOnlyStoreTests:
    """Test suite that every store must pass, including read-only stores.

    Examples:
        >>> from pinfeed.testing.suites import ReadOnlyStoreTests
        >>> class TestReadOnlyArray(ReadOnlyStoreTests):  # pytest collects and runs it
        ...     def make(self, array, tmp_path):
        ...         array.flags.writeable = False
        ...         return pinfeed.ArrayStore(array)
    """

    row_shapes: Sequence[tuple[int, ...]] = ROW_SHAPES
    """Row shapes that the suite tests; a subclass may list fewer."""

    def make(self, array: Array, tmp_path: Path) -> Store:
        """Return a new store with the rows of ``array``."""
        raise NotImplementedError

    @pytest.fixture(params=sorted(DTYPES))
    def dtype(self, request: pytest.FixtureRequest) -> np.dtype[Any]:
        return DTYPES[request.param]

    @pytest.fixture
    def rows(self, tmp_path: Path) -> Iterator[tuple[Array, Store]]:
        """Return some rows and a store of them, which is closed at the end."""
        array = sample(50, (6,), np.dtype(np.float32))
        store = self.make(array.copy(), tmp_path)
        yield array, store
        store.close()

    def test_what_it_says_of_itself(self, rows: tuple[Array, Store]) -> None:
        _, store = rows
        assert isinstance(store, Store)
        assert (store.n_rows, store.row_shape, store.dtype) == (50, (6,), np.dtype(np.float32))
        assert store.resident_bytes >= 0

    def test_gather_of_every_dtype_and_rank(self, dtype: np.dtype[Any], tmp_path: Path) -> None:
        wanted = np.array([12, 0, 5, 5, 1])
        for array, store in self._of_every_rank(dtype, tmp_path):
            out = np.empty((5, *store.row_shape), dtype)
            store.gather(wanted, out)
            np.testing.assert_array_equal(out, array[wanted])

    @pytest.mark.parametrize("wanted", [*ANY_ROWS, *REPEATED_ROWS], ids=str)
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
            *misfits((2, 3, 2), (12,)),
            np.zeros((6, 2), np.float32).T,
            np.broadcast_to(np.zeros(6, np.float32), (2, 6)),
            np.frombuffer(bytes(48), np.float32).reshape(2, 6),
        ],
        ids=_id,
    )
    def test_gather_refuses_an_array_that_does_not_fit(
        self, rows: tuple[Array, Store], out: Any
    ) -> None:
        with pytest.raises(ArgumentError):
            rows[1].gather(np.array([3, 1]), out)
        assert out is None or not np.any(out)

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

    def _of_every_rank(self, dtype: np.dtype[Any], tmp_path: Path) -> Iterator[tuple[Array, Store]]:
        """Yield 13 rows of every shape, each with a store of them, which is closed afterwards."""
        for i, row_shape in enumerate(self.row_shapes):
            folder = tmp_path / str(i)
            folder.mkdir()
            array = sample(13, row_shape, dtype)
            store = self.make(array.copy(), folder)
            assert store.row_shape == row_shape
            yield array, store
            store.close()


class StoreTests(ReadOnlyStoreTests):
    """Test suite that every writable store must pass.

    Examples:
        >>> from pinfeed.testing.suites import StoreTests
        >>> class TestArrayStore(StoreTests):  # pytest collects and runs it
        ...     def make(self, array, tmp_path):
        ...         return pinfeed.ArrayStore(array)
    """

    def contents(self, store: Store) -> Array:
        """Return all rows; override it to read the rows without the store, if possible."""
        out = np.empty((store.n_rows, *store.row_shape), store.dtype)
        store.gather(np.arange(store.n_rows), out)
        return out

    def test_it_is_writable(self, rows: tuple[Array, Store]) -> None:
        assert rows[1].writable

    def test_scatter_of_every_dtype_and_rank(self, dtype: np.dtype[Any], tmp_path: Path) -> None:
        wanted = np.array([12, 0, 5, 6])
        for array, store in self._of_every_rank(dtype, tmp_path):
            values = sample(40, store.row_shape, dtype)[-4:]
            array[wanted] = values
            store.scatter(wanted, values)
            store.flush()
            np.testing.assert_array_equal(self.contents(store), array)

    @pytest.mark.parametrize("wanted", ANY_ROWS, ids=str)
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

    @pytest.mark.parametrize("values", [*misfits((2, 1), (6,)), 1.0], ids=_id)
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
        """Rows that are not written keep their values; the others have the last values written."""
        array, store = rows
        written, others = np.arange(0, 50, 2), np.arange(1, 50, 2)

        def write() -> None:
            for value in range(100):
                store.scatter(written, np.full((25, 6), value, np.float32))

        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(write)
            out = np.empty((25, 6), np.float32)
            for _ in range(100):
                store.gather(others, out)
                np.testing.assert_array_equal(out, array[others])
            writing.result()
        array[written] = 99
        np.testing.assert_array_equal(self.contents(store), array)
