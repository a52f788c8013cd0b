"""ChunkedStore: how often chunks are decoded, by gathers, by threads and by read strategies."""

import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import Config, Feeder, KiB, errors, rows
from pinfeed.readahead import resident_file
from pinfeed.readahead.buffers import BufferedReadahead
from pinfeed.readahead.read_plan import plan_reads
from pinfeed.readahead.resident_file import CopyInSecondEpoch, InMemoryCopy
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import ChunkReads
from pinfeed.rows.order_batches import OrderBatches
from pinfeed.rows.orders import Order, known
from pinfeed.stores import chunked
from pinfeed.stores.chunked import ChunkedStore, ChunkLayout, KeptChunks, even_bounds
from pinfeed.testing.suites import ReadOnlyStoreTests

UNEVEN = [0, 3, 4, 9, 25, 26, 40, 50]


class Decoding(ChunkedStore):
    """Rows of an array in chunks; it counts how often each chunk is decoded."""

    def __init__(self, array: np.ndarray, bounds: Any) -> None:
        self.array = array
        self.decoded: Counter[int] = Counter()
        self.calls = 0
        self.failures = 0
        self.wait = lambda: None
        super().__init__(ChunkLayout("x", array.dtype, array.shape[1:], np.asarray(bounds)))

    def _read_chunks(self, start: int, stop: int, out: np.ndarray) -> None:
        assert {start, stop} <= set(self.bounds.tolist())
        self.wait()
        if self.failures:
            self.failures -= 1
            raise ValueError("damaged")
        self.calls += 1
        self.decoded.update(np.flatnonzero((self.bounds >= start) & (self.bounds < stop)).tolist())
        out[...] = self.array[start:stop]


class TestUnevenChunks(ReadOnlyStoreTests):
    @pytest.fixture(params=["float16", "bool"])
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return np.dtype(request.param)

    def make(self, array: np.ndarray, tmp_path: Path) -> Decoding:
        return Decoding(array, [b for b in UNEVEN if b < len(array)] + [len(array)])


def small(n_rows: int = 50, bounds: Any = UNEVEN) -> Decoding:
    return Decoding(np.arange(2 * n_rows, dtype=np.float32).reshape(n_rows, 2), bounds)


def gathered(store: ChunkedStore, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


# ---- gathers -------------------------------------------------------------------------------------


@given(wanted=st.lists(st.integers(0, 49), max_size=80))
@settings(max_examples=60)
def test_a_gather_decodes_each_chunk_once(wanted: list[int]) -> None:
    store = small()
    np.testing.assert_array_equal(gathered(store, wanted), store.array[wanted])
    touched = set(np.searchsorted(UNEVEN, wanted, side="right") - 1)
    assert store.decoded == Counter(dict.fromkeys(touched, 1))


def test_whole_chunks_are_decoded_in_one_call_and_not_kept() -> None:
    store = small()
    np.testing.assert_array_equal(gathered(store, range(50)), store.array)
    assert store.calls == 1
    gathered(store, [0])
    assert store.decoded[0] == 2


def test_batches_that_share_a_chunk_decode_it_once() -> None:
    store = small(64, even_bounds(64, 8))
    for i in range(0, 64, 3):
        gathered(store, range(i, min(i + 3, 64)))
    assert set(store.decoded.values()) == {1}


def test_the_chunks_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_MAX_KEPT", 2)
    store = small(64, even_bounds(64, 8))
    for row in (0, 8, 1, 16, 2, 9):
        gathered(store, [row])
    assert store.decoded == {0: 1, 1: 2, 2: 1}


def test_threads_that_need_one_chunk_decode_it_once() -> None:
    store = small()
    begun = threading.Event()
    decode = threading.Event()

    def wait() -> None:
        begun.set()
        assert decode.wait(30)

    store.wait = wait
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(gathered, store, [10])
        assert begun.wait(30)
        others = [threads.submit(gathered, store, [row]) for row in (11, 12)]
        decode.set()
        assert [call.result()[0, 0] for call in (first, *others)] == [20, 22, 24]
    assert store.decoded == {3: 1}


def test_a_chunk_in_use_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, memory would hold more chunks than are counted."""
    store = small()
    kept = KeptChunks(1, store._decode)
    with ThreadPoolExecutor(1) as thread:
        with kept.use(0, 3):

            def use_other() -> float:
                with kept.use(3, 4) as chunk:
                    return float(chunk[0, 0])

            call = thread.submit(use_other)
            with kept.use(0, 3) as again:
                assert again[0, 1] == 1
            assert not store.decoded[1]
        assert call.result() == 6
    assert store.decoded == {0: 1, 1: 1}


def test_a_chunk_that_failed_is_tried_again() -> None:
    store = small()
    store.failures = 1
    with pytest.raises(
        errors.ReadError, match=r"rows \[9, 25\) cannot be read \(ValueError: damag"
    ):
        gathered(store, [10])
    assert gathered(store, [10]).tolist() == [[20, 21]]


def test_the_memory_of_large_chunks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_KEPT_BYTES", 256)
    monkeypatch.setattr(chunked, "DECODED_BYTES", 256)
    monkeypatch.setattr(chunked, "_RUN_BYTES", 16)
    # The one chunk of 400 bytes is kept, and one thread at a time decodes.
    assert small(50, [0, 50]).resident_bytes == 400 + 2 * 400
    # Two chunks of 160 bytes are kept, although they are larger than wanted.
    assert small(50, [0, 20, 40, 50]).resident_bytes == 2 * 160 + 2 * 160
    # Eight chunks of 8 bytes are kept, and four threads decode two at a time.
    assert small(50, even_bounds(50, 1)).resident_bytes == 8 * 8 + 4 * 2 * 16


def test_a_chunk_takes_the_memory_of_one_no_longer_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "_KEPT_BYTES", 0)
    store = small()
    addresses = set()
    for row in (0, 3, 10, 25, 30, 45, 1):
        np.testing.assert_array_equal(gathered(store, [row]), store.array[[row]])
        chunks = store._kept._chunks.values()
        addresses |= {chunk.decoding.result().ctypes.data for chunk in chunks}
    assert len(addresses) == store.n_kept == 2


def test_a_closed_store(tmp_path: Path) -> None:
    store = small()
    store.close()
    with pytest.raises(errors.ClosedError, match="open it again"):
        gathered(store, [1])


def test_a_store_closed_while_a_chunk_is_decoded_keeps_none() -> None:
    store = small()
    store.wait = store.close
    assert gathered(store, [1]).tolist() == [[2, 3]]
    store.wait = pytest.fail
    with pytest.raises(errors.ClosedError):
        gathered(store, [1])
    assert not store._kept._chunks


def test_a_chunked_store_is_read_only() -> None:
    with pytest.raises(errors.WriteBackError, match="read-only"):
        small().scatter(np.array([0]), np.zeros((1, 2), np.float32))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_decodes_chunks_itself() -> None:
    """The thread that decodes a chunk at the moment of the fork does not exist in the child."""
    store = small()
    begun = threading.Event()
    decode = threading.Event()

    def wait() -> None:
        begun.set()
        assert decode.wait(30)

    store.wait = wait
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(gathered, store, [10])
        assert begun.wait(30)
        pid = os.fork()
        if pid == 0:
            store.wait = lambda: None
            os._exit(0 if gathered(store, [10]).tolist() == [[20, 21]] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        decode.set()
        call.result()


# ---- strategies ----------------------------------------------------------------------------------

N = 2000
BLOCKS = rows.block_shuffled(1, block_rows=100, window_blocks=4)


@pytest.fixture
def store() -> Iterator[Decoding]:
    array = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    found = Decoding(array, even_bounds(N, 25))
    yield found
    found.close()


def serve(strategy: Any, order: Order, array: np.ndarray, batch_size: int, epoch: int = 0) -> None:
    """Read an epoch as a feeder does, and compare its rows."""
    batches = OrderBatches(order, N, batch_size)
    windows, position, stop = batches.windows(epoch, 0)
    with strategy.open_epoch(windows, position, stop) as open_batch:
        for draw in batches.epoch(epoch, 0):
            numbers = draw.rows()
            part = open_batch(position, draw.n_rows)(numbers)
            position += draw.n_rows
            out = np.empty(part.shape, part.dtype)
            part.read(out)
            np.testing.assert_array_equal(out, array[numbers])


def test_a_window_decodes_each_chunk_once(store: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_MAX_KEPT", 1)
    store._init_process_state()
    for epoch in range(3):
        windows = known(BLOCKS).windows(N, epoch)
        assert windows is not None
        expected: Counter[int] = Counter()
        for window in windows.needed(0, N):
            touched: set[int] = set()
            for start, stop in window.runs:
                touched |= set(range(start // 25, (stop - 1) // 25 + 1))
            expected.update(touched)
        store.decoded.clear()
        strategy = BufferedReadahead(store, windows, 100)
        serve(strategy, BLOCKS, store.array, 60, epoch)
        strategy.close()
        # The chunk that one window decoded last may still be kept in the next one.
        assert store.decoded.keys() == expected.keys()
        assert store.decoded <= expected


@pytest.mark.parametrize("order", [rows.shuffled(1), BLOCKS, rows.sequential()], ids=str)
def test_a_copy_in_memory_decodes_each_chunk_once(
    store: Decoding, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_file, "CHUNK_BYTES", KiB(1))
    strategy = InMemoryCopy(store)
    for epoch in range(2):
        serve(strategy, order, store.array, 60, epoch)
    assert store.decoded == Counter(dict.fromkeys(range(80), 1))
    strategy.close()


def test_a_batch_is_gathered_chunk_by_chunk(
    store: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pinfeed.readahead.strategy._STEP_BYTES", 1000)
    serve(ChunkReads(store), rows.shuffled(1), store.array, N)
    assert set(store.decoded.values()) == {1}
    store.decoded.clear()
    serve(ChunkReads(store), rows.sequential(), store.array, 60)
    assert set(store.decoded.values()) == {1}


@pytest.mark.parametrize("stop", [N, 330])
def test_the_next_chunk_of_a_sequence_is_decoded_ahead(store: Decoding, stop: int) -> None:
    strategy = ChunkReads(store, in_sequence=True)
    ahead: queue.SimpleQueue[int] = queue.SimpleQueue()

    def decode_ahead(number: int) -> None:
        ChunkedStore.decode_ahead(store, number)
        ahead.put(number)

    store.decode_ahead = decode_ahead  # type: ignore[method-assign]
    following = 1
    with strategy.open_epoch(None, 0, stop) as open_batch:
        for start in range(0, stop, 10):
            wanted = np.arange(start, start + 10)
            part = open_batch(start, 10)(wanted)
            out = np.empty(part.shape, part.dtype)
            part.read(out)
            np.testing.assert_array_equal(out, store.array[wanted])
            # The last row is in the second half of a chunk, of 25 rows, and not of the last one.
            if start + 9 >= following * 25 - 13 and following < N // 25:
                assert ahead.get(timeout=30) == following
                following += 1
    assert ahead.empty()
    assert store.decoded == Counter(dict.fromkeys(range(following), 1))
    # The last batches may be read after the end of the epoch.
    late = open_batch(stop - 10, 10)(np.arange(stop - 10, stop))
    late.read(np.empty(late.shape, late.dtype))


def test_the_choice_of_a_strategy(store: Decoding) -> None:
    def chosen(order: Any, free: int) -> tuple[type, str]:
        plan = plan_reads([store], order, 100, FreeMemory(free, free))
        plan.strategies[0].close()
        return type(plan.strategies[0]), plan.notes[0]

    nbytes = N * 16
    assert chosen(rows.sequential(), KiB(64))[0] is CopyInSecondEpoch
    assert chosen(rows.sequential(), KiB(16))[0] is ChunkReads
    assert chosen(rows.shuffled(1), KiB(64))[0] is InMemoryCopy
    assert chosen(rows.per_rank(rows.shuffled(1), rank=0, world_size=3), KiB(64))[0] is ChunkReads
    strategy, note = chosen(BLOCKS, nbytes - 5000)
    assert strategy is BufferedReadahead
    assert note.startswith("x, 31.2 KiB: read ahead into buffers")
    strategy, note = chosen(BLOCKS, 5000)
    assert strategy is ChunkReads
    assert "read-ahead buffers need 24.0 KiB, but 4.9 KiB remain" in note
    strategy, note = chosen(rows.shuffled(1), 5000)
    assert strategy is ChunkReads
    assert "block_rows=100" in note


def test_rows_in_sequence_are_copied_in_the_second_epoch(store: Decoding) -> None:
    plan = plan_reads([store], rows.sequential(), 100, FreeMemory(KiB(64), KiB(64)))
    (strategy,) = plan.strategies
    assert plan.notes[0].endswith(
        "decoded in sequence, each chunk once; a second epoch loads it into RAM (it fits in the "
        "free memory)"
    )
    assert strategy.memory_rows_when_loaded() is not None
    for epoch, n_decodes in enumerate((1, 2, 2)):
        # The copy takes no time before the second epoch, and no decoding after it.
        assert strategy.memory_rows() is None or epoch == 2
        assert strategy.may_open_ahead is (epoch == 2)
        serve(strategy, rows.sequential(), store.array, 30, epoch)
        assert set(store.decoded.values()) == {n_decodes}
    assert strategy.memory_rows() is not None
    strategy.close()


@pytest.mark.parametrize("n_copies", [0, 1, 2])
def test_a_file_leaves_memory_to_the_next_ones(store: Decoding, n_copies: int) -> None:
    """A copy of one file would force each batch of another one to decode chunks."""
    other = Decoding(store.array.copy(), store.bounds)
    window = sum(item.total for item in BufferedReadahead(store, blocks(), 100).items)
    copy = InMemoryCopy(store)
    free = n_copies * copy.items[0].total + (2 - n_copies) * window
    plan = plan_reads([store, other], BLOCKS, 100, FreeMemory(free, free))
    found = [type(strategy) for strategy in plan.strategies]
    assert found.count(InMemoryCopy) == n_copies
    assert found.count(BufferedReadahead) == 2 - n_copies
    plan = plan_reads([store, other], BLOCKS, 100, FreeMemory(window, window))
    assert [type(strategy) for strategy in plan.strategies] == [BufferedReadahead, ChunkReads]


def blocks() -> Any:
    found = known(BLOCKS).windows(N, 0)
    assert found is not None
    return found


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("order", [rows.shuffled(1), BLOCKS, rows.sequential()], ids=str)
def test_epochs_under_a_limit_equal_those_of_the_array(
    order: Order, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.random.default_rng(0).integers(0, 255, (N, 1024), np.uint8)
    limit = Config(cpu_memory_limit=KiB(5500), preferred_batch_size=60, depth=depth).for_feeder()
    monkeypatch.setattr(chunked, "_RUN_BYTES", KiB(64))
    store = Decoding(array, even_bounds(N, 25))
    with Feeder(store, config=limit, rows=order, device="cpu") as feeder:
        assert feeder.plan.host_bytes <= KiB(5500)
        assert ("read ahead into buffers" in feeder.plan.notes[0]) is (order == BLOCKS)
        assert "into RAM" not in feeder.plan.notes[0]
        got = [batch.numpy().copy() for batch in feeder]
    with Feeder(array, batch_size=feeder.plan.batch_size, rows=order, depth=0, device="cpu") as one:
        expected = [batch.numpy().copy() for batch in one]
    assert len(got) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    store.close()


def test_a_limit_that_holds_no_windows_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_RUN_BYTES", KiB(64))
    store = Decoding(np.zeros((N, 1024), np.uint8), even_bounds(N, 25))
    # Three windows of 600 KiB take less than half of the limit, but the rest takes more.
    order = rows.block_shuffled(1, block_rows=150, window_blocks=4)
    limit = Config(cpu_memory_limit=KiB(4200), preferred_batch_size=60, depth=1).for_feeder()
    with Feeder(store, config=limit, rows=order, device="cpu") as feeder:
        assert "read-ahead buffers need 1.8 MiB" in feeder.plan.notes[0]
    store.close()


@pytest.mark.parametrize("order", [rows.shuffled(1), BLOCKS, rows.sequential()], ids=str)
def test_a_damaged_chunk_is_an_error_in_the_loop(store: Decoding, order: Order) -> None:
    def fail() -> None:
        store.failures = 1

    store.wait = fail
    with (
        Feeder(store, batch_size=60, rows=order, device="cpu") as feeder,
        pytest.raises(errors.ReadError, match="cannot be read"),
    ):
        next(iter(feeder))
