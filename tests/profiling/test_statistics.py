"""Statistics: counters, the bottleneck of a loop, and the progress bar."""

import dataclasses
import io
import itertools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.internals import counters_of
from support.simulated_loops import Clock, simulated
from support.unwrapped import unwrapped

from pinfeed import ArrayStore, Feeder
from pinfeed.pipeline.forwarding import HeldValues, WriteLog
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.write_queue import WriteQueue
from pinfeed.pipeline.writer import PendingWrite
from pinfeed.profiling.bottleneck import explanation
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.progress_bar import ProgressBar
from pinfeed.profiling.stats import FeederStats, ProcessMemory, Totals
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
    totals = Totals(batches=10, rows=100, seconds=2.0, wait_s=2.0, starved_s=2.0, read_s=4.0)
    for stats in (totals, FeederStats(**vars(totals), memory=ProcessMemory.now())):
        first, *others = str(stats).splitlines()
        assert first.startswith("10 batches, 100 rows in 2.00 s")
        assert others
        assert all(line.startswith("  ") for line in others)
        assert max(map(len, (first, *others))) <= 80


def test_statistics_of_transforms() -> None:
    totals = Totals(batches=10, rows=100, host_transform_s=0.02, device_transform_s=0.0005)
    text = "host_transform 2 ms, device_transform 50 µs"
    assert f"; transforms, per batch: {text}" in unwrapped(totals)
    assert f"<td>{text}" in FeederStats(**vars(totals), memory=ProcessMemory.now())._repr_html_()
    assert (totals + totals).as_dict()["host_transform_s"] == 0.04
    assert (totals + totals - totals).as_dict()["device_transform_s"] == 0.0005
    assert "transforms" not in str(Totals(batches=10))


def test_statistics_of_caches() -> None:
    without = Totals(batches=10, rows=100)
    assert without.cache_in_words == ""
    assert without.cache_hit_rate == 0
    counts = {"cache_lookups": 4000, "cache_hits": 3000, "cache_evictions": 500}
    counts |= {"cache_rows_written": 900, "cache_bytes_read": 10240, "cache_bytes_written": 9216}
    totals = dataclasses.replace(without, **counts) + dataclasses.replace(without, **counts)
    text = (
        "75% of the rows of batches were in the cache; on average, a batch read 100 rows "
        "(1.0 KiB), wrote 90 (922 B) and evicted 50"
    )
    assert totals.cache_in_words == text
    assert unwrapped(totals).endswith(f"; cache: {text}")
    found = totals.as_dict()
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
        begin_write=lambda pending, earlier: None,
        finish_write=lambda pending, begun, scatter_all: clock.pass_s(1.0),
    )
    threads = OtherThreads(device, PrefetchSchedule(1), is_named=False)
    write_queue = WriteQueue(transfer, threads, limit=1)
    counters.enter(1, 1, asynchronous=True)
    for batch in range(5):
        write = log.append(batch, [], HeldValues([], stream, stream.record()))
        write_queue.add(PendingWrite(batch, write, [], log), check=True)
    write_queue.drain()
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


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "computing": (
        {"wait_s": 0.2, "starved_s": 0.2, "read_s": 3.0},
        "waited 2% of the time: computing is the bottleneck",
    ),
    "reading": (
        {"wait_s": 6.0, "starved_s": 6.0, "read_s": 19.0, "late": 98},
        "waited 60% of the time: reading is the bottleneck",
    ),
    "loop": ({"wait_s": 9.8, "starved_s": 9.8, "read_s": 19.0}, "too little work to overlap"),
    "unevenness": (
        {"wait_s": 4.0, "starved_s": 4.0, "read_s": 8.0, "late": 12},
        "some batches are late",
    ),
    "copying": (
        {"wait_s": 6.0, "starved_s": 6.0, "read_s": 1.0, "copy_wait_s": 14.0, "asynchronous": True},
        "copying to the device",
    ),
    "writing": (
        {"wait_s": 0.5, "starved_s": 5.5, "read_s": 1.0, "write_wait_s": 5.0, "write_s": 9.9},
        "writing back is the bottleneck",
    ),
    "overhead": (
        {"wait_s": 0.5, "overhead_s": 1.5, "starved_s": 2.0, "read_s": 8.0, "late": 12},
        "mostly for pinfeed's own work on each batch",
    ),
    "start": (
        {"wait_s": 4.0, "starved_s": 4.0, "first_batch_s": 3.5, "read_s": 8.0},
        "first batch of each loop",
    ),
    "depth": (
        {"wait_s": 6.0, "starved_s": 6.0, "read_s": 6.0, "depth": 0},
        "nothing is prefetched",
    ),
}


CHANGES = {
    "start": "longer loops",
    "overhead": "Larger batches",
    "unevenness": "higher depth",
    "copying": "PinnedStore",
    "writing": "slower than the loop",
    "depth": "depth=2",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_bottleneck_is_explained(cause: str) -> None:
    counted, sentence = CAUSES[cause]
    found = Totals(**{**BASE, **counted})
    assert found.bottleneck == cause
    assert sentence in found.verdict
    text = explanation(found, lambda share: f"the source knows, {share:.0f}")
    assert CHANGES.get(cause, "the source knows") in text
    assert "of the last 10.0 s" in text
    assert "batch of 256 rows (1.0 MiB)" in text


def test_a_loop_with_a_measured_depth_gets_no_hint_to_change_it() -> None:
    counted = {**BASE, **CAUSES["overhead"][0]}
    hints = [explanation(Totals(**counted, is_measured=one), str) for one in (False, True)]
    assert ["depth=0 needs no threads" in hint for hint in hints] == [True, False]
    assert all("Larger batches" in hint for hint in hints)


def test_the_verdict_says_that_the_depth_was_measured() -> None:
    found = Totals(**{**BASE, **CAUSES["depth"][0], "is_measured": True})
    assert found.verdict.endswith(
        "reading is the bottleneck; prefetching was measured to be slower (depth=0)"
    )
    timed = dataclasses.replace(found, is_measured=False, measures_depth=True)
    assert timed.verdict.endswith("without prefetching, to choose the depth (depth=0)")


@pytest.mark.parametrize(
    ("counted", "cause", "words"),
    [
        ({"write_wait_s": 5.0, "read_s": 1.0}, "writing", "Writing rows back takes"),
        ({"wait_s": 5.0, "read_s": 1.0, "host_transform_s": 4.0}, "host_transform", "cheaper"),
        ({"wait_s": 5.0, "read_s": 1.0, "device_transform_s": 4.0}, "device_transform", "cheaper"),
        ({"wait_s": 5.0, "read_s": 4.0, "host_transform_s": 1.0}, "reading", "source knows"),
        ({"wait_s": 1.0, "overhead_s": 4.0, "read_s": 1.0}, "overhead", "Larger batches"),
    ],
)
def test_a_measured_synchronous_loop_names_its_longest_stage(
    counted: dict[str, Any], cause: str, words: str
) -> None:
    found = Totals(**{**BASE, "depth": 0, "is_measured": True, "starved_s": 5.0, **counted})
    assert found.bottleneck == cause
    text = explanation(found, lambda share: "the source knows")
    assert words in text
    # Prefetching was measured to be slower.
    assert "depth=2" not in text
    assert "higher depth" not in text


def test_a_synchronous_loop_that_waits_for_writes_says_so() -> None:
    found = Totals(**{**BASE, "depth": 0, "starved_s": 5.0, "write_wait_s": 5.0})
    assert found.bottleneck == "writing"


@pytest.mark.parametrize("name", ["host_transform", "device_transform"])
def test_late_batches_are_blamed_on_the_stage_that_was_late(name: str) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    counters.enter(2, 1, asynchronous=False)
    for number in range(100):
        is_slow = number % 10 == 9
        times = {"read_s": 0.01, "copy_wait_s": 0.0, "host_s": 0.0, "device_s": 0.0}
        times[name.replace("transform", "s")] = 0.3 if is_slow else 0.001
        clock.pass_s(0.3 if is_slow else 0.0)
        counters.read_s += 0.01
        ready_s = clock.s if is_slow else -1.0
        counters.count_transforms(**times, ready_s=ready_s)
        counters.receive(number, 1, 4, ready_s, idle=True)
        counters.lend()
        clock.pass_s(0.03)
        counters.request()
    found = counters.totals()
    assert found.late == 10
    assert found.bottleneck == name
    assert found.verdict.endswith(f"some batches are late, because {name} takes long for them")
    assert f"The loop waits for your {name}" in explanation(found, str)
    # If reading took longer, the transform is not the cause.
    whole = dataclasses.replace(found, late_host_transform_s=0.0, late_device_transform_s=0.0)
    assert whole.bottleneck == "unevenness"


def test_a_loop_counts_late_batches_of_its_host_transform() -> None:
    feeder, clock, _ = simulated(
        favour("read", "compute"),
        host_transform=lambda batch: (clock.pass_s(0.3 if next(calls) % 10 == 9 else 0.0), batch)[
            1
        ],
    )
    calls = itertools.count()
    for _ in feeder:
        clock.pass_s(0.05)
    stats = feeder.stats
    feeder.close()
    assert stats.late_host_transform_s > 0
    assert stats.bottleneck == "host_transform"


def test_the_depth_is_known_before_the_first_loop() -> None:
    with Feeder(np.zeros((1000, 2)), batch_size=10, depth=7) as feeder:
        assert feeder.stats.depth == 7


def test_a_device_without_timed_work_is_not_called_idle() -> None:
    counted = {**BASE, "wait_s": 9.8, "starved_s": 9.8, "read_s": 19.0, "asynchronous": True}
    assert Totals(**counted).bottleneck == "reading"


def test_without_a_loop_there_is_no_verdict() -> None:
    assert Totals().verdict == "no loop has run"


def test_the_progress_bar_shows_recent_rates() -> None:
    counted = Totals(seconds=2.0)
    bar = ProgressBar(total=10, totals=lambda: counted, file=io.StringIO())
    counted = Totals(
        batches=4, rows=40_000, bytes=3 * 10**9, seconds=5.0, wait_s=1.5, starved_s=1.5
    )
    assert bar.format_dict["postfix"] == "13k rows/s, 1.00 GB/s, waited 50%"
    counted = Totals(
        batches=8, rows=41_000, bytes=3 * 10**9, seconds=6.0, wait_s=1.5, starved_s=1.5
    )
    assert bar.format_dict["postfix"] == "1,000 rows/s, waited 0%", "nothing was moved"
    counted = Totals(
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
    totals = FeederStats(
        batches=1, rows=100, bytes=nbytes, seconds=2.0, memory=ProcessMemory(0, 0, 0, 0, 0)
    )
    assert f"100 rows in 2.00 s: {rates}; the loop" in unwrapped(totals)
    assert bool(re.search(r"<td>bytes *</td>", totals._repr_html_())) == (nbytes > 0)


def test_statistics_as_a_table() -> None:
    with Feeder(np.zeros((100, 3), np.float32), batch_size=10, device="cpu") as feeder:
        assert feeder.stats._repr_html_().startswith("<p>no loop has run</p>")
        list(feeder)
        shown = feeder.stats._repr_html_()
    assert re.search(r"<p>the loop waited \d+% of the time: .*</p><table>", shown)
    assert re.search(r"<td>memory, peak +</td><td>[\d.]+ .iB", shown)
