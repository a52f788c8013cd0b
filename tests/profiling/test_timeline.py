"""Timelines: what is recorded, and the traces that show it."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import counters_of
from support.simulated_loops import Clock, a_run, simulated
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import Feeder, wrap_loader, wrap_readers
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.spans import Span
from pinfeed.profiling.timeline import Timeline
from pinfeed.testing import SimDevice, favour, lazy

ALL = ("compute", "read", "write", "pinfeed-read", "pinfeed-write")


def check_spans(spans: list[Span], n: int, lanes: set[str]) -> None:
    """Check that every batch has each lane once, and passes the lanes one after the other.

    A thread does one thing at a time.
    """
    assert {span.lane for span in spans} - {"write_wait"} == lanes
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
    """Copies and computations have the times at which they run, not those of their queueing."""
    feeder, clock, device = simulated(lazy, timeline=True, n=4)
    loop = iter(feeder)
    batch = next(loop)
    device.launch(lambda _: clock.pass_s(5.0), batch)
    clock.pass_s(1.0)
    recorded = counters_of(feeder).timeline
    # The device has done nothing yet, and no thread waits for it.
    assert {span.lane for span in recorded.spans} == {"read", "wait", "lend"}
    next(loop)
    device.drain()
    found = {span.lane: span for span in recorded.spans if span.batch == 0}
    assert found["compute"].end_s - found["compute"].start_s == 1.0
    assert found["device"].end_s - found["device"].start_s == 5.0
    # The copy ran only when the device was drained.
    assert found["copy"].start_s >= found["compute"].end_s
    del loop
    feeder.close()


def test_reading_the_timeline_waits_for_the_device() -> None:
    feeder, _, _ = simulated(lazy, timeline=True, n=4)
    list(feeder)
    assert [span.batch for span in feeder.timeline.spans if span.lane == "device"] == [0, 1, 2, 3]
    feeder.close()


def test_a_profiler_gets_names() -> None:
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


def test_the_time_of_a_loader_counts_as_reading() -> None:
    clock = Clock()

    def slowly() -> Iterator[torch.Tensor]:
        for _ in range(5):
            clock.pass_s(2.0)
            yield torch.zeros(4)

    loader = wrap_loader(slowly(), device="cpu", depth=0, timeline=True)
    counters_of(loader).now = clock
    list(loader)
    assert loader.stats.source_s == loader.stats.read_s == loader.stats.wait_s == 10.0
    assert [span.end_s - span.start_s for span in loader.timeline.spans if span.lane == "read"] == [
        2.0
    ] * 5


def test_nothing_is_recorded_by_default() -> None:
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
    counters.enter(2, 1, asynchronous=False)
    before = sys.getallocatedblocks()
    for _ in range(1000):
        counters.receive(0, 10, 120, 0.0, idle=True)
        counters.lend()
        counters.request()
    assert sys.getallocatedblocks() - before < 20


def test_a_timeline_keeps_the_last_spans() -> None:
    timeline = Timeline(most_spans=50)
    timeline.begin(0.0, 2)
    for i in range(57):
        timeline.add("read", i, i, i + 1)
    assert [span.batch for span in timeline.spans] == list(range(7, 57))


def test_a_trace_has_the_format_of_perfetto(tmp_path: Path) -> None:
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
    counts = [event["args"] for event in events if event["ph"] == "C"]
    assert all(args["batches"] >= 0 for args in counts)


def test_a_timeline_is_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = a_run(0.05, 0.01)
    assert repr(timeline) == "<Timeline: 800 spans of 1 loop>"
    shown = timeline._repr_png_()
    assert shown is not None
    assert shown.startswith(b"\x89PNG")
    assert (repr(Timeline()), Timeline()._repr_png_()) == ("<Timeline: 0 spans of 0 loops>", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert timeline._repr_png_() is None
