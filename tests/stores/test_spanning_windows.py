"""Windows over the items of several files as one sequence."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores import gather_at, gathered, mapped_windows, saved
from support.unwrapped import unwrapped

import pinfeed
from pinfeed import Config, Feeder, KiB, MiB, NpyStore, errors, rows
from pinfeed.native.library import library
from pinfeed.readahead.buffers import BufferedReadahead, PageCacheReadahead
from pinfeed.readahead.read_plan import AxisWindowReads, plan_reads
from pinfeed.readahead.resident_file import InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import DirectReads
from pinfeed.stores.window_store import WindowStore
from pinfeed.testing.suites import ROW_SHAPES, ReadOnlyStoreTests

HEADER = 1024
"""Bytes before the tokens of a .bin file."""
SIZES = (700, 0, 1, 5, 900, 3, 1391)
"""Tokens of each file: some are empty, or shorter than a window."""


class TestWindowsOverFiles(ReadOnlyStoreTests):
    row_shapes = tuple(shape for shape in ROW_SHAPES if shape)

    def make(self, array: np.ndarray, tmp_path: Path) -> WindowStore:
        items = array.reshape(-1, *array.shape[2:])
        cuts = [len(items) // 7, len(items) // 7, len(items) // 2 + 1]
        for i, part in enumerate(np.split(items, cuts)):
            np.save(tmp_path / f"{i}.npy", part)
        return NpyStore.windows(
            tmp_path / "*.npy",
            length=array.shape[1],
            step=array.shape[1],
            dtype=array.dtype,
            across_files=True,
        )


def windows_of(series: np.ndarray, length: int, step: int, start: int, span: int) -> np.ndarray:
    """Return all windows of a sequence, shape (n, length, *item_shape), by numpy alone."""
    first = range(0, len(series) - span + 1, step)
    found = [series[i + start : i + start + length] for i in first]
    return np.array(found, series.dtype).reshape(len(first), length, *series.shape[1:])


@settings(max_examples=80)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    item_shape=st.sampled_from([(), (3,)]),
    dtype=st.sampled_from(["<f4", ">f4", "|u1", ">i2"]),
    length=st.integers(1, 40),
    step=st.integers(1, 45),
    start=st.integers(0, 6),
    more=st.integers(0, 6),
    data=st.data(),
)
def test_windows_are_those_of_the_joined_files(
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
    folder = tmp_path_factory.mktemp("windows")
    native = np.dtype(dtype).newbyteorder("=")
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 100, (n, *item_shape)).astype(dtype) for n in sizes]
    files = [saved(folder / f"{i}.npy", shard) for i, shard in enumerate(shards)]
    span = start + length + more
    how: dict[str, Any] = {"length": length, "step": step, "start": start, "span": span}
    whole = windows_of(np.concatenate(shards).astype(native), length, step, start, span)
    if not len(whole):
        with pytest.raises(errors.StoreError, match="expected at least"):
            NpyStore.windows(files, across_files=True, **how)
        return
    numbers = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=60)), np.int64)
    places = rng.permutation(len(numbers) + 3)[: len(numbers)]
    with NpyStore.windows(files, across_files=True, **how) as store:
        assert store.n_rows == len(whole)
        mapped = mapped_windows(store)
        for source in (store, mapped):
            for wanted in (numbers, np.arange(len(whole)), np.sort(numbers)):
                np.testing.assert_array_equal(gathered(source, wanted), whole[wanted])
            out = np.zeros((len(numbers) + 3, *store.row_shape), native)
            gather_at(source, numbers, out, places)
            np.testing.assert_array_equal(out[places], whole[numbers])
            assert not np.delete(out, places, axis=0).any()
        mapped.close()


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 50_000, sum(SIZES)).astype(np.uint16)


@pytest.fixture
def paths(tokens: np.ndarray, tmp_path: Path) -> list[Path]:
    """Write .bin files with a header."""
    found = []
    for i, part in enumerate(np.split(tokens, np.cumsum(SIZES)[:-1])):
        found.append(tmp_path / f"{i}.bin")
        found[-1].write_bytes(bytes(HEADER) + part.tobytes())
    return found


def opened(paths: Any, **how: Any) -> WindowStore:
    return NpyStore.windows(paths, dtype="uint16", offset=HEADER, across_files=True, **how)


ORDERS = [
    rows.sequential(),
    rows.shuffled(1),
    rows.block_shuffled(1, block_rows=20, window_blocks=2),
    rows.drawn(70, seed=1),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("step", [3, 65, 80])
def test_a_feeder_gives_the_windows_at_any_depth(
    paths: list[Path], tokens: np.ndarray, order: Any, memory_map: bool, depth: int, step: int
) -> None:
    expected = windows_of(tokens, 65, step, 0, 65)
    numbers = order.bind(len(expected), 0)(np.arange(order.length(len(expected))))
    with (
        opened(paths, length=65, step=step, memory_map=memory_map) as store,
        Feeder(store, batch_size=16, rows=order, depth=depth, device="cpu") as feeder,
    ):
        for _ in range(2):
            feeder.set_epoch(0)
            found = np.concatenate([x.numpy() for x in feeder])
            np.testing.assert_array_equal(found, expected[numbers])


@pytest.mark.parametrize("native", [True, False])
def test_rows_do_not_depend_on_the_compiled_part(
    paths: list[Path], tokens: np.ndarray, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("pinfeed.stores.page_cache.library", lambda: None)
    elif library() is None:
        pytest.skip("pinfeed was installed without a C compiler")
    expected = windows_of(tokens, 65, 2, 0, 65)
    wanted = np.random.default_rng(1).permutation(len(expected))
    with opened(paths, length=65, step=2) as store:
        mapped = mapped_windows(store)
        np.testing.assert_array_equal(gathered(mapped, wanted), expected[wanted])
        mapped.close()


def test_a_file_larger_than_the_limit_is_not_mapped(tmp_path: Path) -> None:
    parts = [np.arange(i, i + 100_000, dtype=np.uint16) for i in range(3)]
    files = [saved(tmp_path / f"{i}.npy", part) for i, part in enumerate(parts)]
    expected = windows_of(np.concatenate(parts), 33, 32, 0, 33)
    config = Config(cpu_memory_limit=KiB(5_000), preferred_batch_size=64)
    order = rows.shuffled(1)
    numbers = order.bind(len(expected), 0)(np.arange(len(expected)))
    with (
        NpyStore.windows(files * 10, length=33, step=32, across_files=True) as store,
        NpyStore.windows(files, length=33, step=32, across_files=True) as small,
        Feeder(store, rows=order, config=config, device="cpu") as large,
        Feeder(small, rows=order, config=config, device="cpu") as feeder,
    ):
        assert large.plan.host_bytes + large.plan.page_cache_bytes <= KiB(5_000)
        assert np.concatenate([x.numpy() for x in feeder]).tolist() == expected[numbers].tolist()


@pytest.mark.parametrize(
    ("order", "step", "free", "expected"),
    [
        (rows.shuffled(0), 1, MiB(9), MappedFile),
        (rows.shuffled(0), 64, MiB(9), MappedFile),
        (rows.sequential(), 1, 0, DirectReads),
        (rows.shuffled(0), 1, 0, PageCacheReadahead),
        (rows.block_shuffled(0, block_rows=1 << 15), 1, KiB(500), PageCacheReadahead),
        (rows.shuffled(0), 1, MiB(9), InMemoryCopy),
        (rows.shuffled(0), 64, MiB(9), InMemoryCopy),
        (
            rows.block_shuffled(0, block_rows=1 << 15, window_blocks=1),
            1,
            KiB(500),
            BufferedReadahead,
        ),
        (rows.block_shuffled(0, block_rows=512, window_blocks=2), 64, KiB(500), BufferedReadahead),
    ],
    ids=str,
)
def test_windows_are_read_ahead_as_those_of_one_file(
    tmp_path: Path, order: Any, step: int, free: int, expected: type
) -> None:
    files = [saved(tmp_path / f"{i}.npy", np.zeros(1 << 17, np.uint16)) for i in range(2)]
    is_mapped = expected is MappedFile
    with NpyStore.windows(
        files, length=64, step=step, across_files=True, memory_map=is_mapped
    ) as store:
        assert store.nbytes == 1 << 19
        plan = plan_reads([store], order, 300, FreeMemory(free, free))
        [strategy] = plan.strategies
        assert isinstance(strategy, AxisWindowReads)
        assert type(strategy.item_strategy) is expected
        for close in plan.closes:
            close()


def test_the_files_are_counted_once(paths: list[Path], tokens: np.ndarray) -> None:
    with opened(paths, length=64) as store, Feeder(store, batch_size=4, shuffle=True) as feeder:
        assert store.nbytes == tokens.nbytes
        assert feeder.plan.page_cache_bytes == tokens.nbytes
        assert "0.bin and 6 more, 5.9 KiB: read through the OS page cache" in unwrapped(feeder.plan)


@pytest.mark.parametrize("memory_map", [True, False])
def test_a_file_that_shrinks_is_an_error(paths: list[Path], memory_map: bool) -> None:
    with opened(paths, length=65) as store:
        source = mapped_windows(store) if memory_map else store
        # The window extends over six files, of which the first has become shorter.
        gathered(source, [690])
        os.truncate(paths[0], HEADER + 1000)
        with pytest.raises(errors.ReadError, match="has shrunk to 2024 bytes"):
            gathered(source, [690])
        source.close()


def test_a_store_can_be_pickled(paths: list[Path]) -> None:
    with opened(paths, length=65) as store, pickle.loads(pickle.dumps(store)) as copy:
        assert copy.row_shape == (65,)
        np.testing.assert_array_equal(gathered(copy, [690, 3]), gathered(store, [690, 3]))
    with pytest.raises(errors.ClosedError):
        gathered(store, [0])


def test_windows_of_two_sequences_are_joined(paths: list[Path], tokens: np.ndarray) -> None:
    expected = windows_of(tokens, 65, 64, 0, 65)
    with (
        opened(paths, length=65, step=64) as one,
        opened(paths[4:], length=65, step=64) as two,
        Feeder(pinfeed.concat([one, two]), batch_size=7) as feeder,
    ):
        found = np.concatenate([x.numpy() for x in feeder])
        np.testing.assert_array_equal(found[: len(expected)], expected)
        other = windows_of(tokens[sum(SIZES[:4]) :], 65, 64, 0, 65)
        np.testing.assert_array_equal(found[len(expected) :], other)


def test_ranks_share_one_stream_of_tokens(paths: list[Path], tokens: np.ndarray) -> None:
    """As a loader that joins its shards: each rank takes its part of each step."""
    batch_tokens, world_size = 2 * 16, 3
    step = batch_tokens * world_size
    for rank in range(world_size):
        begin = batch_tokens * rank
        runs = opened(paths, length=batch_tokens + 1, step=step, start=begin, span=step + 1)
        with runs, Feeder(runs, batch_size=1, device="cpu") as feeder:
            found = [batch[0].tolist() for batch in feeder]
        assert len(found) == (len(tokens) - 1) // step
        for i, run in enumerate(found):
            first = i * step + begin
            assert run == tokens[first : first + batch_tokens + 1].tolist()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"length": 3001}, r"shape \(3000,\); expected at least 3,001 along axis 0; give"),
        (
            {"length": 8, "span": 7000},
            "expected at least 7,000 along axis 0; give .* a longer file$",
        ),
        ({"length": 8, "start": 3, "span": 10}, "span=10: .* at least 11, because start"),
        ({"length": 8, "span": -1}, "span=-1: .* at least 8"),
        ({"length": 8, "start": -1}, "start=-1: expected a whole number, at least 0"),
        ({"length": 1 << 80}, r"fits in shape \(3000,\)"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(paths: list[Path], how: dict[str, Any], message: str) -> None:
    with pytest.raises((errors.ArgumentError, errors.StoreError), match=message):
        opened(paths, **how)


def test_across_files_is_a_flag(paths: list[Path]) -> None:
    with pytest.raises(errors.ArgumentError, match="across_files='yes'"):
        NpyStore.windows(paths, length=3, dtype="uint16", across_files="yes")  # type: ignore[arg-type]
    with pytest.raises(errors.StoreError, match="across_files=True if all files are one"):
        NpyStore.windows(paths, length=1500, dtype="uint16", offset=HEADER)


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_files_are_joined_along_their_first_axis(tmp_path: Path, axis: Any) -> None:
    array = np.arange(9 * 7 * 2).reshape(9, 7, 2)
    files = [saved(tmp_path / f"{i}.npy", part) for i, part in enumerate(np.split(array, [2, 3]))]
    whole = saved(tmp_path / "whole.npy", array)
    how: dict[str, Any] = {"axis": axis, "length": 3, "stride": 2, "step": 2}
    with (
        NpyStore.windows(files, across_files=True, **how) as store,
        NpyStore.windows(whole, **how) as other,
    ):
        numbers = range(other.n_rows)
        assert store.n_rows == other.n_rows
        np.testing.assert_array_equal(gathered(store, numbers), gathered(other, numbers))
    np.save(files[1], array[:1, :6])
    with pytest.raises(errors.StoreError, match=r"expected equal axes after axis 0|do not match"):
        NpyStore.windows(files, across_files=True, **how)


def test_a_step_may_be_longer_than_all_files(paths: list[Path], tokens: np.ndarray) -> None:
    with opened(paths, length=800, step=1 << 80) as store:
        np.testing.assert_array_equal(gathered(store, [0]), tokens[None, :800])
