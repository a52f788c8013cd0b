"""Rows of arrays and tensors in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import ArrayStore, Feeder, PinnedStore, errors
from pinfeed.memory.pages import huge
from pinfeed.stores import array as array_stores
from pinfeed.stores.array import shares_itself
from pinfeed.testing.suites import StoreTests


class TestArrayStore(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> ArrayStore:
        return ArrayStore(array)


class TestArrayStoreOfARowStride(StoreTests):
    """Rows that are contiguous lie in an array that is not."""

    def make(self, array: np.ndarray, tmp_path: Path) -> ArrayStore:
        return ArrayStore(np.repeat(array, 2, axis=0)[::2])


def test_array_store_shares_memory_with_a_tensor() -> None:
    tensor = torch.zeros(4, 2, dtype=torch.bfloat16)
    store = ArrayStore(tensor)
    store.scatter(np.array([2]), np.ones((1, 2), store.dtype))
    assert tensor[2].tolist() == [1, 1]
    assert tensor[[0, 1, 3]].sum() == 0


def test_array_store_of_a_read_only_array_is_not_writable() -> None:
    array = np.zeros((3, 2))
    array.flags.writeable = False
    assert not ArrayStore(array).writable


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((0, 3)), "no rows"),
        (np.float32(3), "expected a path"),
        (np.array(3.0), "no rows"),
        (np.asfortranarray(np.zeros((4, 3))), "Fortran"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.array([object()]), "never unpickled"),
        (np.zeros(3, [("a", "f4")]), "structured"),
        (np.zeros(3, "M8[s]"), "dates"),
        (np.zeros(3, np.longdouble), "no torch counterpart"),
        (torch.zeros(3).to_sparse(), "dense"),
        (torch.zeros(3, device="meta"), "on meta; expected a tensor with data"),
        ([1, 2, 3], "expected a path"),
    ],
)
def test_array_store_refuses(source: Any, message: str) -> None:
    with pytest.raises(errors.StoreError, match=message):
        ArrayStore(source)


BASE = np.arange(60, dtype=np.float32)


APART = {
    "whole": BASE.reshape(6, 10),
    "every other row": BASE.reshape(6, 10)[::2],
    "every other number": BASE.reshape(6, 10)[:, 1::2],
    "backwards": BASE.reshape(6, 10)[::-1, ::-1],
    "axes exchanged": BASE.reshape(3, 4, 5).transpose(1, 0, 2),
    "one row": np.lib.stride_tricks.as_strided(BASE, (1, 5), (0, 4)),
    "no columns": BASE.reshape(6, 10)[:, :0],
    "a field": np.zeros((4, 2), [("a", "f4"), ("b", "f8")])["b"],
}


SHARING = {
    "windows": np.lib.stride_tricks.as_strided(BASE, (20, 4), (8, 4)),
    "a repeated row": np.lib.stride_tricks.as_strided(BASE, (6, 10), (0, 4)),
    "a repeated number": np.lib.stride_tricks.as_strided(BASE, (6, 10), (4, 0)),
    "half an element": np.lib.stride_tricks.as_strided(BASE, (6,), (2,)),
    "backwards": np.lib.stride_tricks.as_strided(BASE[40:], (6, 4), (-8, -4)),
    "expand": torch.ones(1, 4).expand(6, 4),
    "expand a number": torch.ones(6, 1).expand(6, 4),
    "as_strided": torch.arange(60.0).as_strided((20, 4), (2, 1)),
}


@pytest.mark.parametrize("name", APART)
def test_arrays_with_memory_for_each_element_can_be_written(name: str) -> None:
    array = APART[name].copy(order="K")
    store = ArrayStore(APART[name])
    assert store.writable
    store.scatter(np.arange(len(array)), array)
    np.testing.assert_array_equal(store.array, array)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", SHARING)
def test_arrays_that_overlap_themselves_are_read_and_not_written(name: str, depth: int) -> None:
    source = SHARING[name]
    before = np.array(source.tolist(), np.float32)
    store = ArrayStore(source)
    assert not store.writable
    with pytest.raises(errors.WriteBackError, match="several elements share memory"):
        store.scatter(np.arange(2), np.zeros((2, *store.row_shape), np.float32))
    with Feeder(source, batch_size=4, depth=depth) as feeder:
        np.testing.assert_array_equal(torch.cat(list(feeder)).numpy(force=True), before)
        with pytest.raises(
            errors.WriteBackError,
            match=r"write_back to source: .* several elements share memory, .* give a copy",
        ):
            for batch in feeder.batches():
                batch.write_back(batch.data)
    np.testing.assert_array_equal(source, before)
    np.testing.assert_array_equal(PinnedStore(source, pin=False).array, before)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(-9, 9), min_size=3, max_size=3),
)
@settings(max_examples=300)
def test_no_array_that_shares_memory_with_itself_is_written(
    shape: list[int], strides: list[int]
) -> None:
    numbers = np.arange(200, dtype=np.uint8)
    array = np.lib.stride_tricks.as_strided(numbers[100:], shape, strides[: len(shape)])
    if len(np.unique(array)) < array.size:
        assert shares_itself(array)
    elif array.flags.c_contiguous or array.flags.f_contiguous:
        assert not shares_itself(array)


@pytest.fixture
def scatters_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rows of these tests be scattered past the caches."""
    monkeypatch.setattr(array_stores, "_LARGE_SCATTER_BYTES", 1)
    monkeypatch.setattr(array_stores, "_UNCACHED_BYTES", 1)


def _rows_in_lines() -> np.ndarray:
    array = huge(50 * 128)[: 50 * 128].view(np.float32).reshape(50, 32)
    array[:] = 0
    return array


@pytest.mark.usefixtures("scatters_are_large")
@given(rows=st.lists(st.integers(0, 49)), step=st.sampled_from([1, 2, -1]))
@pytest.mark.parametrize("is_sliced", [False, True])
def test_large_scatters_equal_those_of_numpy(rows: list[int], step: int, is_sliced: bool) -> None:
    array = _rows_in_lines()
    indices = np.array(rows, np.int64) // abs(step)
    values = np.random.default_rng(0).random((len(rows), 32)).astype(np.float32)
    values = values.repeat(2, axis=1)[:, ::2] if is_sliced else values
    expected = array[::step].copy()
    expected[indices] = values
    ArrayStore(array[::step]).scatter(indices, values)
    np.testing.assert_array_equal(array[::step], expected)


@pytest.mark.usefixtures("scatters_are_large", "without_native")
def test_large_scatters_need_no_compiled_functions() -> None:
    array = _rows_in_lines()
    ArrayStore(array).scatter(np.array([7, 3, 7]), np.arange(96, dtype=np.float32).reshape(3, 32))
    np.testing.assert_array_equal(array[[3, 7]], np.arange(32, 96).reshape(2, 32))


@pytest.mark.usefixtures("scatters_are_large")
def test_scattered_values_may_be_rows_of_the_array_itself() -> None:
    array = _rows_in_lines()
    array[:] = np.arange(50)[:, None]
    ArrayStore(array).scatter(np.arange(40)[::-1], array[:40])
    np.testing.assert_array_equal(array[:40, 0], np.arange(40)[::-1])


def test_rows_may_be_gathered_into_the_array_itself() -> None:
    array = np.random.default_rng(0).normal(size=(2000, 128))
    rows = np.random.default_rng(1).permutation(2000)[:1000]
    expected = array[rows]
    ArrayStore(array).gather(rows, array[500:1500])
    np.testing.assert_array_equal(array[500:1500], expected)
