"""Statistics: counters, the bottleneck of a loop, and the progress bar."""

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.internals import counters_of
from support.simulated_loops import Clock, simulated
from support.unwrapped import unwrapped

from pinfeed import ArrayStore, Feeder
from pinfeed.pipeline.cache_transfer import CacheTransfer
from pinfeed.pipeline.forwarding import HeldValues, WriteLog
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.write_queue import WriteQueue
from pinfeed.pipeline.writer import PendingWrite
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.progress_bar import ProgressBar
from pinfeed.profiling.stats import VERDICTS, FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.testing import SimDevice, favour


def test_statistics_of_an_interval_as_a_dict() -> None:
    with Feeder(np.zeros((100, 3), np.float32), batch_size=10, device="cpu") as feeder:
        list(feeder)
        earlier = feeder.stats
        list(feeder)
        lately = feeder.stats - earlier
    assert (lately.batches, lately.rows, lately.bytes) == (10, 100, 1200)
    assert 0 < lately.seconds < feeder.stats.seconds
    found = lately.as_dict()
    assert found["rows_per_s"] == 100 / lately.seconds
    assert all(isinstance(value, (int, float)) for value in found.values())
    units = ("batches", "rows", "bytes", "_s", "_percent")
    assert all(key.endswith(units) for key in found)
    assert {"memory_peak_bytes", "starved_percent", "wait_s", "compute_s"} <= found.keys()
    assert not any(key.startswith("cache") for key in found)


def test_statistics_are_wrapped_at_80_columns() -> None:
    stats = FeederStats(batches=10, rows=100, seconds=2.0, wait_s=2.0, starved_s=2.0, read_s=4.0)
    first, *others = str(stats).splitlines()
    assert first.startswith("10 batches, 100 rows in 2.00 s")
    assert others
    assert all(line.startswith("  ") for line in others)
    assert max(map(len, (first, *others))) <= 80
    assert unwrapped(stats).endswith(f"; {stats.verdict}")


def test_statistics_of_transforms() -> None:
    stats = FeederStats(batches=10, rows=100, host_transform_s=0.02, device_transform_s=0.0005)
    text = "host_transform 2 ms, device_transform 50 µs"
    assert f"; transforms, per batch: {text}; memory of the process: " in unwrapped(stats)
    assert stats.as_dict()["host_transform_s"] == 0.02
    assert (stats - stats).as_dict()["device_transform_s"] == 0.0
    assert "transforms" not in str(FeederStats(batches=10))


def test_statistics_of_caches() -> None:
    without = FeederStats(batches=20, rows=200)
    assert "cache" not in unwrapped(without)
    assert without.cache_hit_rate == 0
    counts = {"cache_lookups": 8000, "cache_hits": 6000}
    counts |= {"cache_rows_written": 1800, "cache_bytes_read": 20480, "cache_bytes_written": 18432}
    stats = dataclasses.replace(without, **counts)
    text = (
        "75% of the rows of batches were in the cache; on average, a batch read 100 rows "
        "(1.0 KiB) and wrote 90 (922 B)"
    )
    assert f"; cache: {text}; memory of the process: " in unwrapped(stats)
    found = stats.as_dict()
    assert found["cache_hit_percent"] == 75
    assert found["cache_read_rows"] == 2000
    assert found["cache_written_bytes"] == 18432


@pytest.mark.parametrize(("fast", "is_starved"), [(("read",), False), (("read", "compute"), True)])
def test_a_wait_counts_only_where_the_device_has_nothing_to_do(
    fast: tuple[str, ...], is_starved: bool
) -> None:
    feeder, _, device = simulated(favour(*fast), gather_s=1.0, n=8)
    for batch in feeder:
        device.launch(lambda _: None, batch)
    stats = feeder.stats
    feeder.close()
    assert stats.wait_s == stats.read_s == 8.0
    assert (stats.starved > 0.5) == is_starved
    assert stats.asynchronous


# Waiting costs nothing while the values are still being computed.
@pytest.mark.parametrize(("fast", "counted_s"), [(("compute",), 4.0), ((), 0.0)])
def test_waiting_for_write_backs_is_seen(fast: tuple[str, ...], counted_s: float) -> None:
    class OtherThreads(LoopThreads):
        # The simulated writer runs in the thread that waits for it.
        is_inside = False

    clock = Clock()
    device = SimDevice(favour(*fast), now=clock)
    counters = Counters(timeline=Timeline(), now=clock)
    stream = device.current_stream()
    log: WriteLog = WriteLog()
    transfer: Any = SimpleNamespace(
        counters=counters,
        device=device,
        log=log,
        caches=CacheTransfer(counters),
        begin_write=lambda pending, earlier: None,
        finish_write=lambda pending, scatter_all: clock.pass_s(1.0),
    )
    threads = OtherThreads(device, PrefetchSchedule(1), is_named=False)
    write_queue = WriteQueue(transfer, threads, limit=1)
    counters.enter(1, 1, asynchronous=True)
    for batch in range(5):
        write = log.append(batch, [], HeldValues([], stream, stream.record()))
        write_queue.add(PendingWrite(batch, write, [], log), check=True)
    write_queue.finish()
    threads.join_writers()
    assert counters.stats().write_wait_s == counted_s
    assert counters.timeline is not None
    spans = [(span.lane, span.batch, span.end_s - span.start_s) for span in counters.timeline.spans]
    assert spans == [("write_wait", batch, 1.0) for batch in range(1, 5)]


@pytest.mark.parametrize(("fast", "counted_s"), [(("read", "compute"), 3.0), ((), 0.0)])
def test_without_depth_a_loop_waits_for_each_write_back(
    fast: tuple[str, ...], counted_s: float
) -> None:
    class Slow(ArrayStore):
        def scatter(self, rows: Any, values: Any) -> None:
            clock.pass_s(1.0)
            super().scatter(rows, values)

    clock = Clock()
    with Feeder(
        Slow(np.zeros((30, 3))),
        batch_size=10,
        depth=0,
        device=SimDevice(favour(*fast), now=clock),
        timeline=True,
    ) as feeder:
        counters_of(feeder).now = clock
        for batch in feeder.batches():
            batch.write_back(batch.data)
        assert (feeder.stats.write_wait_s, feeder.stats.compute_s) == (counted_s, 3.0 - counted_s)
        waits = [span.batch for span in feeder.timeline.spans if span.lane == "write_wait"]
        assert waits == [0, 1, 2]


def test_readers_that_the_device_holds_up() -> None:
    """A copy takes the read stream a second; only the second round of slots waits for it."""

    class Copying(SimDevice):
        def copy(self, src: Any, dst: Any, stream: Any) -> None:
            super().copy(src, dst, stream)
            stream._enqueue(lambda: clock.pass_s(1.0))

    clock = Clock()
    device = Copying(favour("compute"), now=clock)
    with Feeder(np.zeros((100, 3), np.float32), batch_size=10, depth=2, device=device) as feeder:
        counters_of(feeder).now = clock
        for batch in feeder:
            device.launch(lambda _: None, batch)
        assert feeder.stats.copy_wait_s >= 5.0
        assert feeder.stats.read_s == 0.0


BASE: dict[str, Any] = {
    "batches": 100,
    "rows": 25_600,
    "bytes": 100 << 20,
    "seconds": 10.0,
    "depth": 2,
    "n_readers": 2,
}


CAUSES: list[tuple[str, dict[str, Any]]] = [
    ("computing", {"wait_s": 0.2, "read_s": 3.0}),
    ("reading", {"wait_s": 6.0, "read_s": 19.0, "late": 98}),
    # The loop computes nothing.
    ("reading", {"wait_s": 9.8, "read_s": 19.0}),
    ("reading", {"wait_s": 9.8, "read_s": 19.0, "asynchronous": True}),
    ("reading", {"wait_s": 6.0, "read_s": 14.0, "host_transform_s": 6.5}),
    ("reading", {"wait_s": 6.0, "read_s": 6.0, "first_batch_s": 4.0, "depth": 0}),
    ("unevenness", {"wait_s": 4.0, "read_s": 8.0, "late": 12}),
    ("unevenness", {"wait_s": 4.0, "read_s": 4.0, "host_transform_s": 2.0}),
    ("copying", {"wait_s": 6.0, "read_s": 1.0, "copy_wait_s": 14.0, "asynchronous": True}),
    ("copying", {"wait_s": 6.0, "read_s": 1.0, "copy_wait_s": 3.0, "depth": 0}),
    ("writing", {"wait_s": 0.5, "read_s": 1.0, "write_wait_s": 5.0, "write_s": 9.9}),
    ("writing", {"read_s": 1.0, "write_wait_s": 5.0, "depth": 0}),
    ("overhead", {"wait_s": 0.5, "overhead_s": 1.5, "read_s": 8.0, "late": 12}),
    ("start", {"wait_s": 4.0, "first_batch_s": 3.5, "read_s": 8.0}),
    ("host_transform", {"wait_s": 6.0, "read_s": 4.0, "host_transform_s": 7.0}),
    # Two threads read, and one at a time calls the function.
    ("host_transform", {"wait_s": 6.0, "read_s": 12.0, "host_transform_s": 8.0}),
    (
        "reading",
        {"wait_s": 6.0, "read_s": 12.0, "host_transform_s": 8.0, "n_transform_threads": 2},
    ),
    ("device_transform", {"wait_s": 6.0, "read_s": 2.0, "device_transform_s": 8.0}),
    ("device_transform", {"wait_s": 6.0, "host_transform_s": 4.0, "device_transform_s": 5.0}),
]


@pytest.mark.parametrize(("cause", "counted"), CAUSES)
def test_the_verdict_names_the_slow_stage(cause: str, counted: dict[str, Any]) -> None:
    waits = ("wait_s", "overhead_s", "write_wait_s")
    starved_s = sum(counted.get(name, 0.0) for name in waits)
    found = FeederStats(**{**BASE, "starved_s": starved_s, **counted})
    assert found.bottleneck == cause
    _, _, advice = VERDICTS[found.bottleneck].partition("; ")
    if found.depth == 0 and cause != "writing":
        advice = "compare depth=2, which does this work during the training step"
    assert found.verdict.startswith(f"the loop waited {10 * starved_s:.0f}% of the time: ")
    assert found.verdict.endswith(f"; {advice}")
    assert VERDICTS.keys() == {name for name, _ in CAUSES}


def test_the_depth_is_known_before_the_first_loop() -> None:
    with Feeder(np.zeros((1000, 2)), batch_size=10, depth=7) as feeder:
        assert feeder.stats.depth == 7


def test_without_a_loop_there_is_no_verdict() -> None:
    assert FeederStats().verdict == "no loop has run"


def test_the_progress_bar_shows_recent_rates() -> None:
    counted = FeederStats(seconds=2.0)
    bar = ProgressBar(total=10, stats=lambda: counted, file=io.StringIO())
    counted = FeederStats(
        batches=4, rows=40_000, bytes=3 * 10**9, seconds=5.0, wait_s=1.5, starved_s=1.5
    )
    assert bar.format_dict["postfix"] == "13k rows/s, 1.00 GB/s, waited 50%"
    counted = FeederStats(
        batches=8, rows=41_000, bytes=3 * 10**9, seconds=6.0, wait_s=1.5, starved_s=1.5
    )
    assert bar.format_dict["postfix"] == "1,000 rows/s, waited 0%", "nothing was moved"
    counted = FeederStats(
        batches=9, rows=42_000, bytes=3 * 10**9, seconds=6.5, wait_s=2.0, starved_s=2.0
    )
    # A rate over half a second is not shown.
    assert bar.format_dict["postfix"] == "1,000 rows/s, waited 0%"
    bar.close()


def test_a_feeder_shows_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Feeder(
        np.zeros((100, 3), np.float32), batch_size=10, device="cpu", progress=True
    ) as feeder:
        list(feeder)
    shown = capsys.readouterr().err
    assert "10/10" in shown
    assert "rows/s" in shown


@pytest.mark.parametrize(("nbytes", "rates"), [(0, "50 rows/s"), (4_000, "50 rows/s, 2.00 KB/s")])
def test_bytes_are_left_out_if_none_were_moved(nbytes: int, rates: str) -> None:
    stats = FeederStats(batches=1, rows=100, bytes=nbytes, seconds=2.0)
    assert f"100 rows in 2.00 s: {rates}; memory of the process: " in unwrapped(stats)
