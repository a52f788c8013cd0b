"""Rows that are gathered from memory maps of files, and the files that are not mapped."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores import gather_at
from support.unwrapped import unwrapped

from benchmarks.conditions import drop
from pinfeed import Config, Feeder, KiB, MiB, NpyStore, errors, rows
from pinfeed.memory.host import resident_bytes
from pinfeed.readahead import resident_file
from pinfeed.readahead.buffers import PageCacheReadahead
from pinfeed.readahead.read_plan import plan_reads
from pinfeed.readahead.resident_file import InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import DirectReads
from pinfeed.stores import page_cache

N, WIDTH = 1000, 32


@pytest.fixture(scope="module")
def array() -> np.ndarray:
    return np.arange(N * WIDTH, dtype=np.float32).reshape(N, WIDTH)


@pytest.fixture
def path(array: np.ndarray, tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", array)
    return tmp_path / "x.npy"


def strategy_of(store: Any, order: Any = None, free: int = MiB(100)) -> type:
    order = rows.shuffled(0) if order is None else order
    [strategy] = plan_reads([store], order, 300, FreeMemory(free, free)).strategies
    strategy.close()
    return type(strategy)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    row_shape=st.sampled_from([(), (3,), (2, 5), (700,)]),
    dtype=st.sampled_from(["<f4", ">f4", "|u1", ">i2"]),
    data=st.data(),
)
def test_rows_of_maps_are_the_rows_of_the_files(
    sizes: list[int],
    row_shape: tuple[int, ...],
    dtype: str,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("maps")
    shards = [
        np.random.default_rng(i).integers(0, 100, (n, *row_shape)).astype(dtype)
        for i, n in enumerate(sizes)
    ]
    for i, shard in enumerate(shards):
        (folder / f"{i}.bin").write_bytes(b"head" + shard.tobytes())
    files = [folder / f"{i}.bin" for i, n in enumerate(sizes) if n]
    whole = np.concatenate(shards).astype(np.dtype(dtype).newbyteorder("="))
    numbers = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=60)), np.int64)
    with NpyStore.raw(files, shape=(-1, *row_shape), dtype=dtype, offset=4) as store:
        mapped = store.map_rows()
        mapped.populate(0, len(whole))
        assert mapped.is_cached(0, len(whole)) in (True, None)
        for wanted in (numbers, np.arange(len(whole)), np.sort(numbers)):
            out = np.empty((len(wanted), *row_shape), whole.dtype)
            mapped.gather(wanted, out)
            np.testing.assert_array_equal(out, whole[wanted])
        places = np.random.default_rng(0).permutation(len(numbers) + 3)[: len(numbers)]
        out = np.zeros((len(numbers) + 3, *row_shape), whole.dtype)
        gather_at(mapped, numbers, out, places)
        np.testing.assert_array_equal(out[places], whole[numbers])
        mapped.close()


def test_rows_are_scattered(path: Path, array: np.ndarray) -> None:
    numbers = np.random.default_rng(0).permutation(N)
    out = np.empty_like(array)
    with NpyStore(path) as store:
        mapped = store.map_rows()
        gather_at(mapped, np.arange(N), out, numbers)
        np.testing.assert_array_equal(out[numbers], array)
        mapped.close()


@pytest.mark.parametrize("order", [rows.sequential(), rows.shuffled(0)], ids=str)
@pytest.mark.parametrize("start", [0, 7])
def test_a_cold_file_is_loaded_from_where_the_loop_is(
    path: Path, array: np.ndarray, order: Any, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_file, "CHUNK_BYTES", KiB(4))
    drop([path])
    with Feeder(path, batch_size=100, rows=order) as feeder:
        feeder.load_state_dict({**feeder.state_dict(), "batch": start})
        numbers = order.bind(N, 0)(np.arange(100 * start, N))
        np.testing.assert_array_equal(np.concatenate([x.numpy() for x in feeder]), array[numbers])
        again = order.bind(N, 1)(np.arange(N))
        np.testing.assert_array_equal(np.concatenate([x.numpy() for x in feeder]), array[again])


@pytest.mark.parametrize("cached", [None, 700])
def test_chunks_are_loaded_from_the_first_that_is_needed(
    path: Path, array: np.ndarray, cached: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache may hold the first chunk of a batch, and not the next one."""
    monkeypatch.setattr(resident_file, "CHUNK_BYTES", 100 * WIDTH * 4)
    monkeypatch.setattr(page_cache.FileMap, "is_cached", lambda _, first, n_rows: first == cached)
    loaded: list[int] = []

    class Noted(MappedFile):
        _readers_load = True

        def _load_all(self) -> None:
            """Leave the loading to the reader."""

        def _load(self, start: int, stop: int) -> None:
            loaded.append(start)
            super()._load(start, stop)

    with NpyStore(path) as store:
        strategy = Noted(store, in_sequence=True)
        with strategy.open_epoch(None, 700, N) as open_batch:
            for position in (750, 850):
                part = open_batch(position, 100)(np.arange(position, position + 100))
                out = np.empty(part.shape, part.dtype)
                part.read(out)
                np.testing.assert_array_equal(out, array[position : position + 100])
            while strategy._load_next():
                pass
        strategy.close()
    assert loaded == [*[700] * (cached is None), 800, 900, *range(0, 700, 100)]


@pytest.mark.parametrize("fault", ["shrunk", "shrunk within a page", "emptied"])
@pytest.mark.parametrize("order", [rows.sequential(), rows.shuffled(0)], ids=str)
def test_a_file_that_shrinks_between_batches_is_an_error(
    path: Path, fault: str, order: Any
) -> None:
    """The size is checked before each gather; the map would end the process or give zeros."""
    size = {"shrunk": 60_000, "shrunk within a page": path.stat().st_size - 1, "emptied": 0}[fault]
    with Feeder(path, batch_size=10, rows=order, depth=0) as feeder:
        loop = iter(feeder)
        next(loop)
        os.truncate(path, size)
        with pytest.raises(errors.ReadError, match="shrunk"):
            list(loop)


def test_a_file_that_shrinks_before_it_is_loaded_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache.FileMap, "is_cached", lambda *_: False)
    for order in (rows.sequential(), rows.shuffled(0), rows.block_shuffled(0, block_rows=500)):
        with Feeder(path, batch_size=10, rows=order) as feeder:
            size = path.stat().st_size
            os.truncate(path, 5000)
            with pytest.raises(errors.ReadError, match="shrunk"):
                list(feeder)
            os.truncate(path, size)


def test_a_file_that_is_replaced_stays_the_old_one(path: Path, array: np.ndarray) -> None:
    with Feeder(path, batch_size=100) as feeder:
        np.save(path.parent / "new.npy", array + 1)
        os.replace(path.parent / "new.npy", path)
        np.testing.assert_array_equal(np.concatenate([x.numpy() for x in feeder]), array)


def test_writes_are_visible_at_once(path: Path, array: np.ndarray) -> None:
    with (
        NpyStore(path, mode="r+") as other,
        Feeder(path, batch_size=100, shuffle=True) as feeder,
    ):
        assert "memory map" in unwrapped(feeder.plan)
        assert sum(float(x.double().sum()) for x in feeder) == array.sum(dtype=float)
        other.scatter(np.arange(N), np.ones((N, WIDTH), np.float32))
        assert sum(float(x.double().sum()) for x in feeder) == N * WIDTH


def test_rows_that_are_written_back_are_read_from_the_map(path: Path, array: np.ndarray) -> None:
    with NpyStore(path, mode="r+") as store, Feeder(store, batch_size=64, shuffle=True) as feeder:
        assert "memory map" in unwrapped(feeder.plan)
        for _ in range(3):
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
    np.testing.assert_array_equal(np.load(path), array + 3)


@pytest.mark.parametrize("advice", [page_cache.POPULATE_READ, 9999])
def test_a_map_is_populated_by_any_kernel(
    path: Path, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel does not know the advice, a byte of each page is read."""
    monkeypatch.setattr(page_cache, "POPULATE_READ", advice)
    drop([path])
    with NpyStore(path) as store:
        mapped = store.map_rows()
        mapped.populate(10, N)
        assert mapped.is_cached(10, N) in (True, None)
        os.truncate(path, 5000)
        with pytest.raises(OSError, match=r"shrunk|x\.npy"):
            mapped.populate(10, N)
        mapped.close()


def test_a_kernel_that_does_not_report_cached_pages(
    path: Path, array: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "can_tell", lambda fd: False)
    with Feeder(path, batch_size=100, shuffle=True) as feeder:
        for epoch in range(3):
            numbers = rows.shuffled(0).bind(N, epoch)(np.arange(N))
            given = np.concatenate([x.numpy() for x in feeder])
            np.testing.assert_array_equal(given, array[numbers])


# ---- the choice ----------------------------------------------------------------------------------


def test_files_that_fit_are_mapped_in_any_order(path: Path) -> None:
    blocks = rows.block_shuffled(0, block_rows=512, window_blocks=2)
    part = rows.per_rank(rows.shuffled(0), rank=0, world_size=8)
    with NpyStore(path) as store, NpyStore(path, mode="r+") as written:
        for order in (rows.sequential(), rows.shuffled(0), blocks, part, [1, 2, 3]):
            assert strategy_of(store, order) is MappedFile
            assert strategy_of(written, order) is MappedFile
            assert strategy_of(store, order, KiB(100)) is not MappedFile, "it does not fit"


def test_few_large_rows_are_not_worth_the_whole_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((16, 1 << 15), np.float32))
    with NpyStore(tmp_path / "x.npy") as store:
        assert strategy_of(store, rows.per_rank(rows.shuffled(0), rank=0, world_size=8)) is (
            DirectReads
        )


def test_files_that_must_not_be_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(NpyStore):
        def gather(self, numbers: np.ndarray, out: np.ndarray) -> None:
            super().gather(numbers, out)
            out *= 2

    with (
        NpyStore(path, memory_map=False) as private,
        NpyStore(path, keep_cache=False) as passing,
        Doubled(path) as doubled,
        NpyStore([path] * 65) as many,
        NpyStore(path) as store,
    ):
        for other in (private, passing, doubled, many):
            assert strategy_of(other, rows.shuffled(0)) is InMemoryCopy
            assert strategy_of(other, rows.sequential()) is DirectReads
        assert strategy_of(private, rows.shuffled(0), KiB(100)) is PageCacheReadahead
        monkeypatch.setattr(page_cache, "_LOCAL", frozenset())
        monkeypatch.setattr(page_cache, "_TMPFS", 0)
        assert strategy_of(store) is InMemoryCopy, "a file system that may be on a network"


def test_a_file_with_holes_in_tmpfs_is_not_mapped() -> None:
    """Reading a hole takes memory, which may not be available."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        np.save(f"{folder}/x.npy", np.ones((1000, 64), np.float32))
        with NpyStore(f"{folder}/x.npy") as store:
            assert strategy_of(store) is MappedFile
        with NpyStore.create(f"{folder}/hole.npy", (1000, 64)) as store:
            assert strategy_of(store) is PageCacheReadahead


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_memory_map_is_true_or_false(path: Path, value: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="memory_map"):
        NpyStore(path, memory_map=value)


def test_the_plan_counts_the_page_cache_separately(path: Path) -> None:
    with Feeder(path, batch_size=100, shuffle=True) as feeder:
        plan = feeder.plan
        assert plan.notes == (
            "x.npy, 125.0 KiB: read through the OS page cache, by a memory map (the file fits)",
        )
        assert plan.page_cache_bytes == N * WIDTH * 4
        assert all(item.place != "page cache" or item.total == 128_000 for item in plan.items)
        assert "OS page cache: 125.0 KiB of mapped files, which the kernel" in unwrapped(plan)
        assert plan.host_bytes == sum(i.total for i in plan.items if i.place == "host")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("mapped") / "large.npy"
    np.save(path, np.ones((MiB(64) // 4096, 1024), np.float32))
    yield path
    path.unlink()


@pytest.mark.parametrize("limit", [None, MiB(40)])
def test_anonymous_memory_holds_the_buffers_and_not_the_file(
    large: Path, limit: int | None
) -> None:
    """A file that is larger than the limit is not mapped either."""
    config = Config(cpu_memory_limit=limit, preferred_batch_size=512)
    with Feeder(large, config=config, shuffle=True, device="cpu") as feeder:
        before = resident_bytes()
        assert sum(len(x) for x in feeder) == MiB(64) // 4096
        after = resident_bytes()
        grown = {kind: (after[kind] or 0) - (before[kind] or 0) for kind in ("anonymous", "file")}
        assert grown["anonymous"] < feeder.plan.host_bytes + MiB(16)
        assert (grown["file"] > MiB(32)) == (limit is None)
