"""Read strategies: each gives the same rows, whenever the loop ends; the choice of a strategy."""

import itertools
import mmap
import os
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.unwrapped import unwrapped

from pinfeed import Config, Feeder, KiB, MiB, NpyStore, errors, rows
from pinfeed.memory.host import FreeHostMemory
from pinfeed.readahead import buffers, resident_file
from pinfeed.readahead.buffers import BufferedReadahead, PageCacheReadahead
from pinfeed.readahead.read_plan import plan_reads
from pinfeed.readahead.resident_file import InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import DirectReads, ReadStrategy
from pinfeed.rows import orders
from pinfeed.rows.order_batches import OrderBatches
from pinfeed.rows.orders import Order, known
from pinfeed.rows.runs import Runs
from pinfeed.stores import page_cache as disk_page_cache
from pinfeed.stores.host_rows import StoreRows

N, WIDTH = 5000, 64
# Rows of a block of 64 KiB, which is worth a seek.
BLOCK = 256


@pytest.fixture(scope="module")
def array() -> np.ndarray:
    return np.arange(N * WIDTH, dtype=np.float32).reshape(N, WIDTH)


@pytest.fixture(scope="module")
def path(array: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("readahead") / "x.npy"
    np.save(found, array)
    return found


@pytest.fixture
def store(path: Path) -> Iterator[NpyStore]:
    with NpyStore(path) as found:
        yield found


def read(part: Any) -> np.ndarray:
    out = np.full(part.shape, np.nan, part.dtype)
    part.read(out)
    return out


def served(
    strategy: ReadStrategy, order: Order, *, batch_size: int, epoch: int = 0, start: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield row indices and rows of an epoch, each batch two batches late, as a feeder reads."""
    batches = OrderBatches(order, N, batch_size)
    windows, position, stop = batches.windows(epoch, start)
    with strategy.open_epoch(windows, position, stop) as open_batch:
        waiting: list[tuple[np.ndarray, Any]] = []
        for draw in batches.epoch(epoch, start):
            part = open_batch(position, draw.n_rows)
            position += draw.n_rows
            numbers = draw.rows()
            waiting.append((numbers, part(numbers)))
            if len(waiting) == 3:
                first, late = waiting.pop(0)
                yield first, read(late)
        for numbers, late in waiting:
            yield numbers, read(late)


BLOCKS = rows.block_shuffled(3, block_rows=BLOCK, window_blocks=3)
MIXED = rows.mixed(
    {"blocks": 3000, "small": 500, "rows": 1500},
    weights={"blocks": 2, "small": 1, "rows": 1},
    until="all",
    order={"blocks": BLOCKS, "small": BLOCKS, "rows": rows.shuffled(1)},
)
ORDERS = [
    rows.sequential(),
    rows.shuffled(3),
    BLOCKS,
    rows.per_rank(BLOCKS, rank=2, world_size=3),
    rows.bucketed(np.arange(N) % 97, batch_size=50, window_batches=7, order=BLOCKS),
    MIXED,
    rows.per_rank(MIXED, rank=1, world_size=2),
    rows.split([0.7, 0.3], order=BLOCKS, block_rows=BLOCK)[0],
]


def strategies(store: NpyStore, order: Order) -> Iterator[ReadStrategy]:
    yield DirectReads(store)
    yield InMemoryCopy(store)
    yield MappedFile(store, in_sequence=order == rows.sequential())
    yield PageCacheReadahead(store)
    windows = known(order).windows(N, 0)
    if windows is not None:
        yield BufferedReadahead(store, windows, 1000)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("batch_size", [7, 100, 700, 3000])
def test_every_strategy_gives_the_rows(
    store: NpyStore,
    array: np.ndarray,
    order: Order,
    batch_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resident_file, "CHUNK_BYTES", KiB(20))
    monkeypatch.setattr(buffers, "_ADVISED_BYTES", KiB(20))
    for strategy in strategies(store, order):
        for epoch, start in ((0, 0), (1, 0), (2, 1)):
            for numbers, values in served(
                strategy, order, batch_size=batch_size, epoch=epoch, start=start
            ):
                np.testing.assert_array_equal(values, array[numbers])
        strategy.close()


def test_no_window_stays_in_memory_after_an_epoch(store: NpyStore) -> None:
    windows = known(BLOCKS).windows(N, 0)
    assert windows is not None
    strategy = BufferedReadahead(store, windows, 1000)
    for _ in served(strategy, BLOCKS, batch_size=100):
        assert strategy._live
    assert not strategy._live
    strategy.close()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_nothing_runs_after_an_epoch_that_is_left(
    store: NpyStore, array: np.ndarray, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture nothing_left checks threads; rows that were loaded stay for the next epoch."""
    monkeypatch.setattr(resident_file, "CHUNK_BYTES", KiB(4))
    for strategy in strategies(store, order):
        for epoch in range(3):
            for numbers, values in itertools.islice(
                served(strategy, order, batch_size=64, epoch=epoch), 3
            ):
                np.testing.assert_array_equal(values, array[numbers])
        for numbers, values in served(strategy, order, batch_size=64, epoch=3):
            np.testing.assert_array_equal(values, array[numbers])
        strategy.close()


class Slow(NpyStore):
    """Rows whose reads wait until the test allows them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_read = threading.Event()
        self.read_directly = 0

    def gather_runs(self, runs: Runs, out: np.ndarray) -> None:
        if threading.current_thread().name.startswith("pinfeed"):
            self.may_read.wait()
        else:
            self.read_directly += runs.n_rows
        super().gather_runs(runs, out)


def test_the_last_batches_keep_their_window_at_the_datas_end(
    path: Path, array: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several readers, one finds the end while others still wait for rows."""
    monkeypatch.setattr(buffers, "_N_THREADS", 1)
    windows, numbers = (
        known(rows.block_shuffled(0, block_rows=BLOCK, window_blocks=20)).windows(N, 0),
        np.arange(N),
    )
    assert windows is not None
    with Slow(path) as store:
        strategy = BufferedReadahead(store, windows, N)
        with strategy.open_epoch(windows, 0, N) as open_batch:
            part = open_batch(0, N)(numbers)
            store.may_read.set()
        np.testing.assert_array_equal(read(part), array)
        strategy.close()


def test_rows_that_are_not_loaded_yet_are_read_one_by_one(
    path: Path, array: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_file, "_REST_BYTES", 0)
    monkeypatch.setattr(resident_file, "CHUNK_BYTES", KiB(64))
    with Slow(path) as store:
        strategy = InMemoryCopy(store)
        numbers = np.array([4999, 0, 17, 17])
        with strategy.open_epoch(None, 0, N) as open_batch:
            try:
                np.testing.assert_array_equal(read(open_batch(0, 4)(numbers)), array[numbers])
                assert store.read_directly == 4
            finally:
                store.may_read.set()
        for numbers, values in served(strategy, rows.shuffled(0), batch_size=500):
            np.testing.assert_array_equal(values, array[numbers])
        strategy.close()


def test_a_file_that_was_written_is_loaded_again(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    with (
        NpyStore(tmp_path / "x.npy", memory_map=False) as store,
        Feeder(store, batch_size=1000, shuffle=True) as feeder,
        NpyStore(tmp_path / "x.npy", mode="r+") as other,
    ):
        assert "loaded into RAM" in unwrapped(feeder.plan)
        assert sum(float(x.double().sum()) for x in feeder) == array.sum(dtype=float)
        other.scatter(np.arange(N), np.ones((N, WIDTH), np.float32))
        assert sum(float(x.double().sum()) for x in feeder) == N * WIDTH


def test_an_error_of_a_read_is_raised_with_the_batch_it_is_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(NpyStore):
        def gather_runs(self, runs: Runs, out: np.ndarray) -> None:
            raise errors.ReadError("a bad sector")

    for order in (rows.shuffled(0), rows.block_shuffled(0, block_rows=BLOCK)):
        with Broken(path) as store, Feeder(store, rows=order, batch_size=100) as feeder:
            assert "loaded into RAM" in unwrapped(feeder.plan)
            with pytest.raises(errors.ReadError, match="bad sector"):
                list(feeder)


def test_an_error_in_a_window_is_raised_with_its_batch(path: Path, array: np.ndarray) -> None:
    class Broken(NpyStore):
        def gather(self, numbers: np.ndarray, out: np.ndarray) -> None:
            if 4321 in numbers:
                raise errors.ReadError("a bad sector")
            super().gather(numbers, out)

    order = rows.block_shuffled(0, block_rows=BLOCK, window_blocks=2)
    windows = known(order).windows(N, 0)
    assert windows is not None
    bad = 0
    for window in windows.needed(0, N):
        if any(start <= 4321 < stop for start, stop in window.runs):
            bad = window.begin // 64
    assert bad > 0
    with Broken(path) as store:
        strategy, given = BufferedReadahead(store, windows, 300), 0
        with pytest.raises(errors.ReadError, match="bad sector"):
            for numbers, values in served(strategy, order, batch_size=64):
                np.testing.assert_array_equal(values, array[numbers])
                given += 1
        assert given == bad
        strategy.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limit_kib=st.integers(3200, 6000),
    batch=st.integers(1, 300),
    order=st.sampled_from(ORDERS),
    depth=st.integers(0, 3),
    mode=st.sampled_from(["r", "r+"]),
)
def test_a_feeder_gives_the_rows_at_any_limit(
    path: Path, array: np.ndarray, limit_kib: int, batch: int, order: Order, depth: int, mode: str
) -> None:
    config = Config(cpu_memory_limit=KiB(limit_kib), preferred_batch_size=batch, depth=depth)
    with NpyStore(path, mode=mode) as store:
        try:
            feeder = Feeder(store, config=config, rows=order, device="cpu")
        except errors.BudgetError:
            return
        with feeder:
            assert feeder.plan.host_bytes <= KiB(limit_kib)
            expected = [
                draw.rows() for draw in OrderBatches(order, N, feeder.plan.batch_size).epoch(0)
            ]
            for numbers, x in zip(expected, feeder, strict=True):
                np.testing.assert_array_equal(x.numpy(), array[numbers])


# ---- the choice ----------------------------------------------------------------------------------


def test_a_file_is_read_otherwise_if_the_system_refuses_memory(tmp_path: Path) -> None:
    """The memory is free by all that pinfeed measures, but a limit of the process refuses it."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = psutil.Process().memory_info().vms
    with NpyStore.create(tmp_path / "x.npy", (1 << 20, 64)) as made:
        nbytes = made.n_rows * made.row_nbytes
    with NpyStore(tmp_path / "x.npy", keep_cache=True) as store:
        resource.setrlimit(resource.RLIMIT_AS, (taken + nbytes // 2, limits[1]))
        try:
            choice = plan_reads([store], rows.shuffled(0), 300, FreeMemory(4 * nbytes, 4 * nbytes))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
    assert [type(strategy) for strategy in choice.strategies] == [PageCacheReadahead]


def chosen(store: Any, order: Any, free: int, n_batch_rows: int = 300) -> tuple[type, str]:
    choice = plan_reads([store], order, n_batch_rows, FreeMemory(free, free))
    [strategy], [note] = choice.strategies, choice.notes
    strategy.close()
    assert sum(item.total for item in choice.items) <= max(0, free)
    return type(strategy), note


def test_the_strategy_is_chosen_from_size_order_limit_and_share(path: Path) -> None:
    blocks = rows.block_shuffled(0, block_rows=BLOCK, window_blocks=2)
    with (
        NpyStore(path, memory_map=False) as store,
        NpyStore(path, mode="r+", memory_map=False) as written,
        NpyStore(path, keep_cache=False) as passing,
    ):
        assert chosen(store, rows.sequential(), MiB(100)) == (
            DirectReads,
            "x.npy, 1.2 MiB: read in sequence",
        )
        assert chosen(store, rows.shuffled(0), MiB(100))[0] is InMemoryCopy
        assert chosen(store, blocks, MiB(100))[0] is InMemoryCopy
        assert chosen(store, [1, 2, 3], MiB(100))[0] is InMemoryCopy, "a sampler's rows may be any"
        assert chosen(store, rows.shuffled(0), MiB(1))[0] is PageCacheReadahead
        assert chosen(passing, rows.shuffled(0), MiB(1))[0] is DirectReads, (
            "pages that are not kept need not be loaded"
        )
        assert chosen(store, blocks, MiB(1))[0] is BufferedReadahead
        assert chosen(store, blocks, KiB(100))[0] is PageCacheReadahead
        assert chosen(written, rows.shuffled(0), MiB(100))[0] is PageCacheReadahead, (
            "a copy in memory would miss later writes"
        )
        assert chosen(written, blocks, MiB(100))[0] is PageCacheReadahead
        assert (
            chosen(store, rows.per_rank(rows.shuffled(0), rank=0, world_size=2), MiB(100))[0]
            is PageCacheReadahead
        ), "half of its rows is not most"
        assert (
            chosen(store, rows.block_shuffled(0, block_rows=2), MiB(1))[0] is PageCacheReadahead
        ), "blocks that are not worth a seek"


def test_arrays_need_no_strategy(array: np.ndarray) -> None:
    choice = plan_reads([], rows.shuffled(0), 10, FreeMemory(0, 0))
    assert (list(choice.strategies), choice.notes, choice.items) == ([], (), ())
    with Feeder(array, batch_size=10, shuffle=True) as feeder:
        assert feeder.plan.notes == ()


def test_the_plan_says_what_was_chosen_and_counts_it(path: Path) -> None:
    with (
        NpyStore(path, memory_map=False) as store,
        Feeder(store, batch_size=100, shuffle=True) as feeder,
    ):
        assert feeder.plan.notes == (
            "x.npy, 1.2 MiB: loaded into RAM during the first epoch (it fits in the free memory)",
        )
        assert feeder.plan.notes[0] in unwrapped(feeder.plan)
        assert any(
            item.what == "rows of a file" and item.total >= N * WIDTH * 4
            for item in feeder.plan.items
        )


def test_a_file_that_passes_the_page_cache_is_not_counted(path: Path, tmp_path: Path) -> None:
    """The plan with a limit counts the file that is mapped, and says what it does not count."""
    np.save(tmp_path / "y.npy", np.arange(N))
    config = Config(cpu_memory_limit=KiB(4000), preferred_batch_size=16, depth=2)
    with Feeder((path, tmp_path / "y.npy"), shuffle=True, config=config, device="cpu") as feeder:
        x, y = feeder.plan.notes
        assert feeder.plan.page_cache_bytes == 8 * N
        said = unwrapped(feeder.plan)
    assert "x.npy, 1.2 MiB: read through the OS page cache, which the plan does not count" in x
    assert "y.npy, 39.1 KiB: read through the OS page cache, by a memory map" in y
    assert "OS page cache: 39.1 KiB of mapped files, which the kernel may drop" in said


def test_processes_on_one_machine_share_free_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process counts a part of the free memory and the whole page cache."""
    free = FreeHostMemory(MiB(20), MiB(20))
    monkeypatch.setattr("pinfeed.pipeline.planner.free_host_memory", lambda: free)

    def notes(*, memory_map: bool) -> str:
        with (
            NpyStore(path, memory_map=memory_map) as store,
            Feeder(store, batch_size=100, shuffle=True) as feeder,
        ):
            return "".join(feeder.plan.notes)

    assert "loaded into RAM" in notes(memory_map=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert "prefetched sequentially" in notes(memory_map=False)
    assert "memory map" in notes(memory_map=True)


def test_the_plan_says_why_a_file_is_not_mapped(path: Path) -> None:
    def note(order: Any, nbytes: int) -> str:
        limit = Config(cpu_memory_limit=nbytes, preferred_batch_size=100)
        with Feeder(path, rows=order, config=limit, device="cpu") as feeder:
            return feeder.plan.notes[-1]

    why = " (the file does not fit in cpu_memory_limit)"
    assert note(rows.sequential(), MiB(4)).endswith(f"read in sequence{why}")
    assert f"in the background{why}; a block_shuffled order" in note(rows.shuffled(), MiB(4))
    assert note(rows.shuffled(), MiB(60)).endswith("(the file fits)")


def test_the_plan_counts_windows(path: Path) -> None:
    """A config without a batch size takes the largest batch that fits with the windows."""
    order = rows.block_shuffled(0, block_rows=BLOCK, window_blocks=1)
    with Feeder(path, config=Config(cpu_memory_limit=MiB(4.5)), rows=order, device="cpu") as feeder:
        assert feeder.plan.host_bytes <= MiB(4.5)
        assert any(item.what == "read-ahead buffers" for item in feeder.plan.items), str(
            feeder.plan
        )


def test_a_part_of_rows_on_windows(store: NpyStore, array: np.ndarray) -> None:
    order = ORDERS[2]
    windows = known(order).windows(N, 0)
    assert windows is not None
    numbers = order.bind(N, 0)(np.arange(2000))
    strategy = BufferedReadahead(store, windows, 3000)
    with strategy.open_epoch(windows, 0, N) as open_batch:
        part = open_batch(0, 2000)(numbers)
        for begin, end in ((0, 2000), (0, 1), (700, 800), (760, 1600), (1999, 2000)):
            np.testing.assert_array_equal(read(part.cut(begin, end)), array[numbers[begin:end]])
    strategy.close()


def test_parts_of_a_store_are_gathered_in_steps(array: np.ndarray, store: NpyStore) -> None:
    part = StoreRows(store, np.arange(20) * 3)
    np.testing.assert_array_equal(read(part), array[:60:3])


# ---- the page cache ------------------------------------------------------------------------------


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("cache") / "large.npy"
    np.save(found, np.arange(MiB(96) // 4, dtype=np.float32).reshape(-1, 1024))
    return found


@dataclass
class Dropped:
    """Ranges [begin, end) in bytes that the kernel was asked to drop from the page cache."""

    ranges: list[tuple[int, int]]

    def pages(self, size: int) -> np.ndarray:
        """Return which pages of a file of ``size`` bytes were dropped."""
        found = np.zeros(-(-size // mmap.PAGESIZE), bool)
        for begin, end in self.ranges:
            found[begin // mmap.PAGESIZE : -(-min(end, size) // mmap.PAGESIZE)] = True
        return found


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Dropped:
    """Record which pages are dropped, because the kernel may drop pages at any time."""
    found, advise = Dropped([]), os.posix_fadvise

    def noted(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            found.ranges.append((offset, offset + length if length else sys.maxsize))
        advise(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    return found


@pytest.mark.parametrize("was_there", ["nothing", "half", "all"])
@pytest.mark.parametrize(
    "order", [rows.sequential(), rows.shuffled(0), rows.block_shuffled(0, block_rows=64)], ids=str
)
def test_the_page_cache_is_left_as_it_was_found(
    large: Path, order: Order, was_there: str, dropped: Dropped, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = large.stat().st_size
    there = np.zeros(-(-size // mmap.PAGESIZE), bool)
    there[{"nothing": slice(0), "half": slice(len(there) // 2), "all": slice(None)}[was_there]] = (
        True
    )
    monkeypatch.setattr(
        disk_page_cache,
        "cached_pages",
        lambda fd, begin, end: there[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)],
    )
    config = Config(cpu_memory_limit=MiB(40), preferred_batch_size=512)
    with (
        NpyStore(large, keep_cache=False) as store,
        Feeder(store, config=config, rows=order) as feeder,
    ):
        assert sum(float(x.double().sum()) for x in feeder) == float(
            np.arange(MiB(96) // 4, dtype=np.float32).sum(dtype=float)
        )
        while_it_was_read = dropped.pages(size).mean()
    assert not (dropped.pages(size) & there).any(), "pages that others have loaded stay"
    steps = dropped.pages(size) | there
    assert steps[: len(there) // 2 - 256].all(), "other pages are dropped if they can be told apart"
    assert steps[len(there) // 2 + 256 :].all()
    if was_there == "nothing" and not isinstance(order, orders.Shuffled):
        # Random reads count for a sweep only if the rows were not in the page cache, which depends
        # on the kernel.
        assert while_it_was_read > 0.3, "in sweeps, before the file is closed"


def test_cached_pages_are_found(large: Path) -> None:
    """The kernel may drop pages in between, but not all of those that were read just now.

    It does not load pages that were not requested.
    """
    drop(large)
    with large.open("rb") as file:
        file.seek(MiB(8))
        file.read(MiB(4))
        pages = disk_page_cache.cached_pages(file.fileno(), 0, large.stat().st_size)
    assert len(pages) == -(-large.stat().st_size // mmap.PAGESIZE)
    assert pages[MiB(8) // mmap.PAGESIZE : MiB(12) // mmap.PAGESIZE].any()


def test_the_page_cache_is_kept_where_the_file_fits(large: Path, dropped: Dropped) -> None:
    with Feeder(large, batch_size=512) as feeder:
        for _ in feeder:
            pass
    assert not dropped.ranges


def test_cold_rows_are_read_many_at_a_time(large: Path) -> None:
    """Rows that are not in the page cache equal those that are."""
    drop(large)
    numbers = np.random.default_rng(0).permutation(MiB(96) // 4096)[:3000]
    with NpyStore(large) as store:
        out = np.empty((3000, 1024), np.float32)
        store.gather(numbers, out)
        np.testing.assert_array_equal(out[:, 0], numbers * 1024)
        again = np.empty_like(out)
        store.gather(numbers, again)
        np.testing.assert_array_equal(out, again)
