"""Loops whose rows an engine gathers: equal batches, and every way in which a loop can end."""

import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.internals import runner_of
from support.programs import Programs

import pinfeed
from pinfeed.native import library as native
from pinfeed.pipeline.engine_loop import EngineLoop
from pinfeed.pipeline.prefetch_loop import PrefetchLoop
from pinfeed.rows.orders import Drawn, Sequential, Shuffled

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())


def loop_of(feeder: Any) -> Any:
    return runner_of(feeder)._last_loop


def feeder_of(source: Any, **options: Any) -> Any:
    return pinfeed.Feeder(source, **{"device": "cpu", "depth": 2, "batch_size": 7} | options)


def arrays(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    wide = rng.normal(size=(n, 40)).astype(np.float32)
    return {
        "floats": wide,
        "bits": rng.integers(2, size=n).astype(bool),
        "half": rng.normal(size=(n, 3, 2)).astype(ml_dtypes.bfloat16),
        "part": wide[:, 5:9],
        "labels": torch.arange(n),
    }


def equal(x: Any, y: Any) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    depth=st.integers(1, 5),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    drop_last=st.booleans(),
    start=st.integers(0, 5),
)
def test_batches_equal_those_of_the_synchronous_loop(
    n: int, batch_size: int, depth: int, seed: int | None, drop_last: bool, start: int
) -> None:
    rows = pinfeed.rows.sequential() if seed is None else pinfeed.rows.shuffled(seed)
    source = arrays(n)
    found = []
    for d in (0, depth):
        with feeder_of(
            source, batch_size=batch_size, rows=rows, drop_last=drop_last, depth=d
        ) as feeder:
            found.append([list(feeder), list(feeder)])
            loop = iter(feeder)
            for _ in range(start):
                next(loop, None)
            state = feeder.state_dict()
            del loop
            feeder.load_state_dict(state)
            found[-1].append(list(feeder))
    for epoch, expected in zip(found[1], found[0], strict=True):
        assert len(epoch) == len(expected)
        assert all(map(equal, epoch, expected))


@pytest.mark.parametrize("depth", [0, 2, None])
def test_numpy_gives_the_same_batches(depth: int | None, request: pytest.FixtureRequest) -> None:
    source = arrays(100)
    found = []
    for _ in range(2):
        with feeder_of(source, depth=depth, shuffle=True) as feeder:
            found.append(list(feeder))
        request.getfixturevalue("without_native")
    assert len(found[0]) == 15
    assert all(map(equal, *found))


def test_the_plan_says_that_the_compiled_part_was_not_built(
    monkeypatch: pytest.MonkeyPatch, without_native: None
) -> None:
    monkeypatch.delenv(native.SWITCH)
    monkeypatch.setattr(native, "PATH", Path("missing"))
    native.why_not.cache_clear()
    with feeder_of(arrays(100)) as feeder:
        assert "numpy copies rows" in feeder.plan.notes[-1]
        assert "no C compiler was found" in feeder.plan.notes[-1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_several_files_are_read_like_one_array(tmp_path: Path, shuffle: bool) -> None:
    arrays = [np.random.default_rng(n).normal(size=(n, 6)) for n in (100, 1, 700, 35)]
    paths = [str(tmp_path / f"{i}.npy") for i in range(4)]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    whole = torch.from_numpy(np.concatenate(arrays))
    source = {"x": pinfeed.NpyStore(paths), "row": np.arange(836)}
    with feeder_of(source, shuffle=shuffle) as feeder:
        for _ in range(2):
            batches = list(feeder)
            rows = torch.cat([batch["row"] for batch in batches])
            assert torch.equal(rows.sort().values, torch.arange(836))
            assert torch.equal(torch.cat([batch["x"] for batch in batches]), whole[rows])
        assert isinstance(loop_of(feeder), EngineLoop)


@pytest.mark.parametrize(("shuffle", "n_loads"), [(True, 1), (False, 2)])
def test_a_copy_is_read_by_an_engine_once_it_is_loaded(shuffle: bool, n_loads: int) -> None:
    columns = {name: np.arange(100.0) + 1000 * i for i, name in enumerate("ab")}
    want = np.column_stack(list(columns.values()))
    order = pinfeed.rows.shuffled(3) if shuffle else pinfeed.rows.sequential()
    with feeder_of(pinfeed.MatrixStore(columns), depth=None, rows=order) as feeder:
        for epoch in range(4):
            rows = order.bind(100, epoch)(np.arange(100))
            found = torch.cat(list(feeder)).numpy()
            np.testing.assert_array_equal(found, want[rows])
            assert isinstance(loop_of(feeder), EngineLoop) is (epoch >= n_loads)
        assert feeder.stats.depth == 31


@pytest.mark.parametrize(
    ("rows", "has_reader"), [(Sequential(), False), (Shuffled(0), False), (Drawn(50, 0), True)]
)
def test_a_thread_draws_only_slow_orders(rows: Any, has_reader: bool) -> None:
    with feeder_of(np.arange(50), rows=rows) as feeder:
        for _ in feeder:
            assert isinstance(loop_of(feeder), EngineLoop)
            names = {thread.name.rpartition("_")[0] for thread in threading.enumerate()}
            assert ("pinfeed-read" in names) == has_reader


def test_a_span_of_row_indices_has_whole_batches() -> None:
    source = np.arange(100_000)
    for batch_size in (999, 16_384, 16_385, 60_000):
        with feeder_of(source, batch_size=batch_size, shuffle=True, depth=1) as feeder:
            batches = list(feeder)
            assert isinstance(loop_of(feeder), EngineLoop)
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert torch.equal(torch.cat(batches).sort().values, torch.from_numpy(source))


def test_a_source_may_have_many_columns() -> None:
    with feeder_of({f"c{i}": np.arange(50) + i for i in range(300)}, shuffle=True) as feeder:
        batches = list(feeder)
        assert isinstance(loop_of(feeder), EngineLoop)
    for i in (0, 299):
        column = torch.cat([batch[f"c{i}"] for batch in batches]).sort().values
        assert torch.equal(column, torch.arange(50) + i)


def test_a_store_that_was_read_can_be_pickled() -> None:
    store = pinfeed.ArrayStore(np.zeros((1000, 1000)))
    with feeder_of(store, batch_size=500) as feeder:
        list(feeder)
    assert pickle.loads(pickle.dumps(store)).n_rows == 1000


def test_an_array_may_change_its_shape_between_loops() -> None:
    array = np.arange(2_000_000.0).reshape(2000, 1000)
    store = pinfeed.ArrayStore(array)
    out = np.empty((2000, 1000))
    store.gather(np.arange(2000), out)
    array.shape = (4000, 500)
    out = np.empty((4000, 500))
    store.gather(np.arange(4000)[::-1], out)
    np.testing.assert_array_equal(out, array[::-1])


def test_an_ended_loop_keeps_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((1000, 100)))
    feeder = feeder_of(path)
    for _ in feeder:
        break
    assert not loop_of(feeder)._engine._memory
    assert str(path) in Path("/proc/self/maps").read_text()
    feeder.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


class FailingOrder(Sequential):
    """An order that fails in its second span."""

    def bind(self, n_rows: int, epoch: int) -> Any:
        def at(positions: Any) -> Any:
            if positions[0]:
                raise ZeroDivisionError
            return positions

        return at


@pytest.mark.parametrize("depth", [2, None])
def test_batches_before_an_error_of_the_order_come_first(depth: int | None) -> None:
    n = 0
    with feeder_of(np.zeros(40_000), batch_size=1000, depth=depth, rows=FailingOrder()) as feeder:
        with pytest.raises(ZeroDivisionError):
            for _ in feeder:
                n += 1
        assert isinstance(loop_of(feeder), EngineLoop)
    assert n in (15, 16)


class OtherRows(pinfeed.ArrayStore):
    """A subclass whose rows are not those of its array."""

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        out *= 2


class UncheckedRows(pinfeed.ArrayStore):
    """A subclass that replaces only the gather without checks."""

    def gather_unchecked(self, rows: Any, out: Any) -> None:
        super().gather_unchecked(rows, out)
        out *= 2


def test_loops_that_need_more_are_not_gathered_by_an_engine(tmp_path: Path) -> None:
    array = np.arange(100.0)
    for source, options in (
        (OtherRows(array), {}),
        (UncheckedRows(array), {}),
        (array, {"rows": [np.array([3, 4]), np.array([5])], "batch_size": None}),
        (array, {"host_transform": lambda batch: batch}),
    ):
        with feeder_of(source, **options) as feeder:
            list(feeder)
            assert not isinstance(loop_of(feeder), EngineLoop)
    with feeder_of(array) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
        assert isinstance(loop_of(feeder), PrefetchLoop)
        list(feeder)
        assert isinstance(loop_of(feeder), EngineLoop)


def test_kept_batches_stay_as_they_are() -> None:
    source = np.arange(5000)
    with feeder_of(source, batch_size=10, shuffle=True) as feeder:
        kept = list(feeder)
        copies = [batch.clone() for batch in kept]
        for _ in range(3):
            for batch in feeder:
                batch.zero_()
        assert all(map(torch.equal, kept, copies))


def leave_by_break(feeder: Any) -> None:
    for _ in feeder:
        break


def leave_by_error(feeder: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in feeder:
            raise ZeroDivisionError


def leave_by_close(feeder: Any) -> None:
    next(iter(feeder))
    feeder.close()


def leave_by_collection(feeder: Any) -> None:
    loop = iter(feeder)
    next(loop)
    ring: list[Any] = [loop]
    ring.append(ring)
    del loop, ring
    gc.collect()


def has_no_more_threads(than: int) -> bool:
    """Return whether threads have ended; the system removes a joined thread a bit later."""
    deadline_s = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > than and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return len(os.listdir("/proc/self/task")) <= than


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_error, leave_by_close, leave_by_collection]
)
def test_no_thread_outlives_a_loop_that_was_left(leave: Any) -> None:
    before = len(os.listdir("/proc/self/task"))
    feeder = feeder_of(np.zeros((1000, 100)))
    leave(feeder)
    gc.collect()
    assert has_no_more_threads(before)
    feeder.close()


def test_another_thread_may_close_the_feeder() -> None:
    for _ in range(20):
        feeder = feeder_of(np.zeros((10_000, 64), np.float32), batch_size=100)
        next(iter(feeder))
        closer = threading.Thread(target=feeder.close)
        closer.start()
        with pytest.raises(pinfeed.errors.ClosedError):
            while True:
                # A loop that is closed never ends as if it had seen all rows.
                assert sum(1 for _ in feeder) == 100
        closer.join()


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_interrupts_end_the_loop() -> None:
    before = len(os.listdir("/proc/self/task"))
    feeder = feeder_of(np.zeros((200_000, 64), np.float32), batch_size=5000, shuffle=True)
    for i in range(10):
        has_ended = threading.Event()
        timer = threading.Thread(target=interrupt, args=(0.002 * i, has_ended))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                for _ in feeder:
                    pass
        has_ended.set()
        timer.join()
        gc.collect()
        assert has_no_more_threads(before)
    assert len(list(feeder)) == 40
    feeder.close()


def interrupt(after_s: float, has_ended: threading.Event) -> None:
    """Interrupt the main thread; again if Python ignores the error, as in a weakref's callback."""
    while not has_ended.wait(after_s):
        signal.raise_signal(signal.SIGINT)
        after_s = 1.0


def test_a_fork_cannot_continue_the_loop() -> None:
    feeder = feeder_of(np.arange(1000.0))
    loop = iter(feeder)
    next(loop)
    child = os.fork()
    if not child:
        code = 1
        try:
            next(loop)
        except pinfeed.errors.ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert sum(len(batch) for batch in loop) == 993
    feeder.close()


def test_a_program_may_end_within_a_loop(programs: Programs) -> None:
    program = """
import numpy as np
import pinfeed
feeder = pinfeed.Feeder(np.zeros((100_000, 64)), batch_size=1000, depth=3, device="cpu")
loop = iter(feeder)
next(loop)
print("ends")
"""
    done = programs.run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_nested_loops_over_one_array() -> None:
    source = np.arange(60)
    with feeder_of(source) as outer, feeder_of(source, shuffle=True) as inner:
        for batch in outer:
            assert int(sum(part.sum() for part in inner)) == source.sum()
            assert torch.equal(batch, torch.from_numpy(source[batch]))


def test_the_statistics_and_the_timeline_count_the_copies() -> None:
    with feeder_of(np.zeros((700, 1000)), timeline=True) as feeder:
        list(feeder)
        reads = [span for span in feeder.timeline.spans if span.lane == "read"]
        stats = feeder.stats
    assert [span.batch for span in reads] == list(range(100))
    assert (stats.batches, stats.rows, stats.bytes) == (100, 700, 700 * 8000)
    assert stats.read_s >= sum(span.end_s - span.start_s for span in reads) * 0.99
    assert stats.depth == 2
