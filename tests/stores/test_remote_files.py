"""Rows of remote files: the same rows, in few requests, many at a time."""

import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remote_files import PROTOCOLS, Crowd, Shaky, fresh_file_systems, npy, put, urls_of
from support.stores import gather_at, gathered

from pinfeed import Feeder, RemoteStore, errors, rows
from pinfeed.readahead import buffers
from pinfeed.stores import byte_ranges
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ROW_SHAPES, sample


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_file_systems():
        yield


@pytest.mark.sweep(4)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("order", "<>")
def test_remote_rows_of_every_dtype_and_rank(
    protocol: str, dtype: str, order: str, tmp_path: Path
) -> None:
    for row_shape in ROW_SHAPES:
        array = sample(13, row_shape, DTYPES[dtype])
        saved = array if dtype == "bfloat16" else array.astype(array.dtype.newbyteorder(order))
        with RemoteStore(urls_of(protocol, saved, tmp_path, [1, 1, 5]), dtype=dtype) as store:
            assert (store.n_rows, store.row_shape, store.dtype, store.writable) == (
                13,
                row_shape,
                DTYPES[dtype],
                False,
            )
            wanted = np.array([12, 0, 5, 5, 1, 4])
            np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
            np.testing.assert_array_equal(gathered(store, np.arange(13)), array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_remote_headers_of_every_version(version: tuple[int, int]) -> None:
    array = sample(9, (4,), np.dtype(np.int32))
    np.testing.assert_array_equal(
        gathered(RemoteStore(put(array, version=version)), [8, 3]), array[[8, 3]]
    )


@settings(max_examples=100)
@given(data=st.data())
def test_any_rows_of_any_remote_shards(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranges, windows and gaps have all sizes.

    Each byte is requested at most once, in answers that are not too large.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "RANGE_BYTES", 8 << data.draw(st.integers(0, 6), "range"))
        patch.setattr(byte_ranges, "GROUP_BYTES", 8 << data.draw(st.integers(6, 9), "group"))
        patch.setattr(
            byte_ranges, "_GAP_BYTES", data.draw(st.sampled_from([0, 1, 23, 24, 100, 1000]), "gap")
        )
        patch.setattr(
            byte_ranges, "_MAX_REQUESTS", data.draw(st.sampled_from([1, 2, 1000]), "requests")
        )
        dtype = np.dtype(
            data.draw(st.sampled_from(["<f4", ">f4", "u1", "<i8", ">i8", "?"]), "dtype")
        )
        array = sample(
            data.draw(st.integers(1, 60), "n"), (data.draw(st.integers(0, 9), "width"),), dtype
        )
        cuts = sorted(data.draw(st.lists(st.integers(0, len(array)), max_size=4), "cuts"))
        protocol = data.draw(st.sampled_from(["shaky", "file"]), "protocol")
        store = RemoteStore(urls_of(protocol, array, tmp_path_factory.getbasetemp(), cuts))
        run = st.tuples(st.integers(0, len(array)), st.integers(0, len(array))).map(
            lambda ends: list(range(min(ends), max(ends)))
        )
        wanted = np.array(
            data.draw(
                st.one_of(st.lists(st.integers(0, len(array) - 1), max_size=80), run), "rows"
            ),
            np.int64,
        )
        positions = np.array(
            data.draw(st.permutations(range(len(wanted) + 3)), "positions")[: len(wanted)], np.int64
        )
        out = np.full((len(wanted) + 3, *store.row_shape), 3, store.dtype)
        expected = out.copy()
        expected[positions] = array[wanted]
        Shaky.requests.clear()
        gather_at(store, wanted, out, positions)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
        assert all(
            0 < end - begin <= max(byte_ranges.RANGE_BYTES, store.row_nbytes)
            for begin, end in Shaky.requests
        )


def test_only_close_rows_share_a_request() -> None:
    store = RemoteStore(put(sample(1000, (1024,), np.dtype(np.uint8)), "shaky://x.npy"))
    # 64 KiB between 1 and 66, and between 500 and 564; more between 66 and 500.
    gathered(store, [500, 3, 1, 564, 66, 1])
    assert [(begin - 128, end - 128) for begin, end in Shaky.requests] == [
        (1 << 10, 67 << 10),
        (500 << 10, 565 << 10),
    ]


@pytest.mark.parametrize("case", ["run", "shuffled", "one row, often", "large rows"])
def test_a_gather_takes_no_more_memory_than_it_says(case: str) -> None:
    array = np.zeros(
        (20, 3 << 20) if case == "large rows" else (60_000, 1024),
        ">u2" if case == "shuffled" else np.uint8,
    )
    store = RemoteStore(put(array))
    wanted = np.arange(len(array))
    if case != "run":
        wanted = (
            np.full(len(array), 7)
            if case == "one row, often"
            else np.random.default_rng(0).permutation(len(array))
        )
    out = np.zeros((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted[:2], out[:2])
    tracemalloc.start()
    try:
        store.gather(wanted, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < store.resident_bytes


def test_requests_wait_at_the_same_time() -> None:
    array = np.repeat(np.arange(32, dtype=np.uint8)[:, None], 1 << 20, axis=1)
    # Eight ranges are a window.
    Crowd.content = npy(array)
    Crowd.least = 8
    Crowd.waiting = 0
    store = RemoteStore("crowd://x.npy")
    np.testing.assert_array_equal(gathered(store, np.arange(16)), array[:16])
    Crowd.least = 3
    Crowd.waiting = 0
    np.testing.assert_array_equal(gathered(store, [31, 0, 15]), array[[31, 0, 15]])


def test_shards_are_asked_at_the_same_time() -> None:
    Crowd.content = npy(np.arange(10.0))
    Crowd.least = 100
    Crowd.waiting = 0
    store = RemoteStore([f"crowd://{i}.npy" for i in range(100)])
    assert gathered(store, np.arange(100) * 10 + 3).tolist() == [3] * 100


def test_threads_gather_at_the_same_time() -> None:
    array = sample(5000, (64,), np.dtype(np.float32))
    store = RemoteStore(urls_of("memory", array, Path(), [10, 700, 701, 4000]))
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        rng = np.random.default_rng(seed)
        for _ in range(10):
            wanted = rng.integers(0, 5000, 500)
            np.testing.assert_array_equal(gathered(store, wanted), array[wanted])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_feeder_of_urls(depth: int) -> None:
    """The feeder opens and closes the files; its rows equal the array at any depth."""
    array, labels = sample(500, (7,), np.dtype(np.float32)), np.arange(500)
    urls_of("memory", array, Path(), [100, 333])
    with Feeder(
        {"x": "memory://data/x-*.npy", "y": put(labels)},
        batch_size=64,
        shuffle=True,
        depth=depth,
        device="cpu",
    ) as feeder:
        for epoch in range(2):
            order = rows.shuffled(0).bind(500, epoch)(np.arange(500))
            batches = list(feeder)
            np.testing.assert_array_equal(
                torch.cat([batch["x"] for batch in batches]).numpy(), array[order]
            )
            np.testing.assert_array_equal(
                torch.cat([batch["y"] for batch in batches]).numpy(), order
            )


def test_an_error_of_a_remote_file_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    # A window is a batch. Otherwise, all rows are read at once.
    monkeypatch.setattr(buffers, "_SEQUENCE_BYTES", 80)
    put(np.arange(1000.0), "shaky://x.npy")
    with (
        Feeder("shaky://x.npy", batch_size=10, device="cpu") as feeder,
        pytest.raises(errors.ReadError, match=r"shaky://x\.npy.*Permission"),
    ):
        for i, _batch in enumerate(feeder):
            if i == 20:
                Shaky.faults.append(PermissionError("Permission denied"))


def test_a_pattern_is_expanded_in_sorted_order() -> None:
    for name in ("b", "a", "c"):
        put(np.full(2, ord(name)), f"memory://data/{name}.npy")
    put(np.arange(3), "memory://data/[d].npy")
    assert gathered(RemoteStore("memory://data/?.npy"), np.arange(6)).tolist() == [
        97,
        97,
        98,
        98,
        99,
        99,
    ]
    assert RemoteStore("memory://data/[d].npy").n_rows == 3, "a file of that very name"
    with pytest.raises(errors.FileMissing, match=r"memory://data/e\*: no file matches"):
        RemoteStore("memory://data/e*")


def test_a_chain_of_file_systems(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(5), b=np.arange(5, 12))
    store = RemoteStore([f"zip://{name}.npy::file://{tmp_path}/x.npz" for name in "ab"])
    assert gathered(store, [11, 0, 4, 5]).tolist() == [11, 0, 4, 5]


def test_the_same_file_twice() -> None:
    url = put(np.arange(5))
    assert gathered(RemoteStore([url, url]), np.arange(10)).tolist() == [*range(5), *range(5)]
