"""The kernel that gathers rows of page-locked tables, alone, by row size, table and order."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from benchmarks.gpu.bench import (
    Bench,
    Samples,
    as_rows,
    expected_rows,
    first_part,
    rate,
    some_of,
    wait,
)
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import PinnedStore
from pinfeed.stores.host_rows import StoreRows, part_nbytes

_ROW_BYTES = (64, 128, 256, 512, 1024, 4096)
_TABLE_BYTES = (2 << 30, 64 << 20, 16 << 30)
_BATCH_BYTES = 16 << 20
_N_SAMPLES = 4
_BLOCKS = (8, 32)
_PAGE_BYTES = 2 << 20
RANDOM, BY_PAGE, SORTED = "random", "sorted by pages of 2 MiB", "sorted"


def rows(run: Run) -> list[Cell]:
    """Return cells of gathers of one batch after the other, on other rows each time.

    Rows shorter than about 1 KiB are limited by the translation of their addresses, so the order
    of the rows and the size of the table matter.
    """
    bench = functools.cache(lambda: Bench(run.device))
    tables = _TABLE_BYTES if run.cuda else (4 << 20, 1 << 20)
    memory = functools.cache(lambda nbytes: bench().words(nbytes))
    batch = _BATCH_BYTES if run.cuda else 64 << 10

    def measure(table_bytes: int, row_nbytes: int, order: str) -> Fields:
        # The smaller table is a part of the first one.
        store = as_rows(first_part(memory(max(table_bytes, tables[0])), table_bytes), row_nbytes)
        return gathered(bench(), store, batch // row_nbytes, order)

    cells = []
    # A call that runs out of time has measured every table and order with some row sizes.
    sizes = sorted(_ROW_BYTES, key=(512, 64, 4096, 128, 1024, 256).index)
    for row_nbytes, table_bytes, order in itertools.product(
        sizes if run.cuda else sizes[:2], tables, (RANDOM, BY_PAGE, SORTED)
    ):
        key = {"row_nbytes": row_nbytes, "table_mib": table_bytes >> 20, "order": order}
        cells.append(Cell(key, functools.partial(measure, table_bytes, row_nbytes, order)))
    return cells


def gathered(bench: Bench, store: PinnedStore, count: int, order: str) -> Fields:
    """Check a gather and a scatter, and return GB/s of gathers by the blocks of the kernel."""
    rng = np.random.default_rng(0)
    samples = [StoreRows(store, drawn(rng, store, count, order)) for _ in range(_N_SAMPLES)]
    bench.use_route(_BLOCKS[0])
    check(bench, samples[0])
    several = Samples(bench, samples)
    found: Fields = {"n_rows": count, "gb_per_s": {}}
    for n_blocks in _BLOCKS:
        bench.use_route(n_blocks)
        seconds = bench.queued_s(several.gather, _N_SAMPLES)
        found["gb_per_s"][n_blocks] = rate(several.nbytes, seconds)
        found["million_rows_per_s"] = round(count / seconds / 1e6, 1)
    return found


def drawn(rng: np.random.Generator, store: PinnedStore, count: int, order: str) -> np.ndarray:
    """Return ``count`` distinct row indices of a store in an order.

    Sorted by pages, the pages of the table are in order, and the rows of a page are not.
    """
    found = rng.choice(store.n_rows, count, replace=False)
    if order == SORTED:
        return np.sort(found)
    if order == BY_PAGE:
        rows_of_a_page = max(1, _PAGE_BYTES * store.n_rows // store.array.nbytes)
        return found[np.argsort(found // rows_of_a_page, kind="stable")]
    return found


def check(bench: Bench, sample: StoreRows) -> None:
    """Gather rows and scatter other values, and restore the table.

    Raises:
        AssertionError: If rows are wrong on the device or in the table.
    """
    into = bench.room(sample)
    bench.gather(sample, into)
    bench.read.record().sync()
    row_nbytes = part_nbytes(sample) // len(sample.rows)
    some = some_of(sample.rows)
    expected = expected_rows(sample.rows[some], row_nbytes)
    for change in (1, -1):
        into += change
        wait(bench.device.name)
        bench.scatter(sample, into)
        bench.write.record().sync()
        if not np.array_equal(sample.store.array[sample.rows[some]], expected + (change == 1)):
            raise AssertionError(
                f"{len(sample.rows)} scattered rows of {row_nbytes} bytes are wrong"
            )
