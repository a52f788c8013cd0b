"""Feeder: its batches, write-backs, plan, statistics and verification."""

import itertools
import json
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.feeders import DEPTHS, numbers
from support.unwrapped import unwrapped

from pinfeed import ArrayStore, Config, Feeder, MiB, NpyStore, errors
from pinfeed.devices.cpu import HostDevice
from pinfeed.tensors.numpy_torch import NUMPY
from pinfeed.testing import SimDevice
from pinfeed.testing.sim import lazy


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_in_order(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=32, depth=depth) as feeder:
        batches = list(feeder)
    assert [len(b) for b in batches] == [32, 32, 32, 4]
    assert all(isinstance(b, torch.Tensor) and b.dtype == torch.float32 for b in batches)
    np.testing.assert_array_equal(torch.cat(batches).numpy(force=True), x)


def test_structure_is_that_of_the_source(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.arange(100))
    Pair = namedtuple("Pair", "image label")
    source = {"a": (x, [torch.arange(100)]), "b": Pair(ArrayStore(x * 2), tmp_path / "y.npy")}
    with Feeder(source, batch_size=7, shuffle=True) as feeder:
        for batch in feeder.batches():
            assert list(batch.data) == ["a", "b"]
            assert isinstance(batch.data["a"], tuple)
            assert isinstance(batch.data["a"][1], list)
            assert isinstance(batch.data["b"], Pair)
            wanted = torch.from_numpy(batch.rows)
            assert torch.equal(batch.data["a"][1][0].cpu(), wanted)
            assert torch.equal(batch.data["b"].label.cpu(), wanted)
            assert torch.equal(batch.data["b"].image.cpu(), torch.from_numpy(x)[wanted] * 2)


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 3, 4, 5)], ids=str)
def test_every_dtype_and_rank(dtype: torch.dtype, row_shape: tuple[int, ...]) -> None:
    """Rows are read and written back, and some of them are forwarded."""
    # torch itself cannot index every dtype.
    want = torch.arange(20 * int(np.prod(row_shape))).reshape(20, *row_shape).remainder(120)
    # A copy of int64, too, because the writes of the loop reach the table in the background.
    table = want.to(dtype, copy=True)
    with Feeder(table, rows=[[0, 1, 2, 3], [3, 2, 10], [10, 3]]) as feeder:
        for batch in feeder.batches():
            chosen = torch.from_numpy(batch.rows)
            assert batch.data.dtype == dtype
            assert torch.equal(batch.data.cpu(), want[chosen].to(dtype))
            want[chosen] = want[chosen].flip(0)
            batch.write_back(want[chosen].to(dtype).to(batch.data.device))
    assert torch.equal(table, want.to(dtype))


def test_a_batch_belongs_to_the_user(x: np.ndarray) -> None:
    """A batch is an ordinary tensor: a leaf, writable, not a view of a larger one."""
    kept = x.copy()
    with Feeder(x, batch_size=10) as feeder:
        for batch in feeder:
            assert batch.is_leaf
            assert not batch._is_view()
            batch.requires_grad_().sum().backward()
            batch.detach().zero_()
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("depth", DEPTHS)
def test_kept_batches_stay(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=8, depth=depth) as feeder:
        kept = [list(feeder), list(feeder)]
    for epoch in kept:
        np.testing.assert_array_equal(torch.cat(epoch).numpy(force=True), x)


def test_dropped_batches_give_their_memory_to_later_ones(x: np.ndarray) -> None:
    with Feeder(x, batch_size=5, depth=1, device="cpu") as feeder:
        addresses = {batch.data_ptr() for batch in feeder}
    assert len(addresses) <= 3  # depth + 2


def test_len_and_drop_last(x: np.ndarray) -> None:
    with Feeder(x, batch_size=32) as feeder:
        assert len(feeder) == 4
    with Feeder(x, batch_size=32, drop_last=True) as feeder:
        assert len(feeder) == len(list(feeder)) == 3
    with Feeder(x, batch_size=1000) as feeder:
        assert [len(b) for b in feeder] == [100]


# ---- writing back --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", ["array", "file"])
def test_rows_written_back_equal_the_plain_loop(depth: int, kind: str, tmp_path: Path) -> None:
    """This runs on real threads; test_protocol.py runs the same under every schedule."""
    rng = np.random.default_rng(0)
    table, batches = rng.normal(size=(50, 4)), [rng.permutation(50)[:20] for _ in range(60)]
    want, seen = table.copy(), []
    for chosen in batches:
        seen.append(want[chosen])
        want[chosen] = want[chosen] * 0.5 + 1
    np.save(tmp_path / "t.npy", table)
    store: Any = ArrayStore(table) if kind == "array" else NpyStore(tmp_path / "t.npy", mode="r+")
    with Feeder(store, rows=batches, depth=depth) as feeder:
        for batch, expected in zip(feeder.batches(), seen, strict=True):
            np.testing.assert_array_equal(batch.data.numpy(force=True), expected)
            batch.write_back(batch.data.mul_(0.5).add_(1))
            batch.data.zero_()
        np.testing.assert_array_equal(
            table if kind == "array" else np.load(tmp_path / "t.npy"), want
        )
    store.close()


def test_writes_have_landed_after_break() -> None:
    table = np.zeros((10, 2))
    with Feeder(table, batch_size=2) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data + 1)
            if 5 in batch.rows:
                break
        assert table[:6].all()
        assert not table[6:].any()


def test_writes_can_be_flushed_in_the_loop() -> None:
    x = np.zeros((100, 2))
    with Feeder(x, batch_size=10, depth=3) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data + 1)
            feeder.flush_writes()
            assert (x[batch.rows] == 1).all()


def test_values_that_need_gradients_can_be_written() -> None:
    table = np.zeros((4, 2), np.float32)
    with Feeder(table, batch_size=4) as feeder:
        for batch in feeder.batches():
            batch.write_back(torch.ones_like(batch.data, requires_grad=True))
    assert table.all()


# ---- plan, statistics ----------------------------------------------------------------------------


def test_the_plan_sizes_the_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5000, 256), np.float32))
    with Feeder(tmp_path / "x.npy", config=Config(cpu_memory_limit=MiB(10))) as feeder:
        assert feeder.plan.host_bytes <= MiB(10)
        assert {len(batch) for batch in feeder} == {
            feeder.plan.batch_size,
            5000 % feeder.plan.batch_size,
        }
        assert "(limit 10.0 MiB)" in str(feeder.plan)
    with (
        Feeder(tmp_path / "x.npy", batch_size=10) as feeder,
        pytest.raises(errors.BudgetError, match=r"cpu_memory_limit is 1\.0 KiB"),
    ):
        Feeder(tmp_path / "x.npy", config=Config(cpu_memory_limit=1024))


def test_the_bound_of_a_batch_leaves_whole_batches_alone() -> None:
    config = Config(cpu_memory_limit=MiB(64))
    x = np.zeros((100_000, 1), np.float32)
    with Feeder(x, config=config, device="cpu") as feeder:
        assert feeder.plan.batch_size == 1 << 16
        assert (
            "batches have 65,536 rows, because larger ones move no more rows per second; "
            "set preferred_batch_size for larger batches" in unwrapped(feeder.plan)
        )
    with Feeder(x, config=config, rows=[np.arange(90_000)], device="cpu") as feeder:
        assert [len(batch) for batch in feeder] == [90_000]


def test_depth_goes_before_that_of_the_config(x: np.ndarray) -> None:
    config = Config(cpu_memory_limit=MiB(10), depth=4)
    with Feeder(x, config=config) as feeder:
        assert feeder.plan.depth == 4
    with Feeder(x, config=config, depth=0) as feeder:
        assert (feeder.plan.depth, feeder.plan.n_slots) == (0, 1)


def test_batches_larger_than_planned_are_refused(x: np.ndarray) -> None:
    def endless() -> Any:
        yield from ([i] for i in range(3))
        yield list(range(100))

    with Feeder(
        x, rows=endless(), config=Config(cpu_memory_limit=MiB(8), preferred_batch_size=20)
    ) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(errors.ArgumentError, match="100 rows; expected at most 20"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_statistics(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=10, depth=depth, timeline=True) as feeder:
        for _ in range(2):
            for batch in feeder.batches():
                batch.write_back(batch.data)
        stats = feeder.stats
        assert (stats.batches, stats.rows, stats.bytes) == (20, 200, 2 * x.nbytes)
        assert 0 < stats.wait_s <= stats.seconds
        assert 0 < stats.starved <= 1
        assert stats.read_s > 0
        assert stats.write_s > 0
        assert "20 batches, 200 rows" in str(stats)
        lanes = [span.lane for span in feeder.timeline.spans]
        assert all(lanes.count(lane) == 20 for lane in ("read", "wait", "compute", "write"))


def test_the_timeline_can_be_saved(x: np.ndarray, tmp_path: Path) -> None:
    with Feeder(x, batch_size=10, timeline=True) as feeder:
        with pytest.raises(errors.ArgumentError, match="empty"):
            feeder.timeline.save(tmp_path / "t.json")
        list(feeder)
        feeder.timeline.save(tmp_path / "t.json")
        feeder.timeline.save(tmp_path / "t.png")
        end = max(span.end_s for span in feeder.timeline.spans)
        # Spans that began before are cut, not left out.
        feeder.timeline.save(tmp_path / "last.json", last_s=end / 1000)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"].split()[0] for event in events} >= {"read", "wait", "compute"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    events = [
        event
        for event in json.loads((tmp_path / "last.json").read_text())["traceEvents"]
        if event["ph"] != "M"
    ]
    assert events
    assert min(event["ts"] for event in events) >= end * 0.998e6
    with (
        Feeder(x, batch_size=10) as feeder,
        pytest.raises(errors.ArgumentError, match="timeline=True"),
    ):
        _ = feeder.timeline


def test_progress(x: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    with Feeder(x, batch_size=10, progress=True) as feeder:
        list(feeder)
    assert "10/10" in capsys.readouterr().err


def test_each_loop_in_a_thread_of_its_own(x: np.ndarray) -> None:
    def run(i: int) -> None:
        with Feeder(x, batch_size=7, shuffle=True, seed=i) as feeder:
            results[i] = sorted(itertools.chain(*numbers(feeder)))

    results: dict[int, list[int]] = {}
    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == list(range(100)) for i in range(4))


class Broken(ArrayStore):
    """Rows, one of which cannot be read the first ``times`` times."""

    def __init__(self, array: np.ndarray, row: int, times: float) -> None:
        super().__init__(array)
        self.row = row
        self.times = times

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        if self.row in rows and self.times > 0:
            self.times -= 1
            raise OSError(f"row {self.row}")
        super().gather(rows, out)


# ---- small batches that are gathered together ----------------------------------------------------


@pytest.mark.parametrize("row", [0, 10, 47, 79, 80, 333, 999])
def test_the_loop_receives_all_batches_before_an_error(row: int) -> None:
    array = np.arange(1000.0)[:, None]
    array.flags.writeable = False
    with Feeder(Broken(array, row, np.inf), batch_size=10) as feeder:
        assert feeder.plan.depth > 8
        given: list[float] = []
        with pytest.raises(OSError, match=f"row {row}"):
            for x in feeder:
                given += x[:, 0].tolist()
        assert given == list(range(row // 10 * 10))


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_that_does_not_repeat_is_still_raised(times: int) -> None:
    with (
        Feeder(Broken(np.arange(1000.0), 333, times), batch_size=10) as feeder,
        pytest.raises(OSError, match="row 333"),
    ):
        list(feeder)


def test_batches_that_were_gathered_together_are_each_ones_own() -> None:
    array = np.arange(300.0)[:, None]
    with Feeder(array, batch_size=10) as feeder:
        batches = list(feeder)
        for x in batches[::2]:
            version = batches[1]._version
            x.add_(1)
            assert batches[1]._version == version, (
                "autograd would take it for a change of the other one"
            )
            assert not x._is_view()
    assert [x[0, 0].item() for x in batches] == [10.0 * i + (i % 2 == 0) for i in range(30)]


@pytest.mark.parametrize("batch_size", [1, 7, 10, 64])
def test_a_state_counts_batches_and_not_groups(batch_size: int) -> None:
    array = np.arange(200.0)
    for stop in (1, 3, 8, 9):
        with Feeder(array, batch_size=batch_size, shuffle=True) as feeder:
            whole = [x.tolist() for x in feeder]
        with Feeder(array, batch_size=batch_size, shuffle=True) as feeder:
            for i, _ in enumerate(feeder, 1):
                if i == min(stop, len(whole)):
                    state = feeder.state_dict()
                    break
        with Feeder(array, batch_size=batch_size, shuffle=True) as feeder:
            feeder.load_state_dict(state)
            assert feeder.epoch == (stop >= len(whole))
            rest = [x.tolist() for x in feeder]
            assert rest == whole[stop:] if stop < len(whole) else len(rest) == len(whole)


def test_the_plan_says_why_rows_take_their_route() -> None:
    asked: list[Any] = []

    class Choosing(HostDevice):
        def choose_route(self, stores: Any, wanted: str | None, default: str) -> str:
            asked.append((len(stores), wanted, default))
            return "because it cannot"

    array = np.zeros((100, 2))
    for options in (
        {"batch_size": 10},
        {"batch_size": 10, "route": "staged"},
        {"rows": [np.arange(7), np.arange(3)]},
    ):
        with Feeder(array, device=Choosing(), **options) as feeder:  # type: ignore[arg-type]
            assert feeder.plan.notes[0] == "because it cannot"
            assert str(feeder.plan).splitlines()[-1] == "because it cannot"
    assert asked == [(1, None, "staged"), (1, "staged", "staged"), (1, None, "staged")]
    for route in ("direct", "staged"):
        with Feeder(array, batch_size=10, device="cpu", route=route) as feeder:
            assert feeder.plan.notes[0] == (
                f"route={route!r} has no effect, because batches are on the CPU"
            )
    with Feeder(array, batch_size=10, device="cpu", host_transform=torch.abs) as feeder:
        assert "has no effect" not in unwrapped(feeder.plan), "the user gave no route"
    with pytest.raises(
        errors.ArgumentError, match="route='fast': expected 'direct', 'staged' or None"
    ):
        Feeder(array, batch_size=10, route="fast")


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_sampler_that_reuses_its_array(kind: str, depth: int) -> None:
    """The sampler fills one array again for every batch, to save allocations."""
    x = np.arange(100.0)
    batches = [np.arange(i, i + 5) for i in range(0, 90, 7)]

    class Sampler:
        def __iter__(self) -> Any:
            own = np.empty(5, np.int64)
            for batch in batches:
                own[:] = batch
                yield own if kind == "numpy" else torch.from_numpy(own)

    with Feeder(x, rows=Sampler(), batch_size=None, depth=depth, device="cpu") as feeder:
        for batch, want in zip(feeder.batches(), batches, strict=True):
            np.testing.assert_array_equal(batch.rows, want)
            np.testing.assert_array_equal(batch.data.numpy(), x[want])
            batch.write_back(batch.data + 1)
    for batch in batches:
        assert (x[batch] == np.arange(100.0)[batch] + 1).all()


# ---- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("change", [0.5, np.nan])
def test_rows_that_the_training_step_changes_itself_are_noticed(depth: int, change: float) -> None:
    """Prefetched batches do not see the change, and only ``verify`` reports that."""
    prefetched = threading.Event()

    class Told(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            super().gather(rows, out)
            if 10 in rows:
                prefetched.set()

    a, b = np.arange(200.0).reshape(100, 2), np.ones(100, np.float32)
    with Feeder(
        {"a": Told(a), "b": b}, batch_size=10, depth=depth, verify=True, device="cpu"
    ) as feeder:
        loop = iter(feeder)
        next(loop)
        prefetched.wait()
        a[13] *= change
        a[17] *= change
        with pytest.raises(
            errors.VerificationError, match=r"batch 1: 2 of 10 rows of source\['a'\] .* row 13,"
        ):
            next(loop)
        assert len(list(feeder)) == 10


def test_a_batch_of_another_device_is_verified() -> None:
    a = np.arange(40.0)
    with Feeder(a, batch_size=4, verify=True, device=SimDevice(lazy)) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
        loop = iter(feeder)
        next(loop)
        next(loop)
        a += 1
        with pytest.raises(errors.VerificationError, match="batch 2: 4 of 4 rows"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_expected_changes_pass_verification(depth: int) -> None:
    """Write-backs, a row in several batches, NaN, bfloat16 and rows without bytes are no error.

    At depth 0, no change of a store is an error.
    """
    x = torch.full((40, 3), torch.nan, dtype=torch.bfloat16)
    y = torch.zeros(40)
    order = [rows % 40 for rows in np.random.default_rng(0).integers(0, 40, (30, 1)) + np.arange(8)]
    with Feeder(
        (x, y, np.empty((40, 0))), rows=order, depth=depth, verify=True, device="cpu"
    ) as feeder:
        for batch in feeder.batches():
            batch.write_back((None, batch.data[1] + 1, None))
            if depth == 0:
                x += 1
    assert y.sum() == 30 * 8
