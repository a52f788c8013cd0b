"""RowSource: batches of rows of stores, and the memory that it keeps."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pinfeed import ArrayStore, Feeder
from pinfeed.memory.plan import Allocation
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.readahead.strategy import OpenBatch
from pinfeed.rows.order_batches import OrderBatches
from pinfeed.rows.orders import Rows, Sequential
from pinfeed.rows.windows import Windows
from pinfeed.stores.host_rows import StoreRows, unchecked_gather
from pinfeed.tensors.pytree import flatten


class _ReadAhead:
    """Memory that a batch is read from."""


class _Strategy:
    """Strategy whose batches hold memory of their own."""

    items: tuple[Allocation, ...] = ()
    hint = ""

    def __init__(self, store: ArrayStore) -> None:
        self._store = store
        self.memory: list[weakref.ref[_ReadAhead]] = []

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        yield self._open_batch

    def close(self) -> None:
        pass

    def _open_batch(self, position: int, n: int) -> Callable[[Rows], StoreRows]:
        memory = _ReadAhead()
        self.memory.append(weakref.ref(memory))

        def rows_of_batch(rows: Rows, _: _ReadAhead = memory) -> StoreRows:
            return StoreRows(self._store, rows)

        return rows_of_batch


def test_a_source_keeps_no_memory_of_a_batch_that_was_read() -> None:
    store = ArrayStore(np.arange(12.0))
    strategy = _Strategy(store)
    source = RowSource([store], [strategy], flatten(None)[1], OrderBatches(Sequential(), 12, 4))
    thunks = source.epoch(0, 0, 0, 1)
    for number in range(3):
        thunk = next(thunks)
        assert strategy.memory[number]() is not None
        thunk()
        del thunk
        assert strategy.memory[number]() is None
    assert next(thunks, None) is None


class _Doubled(ArrayStore):
    """Rows with a gather of its own."""

    def gather(self, rows: Rows, out: np.ndarray) -> None:
        super().gather(rows, out)
        out *= 2


def test_a_gather_of_a_subclass_replaces_the_unchecked_one() -> None:
    array = np.arange(12.0)
    store = ArrayStore(array)
    assert unchecked_gather(store) == store.gather_unchecked
    doubled = _Doubled(array)
    assert unchecked_gather(doubled) == doubled.gather
    store.gather = doubled.gather  # type: ignore[method-assign]
    assert unchecked_gather(store) == doubled.gather
    with Feeder((doubled, array), batch_size=4, device="cpu") as feeder:
        assert all(torch.equal(twice, 2 * once) for twice, once in feeder)
