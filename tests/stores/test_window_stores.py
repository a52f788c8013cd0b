"""Rows that are windows of consecutive items of flat files."""

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from support.stores import gather_at, gathered, mapped_windows, saved
from support.unwrapped import unwrapped

from pinfeed import Config, Feeder, KiB, MiB, NpyStore, StoreError, errors, rows
from pinfeed.errors import UnknownArgument
from pinfeed.native.library import library
from pinfeed.readahead.buffers import BufferedReadahead, PageCacheReadahead
from pinfeed.readahead.read_plan import AxisWindowReads, plan_reads
from pinfeed.readahead.resident_file import InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import DirectReads
from pinfeed.stores.host_rows import memory_rows_of
from pinfeed.stores.window_store import WindowStore
from pinfeed.testing.suites import ROW_SHAPES, ReadOnlyStoreTests


class TestWindowsThatTouch(ReadOnlyStoreTests):
    # A window has an axis of items.
    row_shapes = tuple(shape for shape in ROW_SHAPES if shape)
    step_more = 0

    def make(self, array: np.ndarray, tmp_path: Path) -> WindowStore:
        n, length = array.shape[:2]
        step = length + self.step_more
        series = np.zeros((n, step, *array.shape[2:]), array.dtype)
        series[:, self.step_more :] = array
        np.save(tmp_path / "x.npy", series.reshape(n * step, *array.shape[2:]))
        return NpyStore.windows(
            tmp_path / "x.npy", length=length, step=step, start=self.step_more, dtype=array.dtype
        )


class TestWindowsWithLongGaps(TestWindowsThatTouch):
    # Without a page between them, so that the rows of a run are read one by one.
    step_more = 5000


def windows_of(series: np.ndarray, length: int, step: int, start: int, span: int) -> np.ndarray:
    """Return all windows of one file, shape (n, length, *item_shape), by numpy alone."""
    first = range(0, len(series) - span + 1, step)
    found = [series[i + start : i + start + length] for i in first]
    return np.array(found, series.dtype).reshape(len(first), length, *series.shape[1:])


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    item_shape=st.sampled_from([(), (3,), (2, 5)]),
    dtype=st.sampled_from(["<f4", ">f4", "|u1", ">i2"]),
    length=st.integers(1, 12),
    step=st.integers(1, 15),
    start=st.integers(0, 6),
    more=st.integers(0, 6),
    data=st.data(),
)
def test_windows_are_those_of_the_files(
    sizes: list[int],
    item_shape: tuple[int, ...],
    dtype: str,
    length: int,
    step: int,
    start: int,
    more: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    span = start + length + more
    folder = tmp_path_factory.mktemp("windows")
    native = np.dtype(dtype).newbyteorder("=")
    shards = []
    for i, n in enumerate(sizes):
        shard = np.random.default_rng(i).integers(0, 100, (n, *item_shape)).astype(dtype)
        saved(folder / f"{i}.npy", shard)
        shards.append(windows_of(shard.astype(native), length, step, start, span))
    whole = np.concatenate(shards)
    files = [folder / f"{i}.npy" for i in range(len(sizes))]
    if not len(whole):
        with pytest.raises(errors.StoreError, match="expected at least"):
            NpyStore.windows(files, length=length, step=step, start=start, span=span)
        return
    numbers = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=60)), np.int64)
    places = np.random.default_rng(0).permutation(len(numbers) + 3)[: len(numbers)]
    with NpyStore.windows(files, length=length, step=step, start=start, span=span) as store:
        assert store.n_rows == len(whole)
        mapped = mapped_windows(store)
        memory_rows = store.memory_rows_in(memory_rows_of(mapped.items))
        assert (memory_rows is None) == (library() is None or dtype.startswith(">"))
        for source in (store, mapped):
            for wanted in (numbers, np.arange(len(whole)), np.sort(numbers)):
                np.testing.assert_array_equal(gathered(source, wanted), whole[wanted])
                if memory_rows is not None:
                    found = np.empty((len(wanted), *store.row_shape), native)
                    memory_rows.gather(wanted, found)
                    np.testing.assert_array_equal(found, whole[wanted])
            out = np.zeros((len(numbers) + 3, *store.row_shape), native)
            gather_at(source, numbers, out, places)
            np.testing.assert_array_equal(out[places], whole[numbers])
        mapped.close()


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50_000, 6000).astype(np.uint16)


@pytest.fixture
def path(tokens: np.ndarray, tmp_path: Path) -> Path:
    tokens.tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


@pytest.mark.parametrize("step", [1, 5, 33, 40])
@pytest.mark.parametrize("offset", [0, 6])
def test_a_file_without_a_header(path: Path, tokens: np.ndarray, step: int, offset: int) -> None:
    expected = sliding_window_view(tokens[offset // 2 :], 33)[::step]
    with NpyStore.windows(path, length=33, step=step, dtype="uint16", offset=offset) as store:
        assert (store.n_rows, store.row_shape, store.dtype) == (len(expected), (33,), np.uint16)
        assert not store.writable
        np.testing.assert_array_equal(gathered(store, np.arange(len(expected))), expected)


def test_windows_are_copied_in_any_order(path: Path, tokens: np.ndarray) -> None:
    expected = sliding_window_view(tokens, 33)
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, len(expected), 300)
    places = rng.permutation(310)[:300]
    with NpyStore.windows(path, length=33, dtype="uint16") as store:
        mapped = mapped_windows(store)
        np.testing.assert_array_equal(gathered(mapped, wanted), expected[wanted])
        out = np.zeros((310, 33), np.uint16)
        gather_at(mapped, wanted, out, places)
        np.testing.assert_array_equal(out[places], expected[wanted])
        assert not np.delete(out, places, axis=0).any()
        mapped.close()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize(
    "order",
    [
        rows.sequential(),
        rows.shuffled(1),
        rows.block_shuffled(1, block_rows=100),
        rows.drawn(700, seed=1),
    ],
    ids=str,
)
def test_a_feeder_gives_the_windows_at_any_depth(
    path: Path, tokens: np.ndarray, order: Any, memory_map: bool, depth: int
) -> None:
    expected = sliding_window_view(tokens, 33)
    with (
        NpyStore.windows(path, length=33, dtype="uint16", memory_map=memory_map) as store,
        Feeder(store, batch_size=500, rows=order, depth=depth) as feeder,
    ):
        numbers = order.bind(len(expected), 0)(np.arange(order.length(len(expected))))
        found = np.concatenate([x.numpy() for x in feeder])
        np.testing.assert_array_equal(found, expected[numbers])


def test_stores_with_the_same_span_have_the_same_rows(tmp_path: Path) -> None:
    """Targets follow their inputs, and no window crosses a file."""
    for i, n in enumerate([50, 7, 40]):
        saved(tmp_path / f"{i}.npy", 1000.0 * i + np.arange(n)[:, None] + [0, 0.5])
    files = str(tmp_path / "*.npy")
    with (
        NpyStore.windows(files, length=8, span=12, step=3) as past,
        NpyStore.windows(files, length=4, start=8, span=12, step=3) as future,
        Feeder({"x": past, "y": future}, batch_size=8, shuffle=True, seed=0) as feeder,
    ):
        # The second file is too short.
        assert past.n_rows == future.n_rows == 13 + 10
        for batch in feeder:
            assert batch["x"].shape[1:] == (8, 2)
            assert batch["y"].shape[1:] == (4, 2)
            both = np.concatenate([batch["x"].numpy(), batch["y"].numpy()], axis=1)
            np.testing.assert_array_equal(np.diff(both, axis=1), np.ones_like(both[:, 1:]))


def test_the_plan_counts_the_file_once(path: Path) -> None:
    with NpyStore.windows(path, length=1024, dtype="uint16") as store:
        assert store.nbytes == os.path.getsize(path)
        free = FreeMemory(KiB(100), KiB(100))
        [strategy] = plan_reads([store], rows.shuffled(0), 300, free).strategies
        assert isinstance(strategy, AxisWindowReads)
        assert isinstance(strategy.item_strategy, MappedFile)
        strategy.close()
        assert [(item.place, item.total) for item in strategy.items] == [("page cache", 12_000)]
        config = Config(cpu_memory_limit=MiB(8), preferred_batch_size=4)
        with Feeder(store, shuffle=True, config=config) as feeder:
            assert "train.bin, 11.7 KiB: read through the OS page cache" in unwrapped(feeder.plan)


@pytest.mark.parametrize(
    ("order", "free", "item"),
    [
        (rows.shuffled(0), KiB(600), "page cache"),
        (rows.shuffled(0), KiB(600), "rows of a file"),
        (
            rows.block_shuffled(0, block_rows=1 << 14, window_blocks=1),
            KiB(400),
            "read-ahead buffers",
        ),
    ],
    ids=str,
)
def test_a_file_of_inputs_and_targets_is_loaded_once(
    tmp_path: Path, order: Any, free: int, item: str
) -> None:
    series = np.arange(1 << 18, dtype=np.uint16)
    series.tofile(tmp_path / "x.bin")
    how: dict[str, Any] = {"dtype": "uint16", "span": 120, "step": 3}
    how["memory_map"] = item == "page cache"
    with (
        NpyStore.windows(tmp_path / "x.bin", length=96, **how) as past,
        NpyStore.windows(tmp_path / "x.bin", length=24, start=96, **how) as future,
    ):
        plan = plan_reads([past, future], order, 300, FreeMemory(free, free))
        assert [item in (found.what, found.place) for found in plan.items] == [True]
        for strategy in plan.strategies:
            strategy.close()
        with Feeder((past, future), batch_size=64, rows=order, device="cpu") as feeder:
            numbers = order.bind(past.n_rows, 0)(np.arange(past.n_rows))
            x, y = (np.concatenate(parts) for parts in zip(*feeder, strict=True))
    expected = windows_of(series, 120, 3, 0, 120)[numbers]
    np.testing.assert_array_equal(np.concatenate([x, y], 1), expected)


@pytest.mark.parametrize(("n", "expected"), [(5000, MappedFile), (10_000, DirectReads)])
def test_the_end_of_a_file_does_not_count_as_unread(tmp_path: Path, n: int, expected: type) -> None:
    """Half of the tokens in windows is worth a map; a fourth of the file is not."""
    np.zeros(n, np.uint16).tofile(tmp_path / "x.bin")
    how: dict[str, Any] = {"length": 257, "step": 512, "span": 513 if n == 5000 else n - 4096}
    with NpyStore.windows(tmp_path / "x.bin", dtype="uint16", **how) as store:
        assert store.nbytes == 2 * (8 * 512 + 257)
        plan = plan_reads([store], rows.sequential(), 300, FreeMemory(MiB(1), MiB(1)))
        [strategy] = plan.strategies
        assert isinstance(strategy, AxisWindowReads)
        assert type(strategy.item_strategy) is expected
        strategy.close()


def test_a_shard_that_is_given_twice_is_counted_once(path: Path) -> None:
    with NpyStore.windows([path, path], length=4, dtype="uint16") as store:
        assert (store.n_rows, store.nbytes) == (2 * 5997, 12_000)


@pytest.mark.parametrize(
    ("order", "free", "expected"),
    [
        (rows.sequential(), 0, DirectReads),
        (rows.sequential(), MiB(100), DirectReads),
        (rows.shuffled(0), 0, PageCacheReadahead),
        (rows.shuffled(0), KiB(600), InMemoryCopy),
        (rows.block_shuffled(0, block_rows=1 << 15, window_blocks=1), KiB(500), BufferedReadahead),
        (rows.block_shuffled(0, block_rows=1 << 15), KiB(500), PageCacheReadahead),
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [1, 2])
def test_items_are_read_once_also_if_windows_overlap(
    tmp_path: Path, order: Any, free: int, expected: type, step: int
) -> None:
    """A copy has the 512 KiB of the file, not the 32 MiB of all windows."""
    np.arange(1 << 18, dtype=np.uint16).tofile(tmp_path / "x.bin")
    how: dict[str, Any] = {"length": 64, "dtype": "uint16", "memory_map": False}
    with NpyStore.windows(tmp_path / "x.bin", step=step, **how) as store:
        plan = plan_reads([store], order, 300, FreeMemory(free, free))
        [strategy] = plan.strategies
        assert isinstance(strategy, AxisWindowReads)
        assert type(strategy.item_strategy) is expected
        assert sum(item.total for item in plan.items) <= free
        strategy.close()


def test_a_gather_takes_memory_for_a_part_of_the_rows(tmp_path: Path) -> None:
    """The windows have 8 GiB in all, and the file 8 MiB."""
    np.zeros(1 << 23, np.uint8).tofile(tmp_path / "x.bin")
    numbers = np.random.default_rng(0).permutation(1 << 22)[:1024]
    out = np.empty((len(numbers), 1024), np.uint8)
    with NpyStore.windows(tmp_path / "x.bin", length=1024, dtype="uint8") as store:
        mapped = mapped_windows(store)
        tracemalloc.start()
        for source in (store, mapped):
            source.gather(numbers, out)
            source.gather(np.arange(len(out)), out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        mapped.close()


@pytest.mark.parametrize("memory_map", [True, False])
def test_a_file_that_shrinks_is_an_error(path: Path, memory_map: bool) -> None:
    with NpyStore.windows(path, length=33, dtype="uint16") as store:
        source = mapped_windows(store) if memory_map else store
        last = [store.n_rows - 1]
        gathered(source, last)
        os.truncate(path, 11_998)
        with pytest.raises(errors.ReadError, match="has shrunk to 11998 bytes"):
            gathered(source, last)
        source.close()


def test_a_store_of_windows_can_be_pickled(path: Path, tokens: np.ndarray) -> None:
    with (
        NpyStore.windows(path, length=33, step=2, dtype="uint16") as store,
        pickle.loads(pickle.dumps(store)) as copy,
    ):
        numbers = [5, 0, 2983]
        np.testing.assert_array_equal(gathered(copy, numbers), gathered(store, numbers))
    with pytest.raises(errors.ClosedError):
        gathered(store, [0])


def test_windows_cannot_be_written(path: Path) -> None:
    with (
        NpyStore.windows(path, length=33, dtype="uint16") as store,
        pytest.raises(errors.WriteBackError, match="read-only"),
    ):
        store.scatter(np.array([0]), np.zeros((1, 33), np.uint16))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"length": 0}, "length=0: expected a whole number, at least 1"),
        ({"length": 2.0}, "length=2.0: expected a whole number"),
        ({"length": 8, "step": 0}, "step=0: expected a whole number, at least 1"),
        ({"length": 8, "start": -1}, "start=-1: expected a whole number, at least 0"),
        ({"length": 8, "start": 3, "span": 10}, "span=10: .* at least 11, because start"),
        ({"length": 8, "offset": -2}, "offset=-2: expected a whole number, at least 0"),
        ({"length": 8, "dtype": None}, "no header .* expected a .npy file, or dtype="),
        ({"length": 8, "offset": 1}, "minus offset=1 are 5999 rows of 2 bytes and 1 more bytes"),
        ({"length": 6001}, r"fits in shape \(6000,\); expected at least 6,001 along axis 0; give"),
        ({"length": 8, "span": 7000}, r"fits in shape \(6000,\); expected at least 7,000"),
        ({"length": 1 << 80}, r"fits in shape \(6000,\)"),
        ({"length": 8, "keep_cache": 3}, "keep_cache=3"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises((errors.ArgumentError, errors.StoreError), match=message):
        NpyStore.windows(path, **{"dtype": "uint16", **how})


def test_a_step_may_be_longer_than_the_file(path: Path, tokens: np.ndarray) -> None:
    with NpyStore.windows(path, length=8, step=1 << 80, dtype="uint16") as store:
        np.testing.assert_array_equal(gathered(store, [0]), tokens[None, :8])


def test_files_that_are_refused(tmp_path: Path) -> None:
    npy = saved(tmp_path / "x.npy", np.zeros(50, np.float32))
    empty = saved(tmp_path / "empty.npy", np.zeros((50, 0), np.float32))
    damaged = tmp_path / "damaged.npy"
    damaged.write_bytes(bytes(100))
    archive = tmp_path / "x.npz"
    np.savez(archive, x=np.zeros(4))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (npy, {"offset": 128}, r"offset=128: the header of a \.npy file.*give start="),
        (npy, {"dtype": "uint16"}, "items of dtype float32"),
        (empty, {}, "have 0 bytes"),
        (damaged, {"dtype": "uint8"}, r"not a \.npy file"),
        (archive, {}, "it looks like a .npz archive"),
        (tmp_path, {"dtype": "uint8"}, "is a directory"),
        (tmp_path / "none.bin", {"dtype": "uint8"}, "no such file"),
    ]
    for file, how, message in cases:
        with pytest.raises((errors.ArgumentError, errors.StoreError), match=message):
            NpyStore.windows(file, length=4, **how)


def test_a_npy_file_may_have_any_name(tmp_path: Path) -> None:
    with open(tmp_path / "x.bin", "wb") as file:
        np.save(file, np.arange(9))
    for dtype in (None, "int64"):
        with NpyStore.windows(tmp_path / "x.bin", length=4, dtype=dtype) as store:
            np.testing.assert_array_equal(gathered(store, [5]), [[5, 6, 7, 8]])


def test_windows_of_any_two_files_do_not_mix(tmp_path: Path) -> None:
    saved(tmp_path / "0.npy", np.zeros(50, np.float32))
    saved(tmp_path / "1.npy", np.zeros(50, np.float64))
    with pytest.raises(errors.StoreError, match="shards do not match"):
        NpyStore.windows(str(tmp_path / "*.npy"), length=4)


def test_arguments_of_other_libraries_are_explained(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20.0))
    with pytest.raises(UnknownArgument, match=r"NpyStore\.windows has no argument 'block_size'"):
        NpyStore.windows(tmp_path / "x.npy", block_size=3)  # type: ignore[call-arg]


def test_inputs_and_targets_without_a_common_span(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20.0))
    inputs = NpyStore.windows(tmp_path / "x.npy", length=4)
    targets = NpyStore.windows(tmp_path / "x.npy", length=2, start=4)
    with inputs, targets, pytest.raises(StoreError, match="windows of one series the same span="):
        Feeder((inputs, targets), batch_size=4)
