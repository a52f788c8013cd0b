"""Copies of long rows in one call of the driver, with a driver that copies host memory."""

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.copy_driver import STREAM, CopyDriver

from pinfeed.devices import batch_copy
from pinfeed.devices.batch_copy import BatchCopy, CopyAttributes, addresses
from pinfeed.devices.kernels import Move


def test_the_attributes_are_as_large_as_those_of_the_driver() -> None:
    assert ctypes.sizeof(CopyAttributes) == 24
    assert CopyAttributes.flags.offset == 20


def move(copier: BatchCopy, rows: np.ndarray, moves: list[Move], *, gather: bool) -> None:
    for one in moves:
        for table, packed in addresses(rows, one):
            sources, targets = (table, packed) if gather else (packed, table)
            copier.copy(STREAM, sources, targets, one.row_nbytes)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    chosen=st.lists(st.integers(0, 39), max_size=60),
    most=st.sampled_from([1, 7, 1024]),
)
def test_rows_are_gathered_and_scattered(sizes: list[int], chosen: list[int], most: int) -> None:
    rng = np.random.default_rng(len(chosen))
    tables = [rng.integers(256, size=(40, size), dtype=np.uint8) for size in sizes]
    wanted = [table.copy() for table in tables]
    rows = np.array(chosen, np.int64)
    packed = [np.zeros((len(rows), size), np.uint8) for size in sizes]
    moves = [
        Move(table.ctypes.data, there.ctypes.data, table.shape[1])
        for table, there in zip(tables, packed, strict=True)
    ]
    driver = CopyDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_copy, "MOST_COPIES", most)
        move(driver.copier, rows, moves, gather=True)
        assert driver.counts == [
            min(most, len(rows) - first) for _ in sizes for first in range(0, len(rows), most)
        ]
        for table, old, there in zip(tables, wanted, packed, strict=True):
            np.testing.assert_array_equal(there, old[rows])
            np.testing.assert_array_equal(table, old)
            there[...] = rng.integers(256, size=there.shape, dtype=np.uint8)
        # Rows that are written are distinct.
        distinct = rng.permutation(40)[: len(rows)]
        again = [there[: len(distinct)] for there in packed]
        move(driver.copier, distinct, moves, gather=False)
    for table, old, there in zip(tables, wanted, again, strict=True):
        old[distinct] = there
        np.testing.assert_array_equal(table, old)


def test_copies_that_the_driver_refuses() -> None:
    table = np.zeros((3, 4))
    copier = CopyDriver(code=1).copier
    row = np.array([table.ctypes.data])
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with CUDA error 1"):
        copier.copy(STREAM, row, row, table[0].nbytes)


def test_a_machine_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    this_process = ctypes.CDLL(None)

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    for library in (missing, lambda name: this_process):
        batch_copy.batch_copy.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert batch_copy.batch_copy() is None
    batch_copy.batch_copy.cache_clear()
