"""What a feeder lets one see: spans, traces, pictures, statistics, the bar, and a warning of starvation."""

import io
import itertools
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import ArrayStore, Feeder, KiB, MiB, MmapStore, Plan, errors, wrap_loader, wrap_readers
from pinfeed.devices.cpu import HostDevice
from pinfeed.feeders.dataloader import LoaderFeeder
from pinfeed.feeders.functions import ReaderFeeder
from pinfeed.feeders.restartable import Restartable
from pinfeed.memory.plan import Allocation
from pinfeed.pipeline.forwarding import WriteLog
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.pending_write import HeldValues, PendingWrite
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.dataloader import LoaderSource
from pinfeed.pipeline.write_queue import WriteQueue
from pinfeed.profiling import plot, plot_style
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.progress_bar import ProgressBar
from pinfeed.profiling.spans import LANES, Span, middle, ready, starved, totals, tracks
from pinfeed.profiling.starvation import (
    STRETCH_BATCHES,
    WARM_UP_BATCHES,
    StarvationMonitor,
    explanation,
)
from pinfeed.profiling.stats import FeederStats, ProcessMemory, Totals
from pinfeed.profiling.timeline import Timeline
from pinfeed.readahead import choose
from pinfeed.testing import SimDevice, favour, lazy
from pinfeed.training.row_loop.loop import RowLoop

ALL = ("compute", "read", "write", "pinfeed-read", "pinfeed-write")


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s

    def pass_s(self, seconds: float) -> None:
        self.s += seconds


class OfMyOwn:
    """A store that pinfeed does not know."""

    n_rows = 10
    row_shape = ()
    dtype = np.dtype(np.float32)
    writable = False
    resident_bytes = 0

    def gather(self, rows: Any, out: Any) -> None: ...
    def scatter(self, rows: Any, values: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Slow(ArrayStore):
    """Rows that take time to come and go."""

    def __init__(
        self, array: np.ndarray, clock: Clock, gather_s: float = 0.0, scatter_s: float = 0.0
    ) -> None:
        super().__init__(array)
        self._clock = clock
        self._gather_s = gather_s
        self._scatter_s = scatter_s

    def gather(self, rows: Any, out: Any) -> None:
        self._clock.pass_s(self._gather_s)
        super().gather(rows, out)

    def scatter(self, rows: Any, values: Any) -> None:
        self._clock.pass_s(self._scatter_s)
        super().scatter(rows, values)


def simulated(
    choose: Any = lazy, *, gather_s: float = 0.0, scatter_s: float = 0.0, n: int = 40, **kwargs: Any
) -> tuple[Feeder, Clock, Any]:
    """A feeder on a simulated device, all of whose clocks are one."""
    clock = Clock()
    device = SimDevice(choose, now=clock)
    store = Slow(np.zeros((10 * n, 3), np.float32), clock, gather_s, scatter_s)
    feeder = Feeder(store, batch_size=10, device=device, **{"depth": 2, **kwargs})
    feeder._loop._counters.now = clock
    return feeder, clock, device


# ---- spans ---------------------------------------------------------------------------------------


def check_spans(spans: list[Span], n: int, lanes: set[str]) -> None:
    """Every batch has each lane once, in order; a thread does one thing at a time; a batch goes through the lanes one after the other."""
    assert {span.lane for span in spans} - {"land"} == lanes
    by_lane = {lane: [span for span in spans if span.lane == lane] for lane in lanes}
    for lane, of_one in by_lane.items():
        assert sorted(span.batch for span in of_one) == list(range(n)), lane
        assert all(0 <= span.start_s <= span.end_s for span in of_one)
    for thread in (("wait", "lend", "compute"), ("copy",), ("device",), ("write",)):
        of_thread = [
            span
            for span in sorted(spans, key=lambda span: (span.start_s, span.end_s))
            if span.lane in thread
        ]
        assert all(
            one.end_s <= following.start_s for one, following in itertools.pairwise(of_thread)
        )
        for lane in thread:
            assert [span.batch for span in of_thread if span.lane == lane] == list(
                range(n if lane in lanes else 0)
            )
    stages = [lane for lane in ("read", "copy", "device", "write") if lane in lanes]
    for batch in range(n):
        of_batch = {span.lane: span for span in spans if span.batch == batch}
        assert of_batch["read"].end_s <= of_batch["wait"].end_s == of_batch["lend"].start_s
        assert of_batch["lend"].end_s == of_batch["compute"].start_s
        for lane, following in itertools.pairwise(stages):
            assert of_batch[lane].start_s <= of_batch[following].start_s
        if "copy" in lanes:
            assert of_batch["copy"].end_s <= of_batch["device"].start_s


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("device", ["cpu", "lazy", "eager", "read first", "compute first"])
def test_every_batch_has_each_lane_once(device: str, depth: int) -> None:
    schedules = {
        "lazy": lazy,
        "eager": favour(*ALL),
        "read first": favour("read", "pinfeed-read"),
        "compute first": favour("compute"),
    }
    found: Any = "cpu" if device == "cpu" else SimDevice(schedules[device])
    with Feeder(
        np.zeros((90, 3), np.float32), batch_size=10, depth=depth, device=found, timeline=True
    ) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
        spans = feeder.timeline.spans
    check_spans(
        spans,
        9,
        {"read", "wait", "lend", "compute", "write"}
        | ({"copy", "device"} if device != "cpu" else set()),
    )
    assert {(span.rows, span.bytes) for span in spans} == {(10, 120)}
    end = max(span.end_s for span in spans if span.lane == "compute")
    assert all(span.end_s <= end for span in spans if span.lane == "read")


def test_small_batches_are_read_together() -> None:
    with Feeder(
        np.zeros((400, 3), np.float32), batch_size=10, device="cpu", timeline=True
    ) as feeder:
        for _ in range(2):
            for _ in feeder:
                pass
        spans = feeder.timeline.spans
    reads = [span for span in spans if span.lane == "read"]
    assert sum(span.n_batches for span in reads) == 80 > len(reads)
    assert all(
        (span.rows, span.bytes) == (10 * span.n_batches, 120 * span.n_batches) for span in reads
    )
    for loop in (0, 1):
        lent = [span.batch for span in spans if span.lane == "lend" and span.loop == loop]
        assert lent == list(range(40))


def test_a_loop_that_is_left() -> None:
    feeder, clock, _ = simulated(favour(*ALL), timeline=True)
    for _ in zip(range(3), feeder, strict=False):
        clock.pass_s(1.0)
    feeder.close()
    computed = [span for span in feeder.timeline.spans if span.lane == "compute"]
    assert [(span.batch, span.end_s - span.start_s) for span in computed] == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
    ]
    assert [span.batch for span in feeder.timeline.spans if span.lane == "device"] == [0, 1, 2]


def test_times_of_the_device_are_its_own() -> None:
    """Neither the copy's nor the computation's is the time at which the host queued it."""
    feeder, clock, device = simulated(lazy, timeline=True, n=4)
    loop = iter(feeder)
    batch = next(loop)
    device.launch(lambda _: clock.pass_s(5.0), batch)
    clock.pass_s(1.0)
    recorded = feeder._loop._counters.timeline
    # The device has done nothing yet, and nobody waits for it.
    assert {span.lane for span in recorded.spans} == {"read", "wait", "lend"}
    next(loop)
    device.drain()
    found = {span.lane: span for span in recorded.spans if span.batch == 0}
    assert found["compute"].end_s - found["compute"].start_s == 1.0
    assert found["device"].end_s - found["device"].start_s == 5.0
    # So late was it.
    assert found["copy"].start_s >= found["compute"].end_s
    del loop
    feeder.close()


def test_whoever_reads_the_timeline_waits_for_the_device() -> None:
    feeder, _, _ = simulated(lazy, timeline=True, n=4)
    list(feeder)
    assert [span.batch for span in feeder.timeline.spans if span.lane == "device"] == [0, 1, 2, 3]
    feeder.close()


def test_a_profiler_is_told_names() -> None:
    for timeline in (False, True):
        feeder, _, device = simulated(favour(*ALL), timeline=timeline, n=3)
        for batch in feeder.batches():
            batch.write_back(batch.data)
        feeder.close()
        wanted = (
            {
                f"pinfeed {lane} {batch}"
                for lane in ("read", "wait", "lend", "write")
                for batch in range(3)
            }
            if timeline
            else set()
        )
        assert {name for name in device.names if int(name.split()[-1]) < 3} == wanted


def test_wrapped_loaders_and_readers() -> None:
    loader = wrap_loader(DataLoader(torch.zeros(30, 2), batch_size=5), device="cpu", timeline=True)
    list(loader)
    check_spans(loader.timeline.spans, 6, {"read", "wait", "lend", "compute"})
    reading: Any = {
        "read_input": lambda i: [np.zeros(3)],
        "get_output": lambda i: [i],
        "n_readers": 2,
    }
    with wrap_readers(
        range(12), range(12), **reading, batch_size=3, device="cpu", timeline=True
    ) as feeder:
        list(feeder)
        check_spans(feeder.timeline.spans, 4, {"read", "wait", "lend", "compute"})


def test_train_rows() -> None:
    table = pinfeed.HostEmbedding(50, 4, name="t")
    rows = pinfeed.RowOptimizer(torch.optim.SGD, [table], lr=0.1)
    loader = [{"ids": torch.arange(i, i + 5)} for i in range(8)]
    loop = pinfeed.train_rows(loader, {table: "ids"}, optimizer=rows, device="cpu", timeline=True)
    for batch in loop:
        table(batch["ids"]).sum().backward()
        rows.step()
        rows.zero_grad()
    check_spans(loop.timeline.spans, 8, {"read", "wait", "lend", "compute", "write"})


def test_what_a_loader_takes_is_reading() -> None:
    clock = Clock()

    def slowly() -> Iterator[torch.Tensor]:
        for _ in range(5):
            clock.pass_s(2.0)
            yield torch.zeros(4)

    loader = wrap_loader(slowly(), device="cpu", depth=0, timeline=True)
    loader._loop._counters.now = clock
    list(loader)
    assert loader.stats.draw_s == loader.stats.read_s == loader.stats.wait_s == 10.0
    assert [span.end_s - span.start_s for span in loader.timeline.spans if span.lane == "read"] == [
        2.0
    ] * 5


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    class Untimed(SimDevice):
        def stream(self, name: str) -> Any:
            stream = super().stream(name)
            record = type(stream).record

            def untimed(*, timed: bool = False) -> Any:
                assert not timed
                return record(stream)

            stream.record = untimed  # type: ignore[method-assign]
            return stream

    device = Untimed(favour(*ALL))
    with Feeder(np.zeros((90, 3), np.float32), batch_size=10, device=device) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
    assert device.names == []
    counters = Counters()
    asked = counters.enter(2, 1, asynchronous=False)
    before = sys.getallocatedblocks()
    for _ in range(1000):
        asked = counters.lent(10, 120, asked, late=False, idle=True)
    assert sys.getallocatedblocks() - before < 20


def test_a_timeline_keeps_the_last_spans() -> None:
    timeline = Timeline(most_spans=50)
    timeline.begin(0.0, 2, 1)
    for i in range(57):
        timeline.add("read", i, i, i + 1)
    assert [span.batch for span in timeline.spans] == list(range(7, 57))


# ---- what is told from spans ---------------------------------------------------------------------


def a_run(
    read_s: float,
    step_s: float,
    *,
    copy_s: float = 0.0,
    n_readers: int = 2,
    depth: int = 2,
    n: int = 200,
) -> Timeline:
    """A loop whose every part takes its time; with ``copy_s``, on a device of its own."""
    timeline = Timeline()
    timeline.begin(0.0, depth, n_readers)
    device = SimDevice(favour("compute"), now=(clock := Clock()))

    def at(seconds: float) -> Any:
        clock.s = seconds
        return device.current_stream().record(timed=True)

    free = [0.0] * n_readers
    copied = 0.0
    computed = 0.0
    asked = 0.0
    asks = [0.0] * (depth + 1)
    for batch in range(n):
        reader = free.index(min(free))
        start = max(free[reader], asks[batch])
        free[reader] = end = start + read_s * (1 + 0.2 * math.sin(batch))
        timeline.add("read", batch, start, end)
        got = max(asked, end)
        lent = got + 1e-5
        timeline.add("wait", batch, asked, got)
        timeline.add("lend", batch, got, lent, 1, 256, 1 << 20)
        asked = lent + (1e-4 if copy_s else step_s)
        timeline.add("compute", batch, lent, asked)
        if copy_s:
            copied, begun = max(copied, end) + copy_s, max(copied, end)
            timeline.add_timed("copy", batch, at(begun), at(copied))
            begun, computed = max(computed, copied, lent), max(computed, copied, lent) + step_s
            timeline.add_timed("device", batch, at(begun), at(computed))
            timeline.add("write", batch, computed, computed + copy_s / 2)
        asks.append(asked)
    return timeline


CASES: dict[str, tuple[Callable[[], Timeline], str]] = {
    "data": (lambda: a_run(0.05, 0.01), "reading is the bottleneck"),
    "compute": (lambda: a_run(0.01, 0.02), "computing is the bottleneck"),
    "balanced": (lambda: a_run(0.0205, 0.01), "reading takes about as long as computing"),
    "link": (lambda: a_run(0.002, 0.01, copy_s=0.02), "copying to the device is the bottleneck"),
    "device": (lambda: a_run(0.004, 0.02, copy_s=0.005), "computing is the bottleneck"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_picture_says_the_verdict(case: str, tmp_path: Path) -> None:
    made, because = CASES[case]
    timeline = made()
    timeline.save(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert 20_000 < (tmp_path / "t.png").stat().st_size < 150_000
    timeline.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["verdict"].endswith(because)


def test_a_whole_run_can_be_drawn(tmp_path: Path) -> None:
    timeline = a_run(0.05, 0.01, n=1500)
    timeline.save(tmp_path / "all.png", last_s=1e6)
    timeline.save(tmp_path / "first.png", first_s=0.3)
    assert all((tmp_path / f"{name}.png").stat().st_size > 15_000 for name in ("all", "first"))
    with pytest.raises(errors.ArgumentError, match="both first_s and last_s"):
        timeline.save(tmp_path / "t.png", first_s=1, last_s=1)
    with pytest.raises(errors.ArgumentError, match="more than 0 seconds"):
        timeline.save(tmp_path / "t.png", first_s=0)


def short_spans(n: int) -> list[Span]:
    """A loop that computes for 10 ms a batch, in which everything else takes some microseconds."""
    spans = []
    for batch in range(n):
        begin = batch * 0.01
        spans += [
            Span("wait", batch, begin, begin + 1e-6),
            Span("lend", batch, begin + 1e-6, begin + 1e-5, rows=100, bytes=1000),
            Span("read", batch, begin + 2e-3, begin + 2.01e-3),
            Span("copy", batch, begin + 4e-3, begin + 4.002e-3),
            Span("write", batch, begin + 6e-3, begin + 6.005e-3),
            Span("land", batch, begin + 7e-3, begin + 7.005e-3),
            Span("compute", batch, begin + 1e-5, begin + 1e-2),
        ]
    return sorted(spans, key=lambda span: span.start_s)


def lines_of(path: Path, lane: str) -> int:
    """Vertical lines, at least 20 pixels high, in one of the two shades of a lane."""
    image = 255 * matplotlib.image.imread(path)[:, :, :3]
    found = np.zeros(image.shape[1], bool)
    for batch in (0, 1):
        shade = np.array(
            [
                int(plot_style.colour_of(Span(lane, batch, 0, 1), False)[i : i + 2], 16)
                for i in (1, 3, 5)
            ]
        )
        alike = np.abs(image - shade).max(2) < 40
        found |= np.lib.stride_tricks.sliding_window_view(alike, 20, axis=0).all(-1).any(0)
    return int((np.diff(found.astype(int)) == 1).sum())


@pytest.mark.parametrize("lane", ["read", "copy", "land", "write"])
def test_spans_shorter_than_a_pixel_are_seen(lane: str, tmp_path: Path) -> None:
    # One such lane at a time: their colours are alike.
    spans = [span for span in short_spans(30) if span.lane in ("wait", "lend", "compute", lane)]
    found = totals(spans, 0.0, 0.3, depth=2, n_readers=1)
    plot.draw(spans, 0.0, 0.3, found, str(tmp_path / "t.png"))
    # The frame of the batch that is followed may hide its line.
    assert lines_of(tmp_path / "t.png", lane) in (29, 30)


def test_what_takes_hardly_any_of_a_moment_is_seen(tmp_path: Path) -> None:
    spans = short_spans(4000)
    plot.draw(
        spans, 0.0, 40.0, totals(spans, 0.0, 40.0, depth=2, n_readers=1), str(tmp_path / "t.png")
    )
    image = 255 * matplotlib.image.imread(tmp_path / "t.png")[:, :, :3]
    for lane in ("read", "copy", "write"):
        shade = np.array([int(plot_style.COLOURS[lane][i : i + 2], 16) for i in (1, 3, 5)])
        assert ((np.abs(image - shade).max(2) < 60).sum(1) > 1000).any(), lane


def test_a_stretch_from_the_middle_is_of_one_loop() -> None:
    spans = [
        Span("wait", batch, loop * 10 + batch, loop * 10 + batch + 0.5, loop)
        for loop in range(3)
        for batch in range(10)
    ]
    assert middle(spans, 4) == (13.0, 17.0)
    assert middle(spans, 20) == (10.0, 19.5)
    assert middle(spans, 30) == (0.0, 29.5)


def test_tracks_never_overlap() -> None:
    spans = a_run(0.05, 0.01, n_readers=4, depth=5).spans
    placed = list(zip(spans, tracks(spans), strict=True))
    assert {track for span, track in placed if span.lane == "read"} == {0, 1, 2, 3}
    for lane, track in itertools.product(LANES, range(4)):
        of_one = [span for span, on in placed if (span.lane, on) == (lane, track)]
        assert all(one.end_s <= following.start_s for one, following in itertools.pairwise(of_one))


def test_starvation_is_that_of_whoever_computes() -> None:
    host = a_run(0.05, 0.01).spans
    assert starved(host) == [(span.start_s, span.end_s) for span in host if span.lane == "wait"]
    # The loop waits for batches, but the device has work.
    device = a_run(0.004, 0.02, copy_s=0.005).spans
    stretch = totals(device, 1.0, 3.0, depth=2, n_readers=2)
    assert (stretch.watched, stretch.starved) == ("device", 0.0)
    short = [span for span in host if span.batch < 3]
    assert totals(short, 0.0, 1.0, depth=2, n_readers=2).bottleneck == "start"
    # But for the first batch.
    assert starved(device)[0][0] == 0.0


def test_batches_that_are_ready() -> None:
    counts = [count for _, count in ready(a_run(0.01, 0.05).spans)]
    assert max(counts) <= 3
    assert counts[-1] == 0
    assert np.median(counts) >= 1


# ---- traces --------------------------------------------------------------------------------------


def test_a_trace_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    feeder, clock, _ = simulated(
        favour("read", "compute"), gather_s=0.5, scatter_s=0.25, timeline=True, n=12
    )
    for batch in feeder.batches():
        clock.pass_s(0.125)
        batch.write_back(batch.data)
    feeder.timeline.save(tmp_path / "t.json")
    feeder.close()
    document = json.loads((tmp_path / "t.json").read_text())
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    named = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert list(named.values()) == ["read", "copy", "loop", "device", "write"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "pinfeed"
    ]
    order = {
        event["tid"]: event["args"]["sort_index"]
        for event in events
        if event["name"] == "thread_sort_index"
    }
    assert sorted(named, key=order.__getitem__) == list(named)
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in complete} == set(named)
    assert {event["pid"] for event in events} == {1}
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["args"].keys() == {"batch", "batches", "rows", "bytes", "loop"}
        assert event["name"] == f"{event['cat']} {event['args']['batch']}"
    reads = [event["dur"] for event in complete if event["cat"] == "read"]
    assert reads == [0.5e6] * 12
    for tid in named:
        # Slices of a thread are one after the other, or one within the other.
        of_thread = sorted(
            (event["ts"], -event["dur"]) for event in complete if event["tid"] == tid
        )
        open_until: list[float] = []
        for start, minus in of_thread:
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or start - minus <= open_until[-1] + 1e-3
            open_until.append(start - minus)
    assert all(event["args"]["batches"] >= 0 for event in events if event["ph"] == "C")


# ---- statistics ----------------------------------------------------------------------------------


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


# It is no loss while the values are still computed.
@pytest.mark.parametrize(("fast", "counted_s"), [(("compute",), 4.0), ((), 0.0)])
def test_waiting_for_write_backs_is_seen(fast: tuple[str, ...], counted_s: float) -> None:
    class OtherThreads(LoopThreads):
        # The simulated writer runs in the thread that waits for it.
        is_inside = False

    clock = Clock()
    device = SimDevice(favour(*fast), now=clock)
    counters = Counters(timeline=Timeline(), now=clock)
    stream = device.current_stream()
    log: WriteLog[HeldValues] = WriteLog()
    transfer: Any = SimpleNamespace(
        counters=counters, write_to_stores=lambda pending: clock.pass_s(1.0)
    )
    threads = OtherThreads(device, PrefetchSchedule(1), is_named=False)
    write_queue = WriteQueue(transfer, threads, depth=1)
    counters.enter(1, 1, asynchronous=True)
    for batch in range(5):
        write_queue.add(
            PendingWrite(log.append([], HeldValues([], stream, stream.record())), [], log, batch),
            check=True,
        )
    write_queue.drain()
    threads.join_writer()
    assert counters.stats().land_s == counted_s
    assert counters.timeline is not None
    spans = [(span.lane, span.batch, span.end_s - span.start_s) for span in counters.timeline.spans]
    assert spans == [("land", batch, 1.0) for batch in range(1, 5)]


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
        feeder._loop._counters.now = clock
        for batch in feeder.batches():
            batch.write_back(batch.data)
        assert (feeder.stats.land_s, feeder.stats.compute_s) == (counted_s, 3.0 - counted_s)
        assert [span.batch for span in feeder.timeline.spans if span.lane == "land"] == [0, 1, 2]


def test_readers_that_the_device_holds_up() -> None:
    """A copy takes a second of the read stream's; only the second round of slots meets it."""

    class Copying(SimDevice):
        def copy(self, src: Any, dst: Any, stream: Any) -> None:
            super().copy(src, dst, stream)
            stream._enqueue(lambda: clock.pass_s(1.0))

    clock = Clock()
    device = Copying(favour("compute"), now=clock)
    with Feeder(np.zeros((100, 3), np.float32), batch_size=10, depth=2, device=device) as feeder:
        feeder._loop._counters.now = clock
        for batch in feeder:
            device.launch(lambda _: None, batch)
        assert feeder.stats.held_s >= 5.0
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
    "loop": ({"wait_s": 9.8, "starved_s": 9.8, "read_s": 19.0}, "it does almost nothing"),
    "unevenness": ({"wait_s": 4.0, "starved_s": 4.0, "read_s": 8.0, "late": 12}, "come unevenly"),
    "copying": (
        {"wait_s": 6.0, "starved_s": 6.0, "read_s": 1.0, "held_s": 14.0, "asynchronous": True},
        "copying to the device",
    ),
    "writing": (
        {"wait_s": 0.5, "starved_s": 0.5, "read_s": 1.0, "land_s": 5.0, "write_s": 9.9},
        "writing back is the bottleneck",
    ),
    "start": (
        {"wait_s": 4.0, "starved_s": 4.0, "start_s": 3.5, "read_s": 8.0},
        "first batch of a loop",
    ),
    "depth": (
        {"wait_s": 6.0, "starved_s": 6.0, "read_s": 6.0, "depth": 0},
        "nothing is read ahead",
    ),
}
CHANGES = {
    "start": "Longer loops",
    "unevenness": "higher depth",
    "copying": "PinnedStore",
    "writing": "slower than the loop",
    "depth": "depth=2",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told(cause: str) -> None:
    counted, sentence = CAUSES[cause]
    found = Totals(**{**BASE, **counted})
    assert found.bottleneck == cause
    assert sentence in found.verdict
    text = explanation(found, lambda share: f"the source knows, {share:.0f}")
    assert CHANGES.get(cause, "the source knows") in text
    assert "of the last 10.0 s" in text
    assert "batch of 256 rows (1.0 MiB)" in text


def test_a_device_whose_work_nobody_has_timed_is_not_said_to_do_nothing() -> None:
    counted = {**BASE, "wait_s": 9.8, "starved_s": 9.8, "read_s": 19.0, "asynchronous": True}
    assert Totals(**counted).bottleneck == "reading"


def test_without_a_loop_there_is_no_verdict() -> None:
    assert Totals().verdict == "no loop has run"


# ---- the warning ---------------------------------------------------------------------------------


def run(
    watch: StarvationMonitor, counters: Counters, clock: Clock, waits: list[float], works_s: float
) -> None:
    """A loop, as far as a counters sees it."""
    asked = counters.enter(2, 1, asynchronous=False)
    watch.begin()
    for wait_s in waits:
        clock.pass_s(wait_s)
        counters.read_s += wait_s + works_s
        clock_s = counters.lent(10, 120, asked, late=wait_s > 0, idle=True)
        if counters.batches >= watch.look_at:
            watch.look()
        clock.pass_s(works_s)
        asked = clock_s + works_s
    counters.leave()
    watch.end()


@pytest.mark.parametrize(
    ("waits", "works_s", "warned"),
    [
        ([0.3] * 60, 0.2, 1),
        ([0.3] * 600, 0.2, 1),
        # Hides well enough
        ([0.03] * 600, 0.2, 0),
        # No evidence
        ([0.3] * 10, 0.2, 0),
        # Two times 2.4 seconds.
        ([0.001] * 800, 0.002, 0),
        # The first batches only.
        ([9.0] * WARM_UP_BATCHES + [0.0] * 100, 0.2, 0),
        # Starves later on
        ([0.0] * 100 + [0.3] * 100, 0.2, 1),
        ([], 0.2, 0),
    ],
)
def test_a_loop_that_starves_is_warned_of_once(
    waits: list[float], works_s: float, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    watch = StarvationMonitor(counters, lambda share: "feed it")
    with caplog.at_level(logging.WARNING, "pinfeed"):
        for _ in range(2):
            run(watch, counters, clock, waits, works_s)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert all("feed it" in record.getMessage() for record in caplog.records)


def test_seconds_of_a_batch_are_not_written_in_powers_of_ten() -> None:
    found = Totals(
        batches=1,
        rows=8,
        bytes=8,
        seconds=50.0,
        wait_s=40.0,
        starved_s=40.0,
        read_s=12.3456,
        depth=2,
    )
    assert "(8 B) takes 12,346 ms to read" in explanation(found, lambda share: "")


def test_short_loops_are_judged_together(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    watch = StarvationMonitor(counters, lambda share: "feed it")
    for _ in range(20):
        run(watch, counters, clock, [0.05] * (WARM_UP_BATCHES + STRETCH_BATCHES), 0.02)
    assert len(caplog.records) == 1
    for _ in range(20):
        # The first batches of a loop, which nobody can have ready, are no evidence.
        run(
            watch := StarvationMonitor(counters, str),
            counters,
            clock,
            [5.0] + [0.0] * (WARM_UP_BATCHES + STRETCH_BATCHES),
            0.02,
        )
    assert len(caplog.records) == 1


def test_a_feeder_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    feeder, clock, _ = simulated(favour("read", "compute"), gather_s=0.3, n=60)
    for _ in range(2):
        for _ in feeder:
            clock.pass_s(0.2)
    feeder.close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pinfeed", "WARNING")
    for words in (
        "starved: the loop waited 60% of the last",
        "reading",
        "10 rows (120 B) takes 300 ms to read",
        "depth=2",
        "rows are in memory",
    ):
        assert words in record.getMessage()


def test_a_feeder_that_keeps_up_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    feeder, clock, _ = simulated(favour("read", "compute"), gather_s=0.03, n=60)
    for _ in feeder:
        clock.pass_s(0.2)
    # 13%: to be seen in the statistics.
    assert feeder.stats.bottleneck != "computing"
    feeder.close()
    assert not caplog.records


def test_sources_know_what_to_change(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 64), np.float32))
    store = MmapStore(tmp_path / "x.npy", keep_cache=False)

    def hint(order: Any, free: int) -> str:
        choice = choose([store], order, 100, free)
        found: str = choice.strategies[0].hint
        for access in choice.strategies:
            access.close()
        return found

    shuffled, blocks = (
        pinfeed.rows.shuffled(0),
        pinfeed.rows.block_shuffled(0, block_rows=256, window_blocks=1),
    )
    assert "x.npy is still being brought into memory" in hint(shuffled, 1 << 30)
    assert "block_shuffled(seed, block_rows=256)" in hint(shuffled, 0)
    assert "With 250.0 KiB of memory for all of it" in hint(shuffled, 0)
    assert "read in sequence" in hint(pinfeed.rows.sequential(), 1 << 30)
    assert "page cache" in hint(blocks, 0)
    assert "Windows of x.npy" in hint(blocks, 240_000)
    own = choose([OfMyOwn()], shuffled, 100, 0).strategies[0].hint
    assert own.startswith("It is gather() of the OfMyOwn that is waited for")
    assert (
        "rows are in memory"
        in choose([ArrayStore(np.zeros(3))], shuffled, 100, 0).strategies[0].hint
    )
    store.close()
    loader = DataLoader(torch.zeros(10), num_workers=1)
    assert "num_workers=1" in LoaderSource(loader).hint(0.9)
    assert "smaller dtype" in LoaderSource(loader).hint(0.1)
    assert "loader (list)" in LoaderSource([1]).hint(0.9)
    feeder = wrap_readers(
        [1], [1], read_input=lambda i: [i], get_output=lambda i: [i], batch_size=1, device="cpu"
    )
    assert "raise n_readers (is 1" in feeder._loop.source.hint(0.0)
    feeder.close()
    loop = pinfeed.train_rows(
        [], {pinfeed.HostEmbedding(5, 2, name="users"): "ids"}, device=HostDevice()
    )
    assert "gathering rows of users" in loop._loop.source.hint(0.2)
    assert "loader (list)" in loop._loop.source.hint(0.8)


# ---- the bar -------------------------------------------------------------------------------------


def test_a_bar_shows_rates_of_late() -> None:
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
    # So little time tells nothing.
    assert bar.format_dict["postfix"] == "1,000 rows/s, waited 0%"
    bar.close()


def test_a_feeder_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Feeder(
        np.zeros((100, 3), np.float32), batch_size=10, device="cpu", progress=True
    ) as feeder:
        list(feeder)
    shown = capsys.readouterr().err
    assert "10/10" in shown
    assert "rows/s" in shown


# ---- in a notebook -------------------------------------------------------------------------------


class Hidden(TensorDataset):
    """Data that must not be touched."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a repr has read data")


def test_what_feeders_show_in_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5000, 3, 8), np.float32))
    source = {"x": str(tmp_path / "x.npy"), "y": np.arange(5000)}
    with Feeder(source, batch_size=256, depth=2, device="cpu") as feeder:
        shown = "5,000 rows of source['x'] (3, 8) float32, source['y'] () int64; batches of 256 rows on cpu, 2 ahead"
        assert repr(feeder) == f"<Feeder: {shown}>"
        assert repr(pinfeed.restartable(feeder)) == f"restartable(<Feeder: {shown}>)"
        assert repr(next(feeder.batches())) == "<Batch of 256 rows>"
    assert repr(feeder) == f"<Feeder: {shown}, closed>"
    with Feeder(
        tuple(np.zeros((9, 2)) for _ in range(6)), rows=iter([[1], [2]]), device="cpu"
    ) as feeder:
        assert "source[3] (2,) float64, and 2 more; batches of any size on cpu" in repr(feeder)
    loader = DataLoader(Hidden(torch.zeros(8, 2)), batch_size=2)
    assert (
        repr(wrap_loader(loader, device="cpu"))
        == "<LoaderFeeder: a DataLoader, batches of 2 on cpu, 2 ahead>"
    )
    assert (
        repr(wrap_loader([1, 2], device="cpu", depth=0))
        == "<LoaderFeeder: a list, its batches on cpu, 0 ahead>"
    )
    table = pinfeed.HostEmbedding(10_000, 8, name="users")
    assert repr(pinfeed.train_rows(loader, {table: lambda batch: batch[0]}, device="cpu")) == (
        "<RowLoop: a DataLoader, with rows of users (10,000, 8); batches on cpu, 2 ahead>"
    )
    reading = {"read_input": lambda i: [i], "get_output": lambda i: [i], "device": "cpu"}
    assert repr(wrap_readers(range(100), range(100), batch_size=4, **reading)) == (
        "<ReaderFeeder: 100 identities; batches of 4 samples on cpu, 2 ahead>"
    )


def test_what_stores_show_in_one_line(tmp_path: Path) -> None:
    x = np.zeros((5000, 3), np.float32)
    np.save(tmp_path / "x.npy", x)
    assert repr(ArrayStore(x)) == "<ArrayStore: 5,000 rows of shape (3,), float32>"
    x.flags.writeable = False
    assert repr(ArrayStore(x)) == "<ArrayStore: 5,000 rows of shape (3,), float32, read-only>"
    assert (
        repr(pinfeed.PinnedStore(x, pin=False))
        == "<PinnedStore: 5,000 rows of shape (3,), float32, in ordinary memory>"
    )
    with MmapStore(tmp_path / "x.npy") as store:
        assert repr(store) == f"MmapStore({str(tmp_path / 'x.npy')!r}, mode='r')"
    assert (
        repr(pinfeed.ArrowStore(pyarrow.array([1, 2]), name="ids"))
        == "<ArrowStore ids: 2 rows of shape (), int64>"
    )
    with pinfeed.RowDataset((x, x)) as dataset:
        assert (
            repr(dataset)
            == "<RowDataset: 5,000 rows of source[0] (3,) float32, source[1] (3,) float32>"
        )


def test_a_repr_never_raises() -> None:
    kinds = [
        Feeder,
        LoaderFeeder,
        ReaderFeeder,
        RowLoop,
        Restartable,
        pinfeed.Batch,
        pinfeed.RowDataset,
        Timeline,
    ]
    for kind in (
        *kinds,
        ArrayStore,
        MmapStore,
        pinfeed.PinnedStore,
        pinfeed.ArrowStore,
        pinfeed.RemoteStore,
    ):
        assert repr(kind.__new__(kind)) == f"<{kind.__name__}>", "half made"

    class Broken(list[int]):
        @property
        def batch_size(self) -> int:
            raise RuntimeError

    with wrap_loader(Broken([1]), device="cpu") as feeder:
        assert repr(feeder) == "<LoaderFeeder>"


def test_a_plan_as_a_table() -> None:
    items = (
        Allocation("batches & <b>", "device", 4, MiB(2)),
        Allocation("staging", "pinned", 3, MiB(1)),
        Allocation("numbers", "host", 1, KiB(512)),
    )
    shown = Plan(
        64, 2, "staged", items, MiB(16), None, ("<x>.npy: read in sequence",)
    )._repr_html_()
    cells = [
        [cell.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in shown.split("<tr>")
    ]
    assert cells[2:] == [
        ["batches &amp; &lt;b&gt;", "device", "4 × 2.0 MiB", "8.0 MiB"],
        ["staging", "host, page-locked", "3 × 1.0 MiB", "3.0 MiB"],
        ["numbers", "host", "1 × 512.0 KiB", "512.0 KiB"],
        ["in all", "host", "", "3.5 MiB of 16.0 MiB"],
        ["in all", "device", "", "8.0 MiB"],
    ]
    assert (
        "<p>batches of 64 rows, 2 ahead, staged route</p><p>&lt;x&gt;.npy: read in sequence</p>"
        in shown
    )


def test_a_plan_in_a_terminal() -> None:
    plan = Plan(64, 2, "staged", (Allocation("numbers", "host", 1, KiB(512)),))
    assert repr(plan) == f"<Plan: {plan}>"
    assert "host: 1 x 512.0 KiB numbers" in repr(plan)


def test_a_config_in_a_terminal() -> None:
    assert repr(pinfeed.Config()) == "<Config: all by default>"
    config = pinfeed.Config(cpu_memory_limit=pinfeed.GiB(1.5), depth=3, total_sample_count=4)
    assert repr(config) == "<Config: cpu_memory_limit=1.5 GiB, depth=3, total_sample_count=4>"


@pytest.mark.parametrize(("nbytes", "rates"), [(0, "50 rows/s"), (4_000, "50 rows/s, 2.00 KB/s")])
def test_bytes_are_left_out_where_none_were_moved(nbytes: int, rates: str) -> None:
    totals = FeederStats(
        batches=1, rows=100, bytes=nbytes, seconds=2.0, memory=ProcessMemory(0, 0, 0, 0, 0)
    )
    assert f"100 rows in 2.00 s: {rates}; the loop" in str(totals)
    assert bool(re.search(r"<td>bytes *</td>", totals._repr_html_())) == (nbytes > 0)


def test_statistics_as_a_table() -> None:
    with Feeder(np.zeros((100, 3), np.float32), batch_size=10, device="cpu") as feeder:
        assert feeder.stats._repr_html_().startswith("<p>no loop has run</p>")
        list(feeder)
        shown = feeder.stats._repr_html_()
    assert re.search(r"<p>the loop waited \d+% of the time: .*</p><table>", shown)
    assert re.search(r"<td>memory, peak +</td><td>[\d.]+ .iB", shown)


def test_a_timeline_is_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = a_run(0.05, 0.01)
    assert repr(timeline) == "<Timeline: 800 spans of 1 loop>"
    shown = timeline._repr_png_()
    assert shown is not None
    assert shown.startswith(b"\x89PNG")
    assert (repr(Timeline()), Timeline()._repr_png_()) == ("<Timeline: 0 spans of 0 loops>", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert timeline._repr_png_() is None
