"""Batch transforms in statistics and timelines: their times, lanes, tracks and verdicts."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import counters_of
from support.simulated_loops import Clock
from support.unwrapped import unwrapped

from pinfeed import Feeder, wrap_loader
from pinfeed.pipeline.sources.user_calls import BatchTransform, Seed
from pinfeed.profiling.spans import Span, by_thread
from pinfeed.testing import SimDevice, favour, lazy
from pinfeed.threads.pool import ThreadPool


def timed(feeder: Any, clock: Clock) -> Any:
    """Return a feeder whose counters and functions have a simulated clock."""
    counters_of(feeder).now = clock
    for function in (feeder._transforms.host, feeder._transforms.device):
        if function is not None:
            function.now = clock
    return feeder


def durations(spans: list[Span], lane: str) -> list[float]:
    return [span.end_s - span.start_s for span in spans if span.lane == lane]


def passing(clock: Clock, seconds: float) -> Any:
    def function(batch: Any) -> Any:
        clock.pass_s(seconds)
        return batch

    return function


def test_transforms_of_a_wrapped_loader_have_times_of_their_own(tmp_path: Path) -> None:
    clock = Clock()

    def slowly() -> Any:
        for _ in range(5):
            clock.pass_s(0.5)
            yield torch.zeros(4)

    loader = wrap_loader(
        slowly(),
        device="cpu",
        depth=0,
        timeline=True,
        host_transform=passing(clock, 2.0),
        device_transform=passing(clock, 1.0),
    )
    list(timed(loader, clock))
    stats = loader.stats
    assert (stats.source_s, stats.host_transform_s, stats.read_s) == (2.5, 10.0, 2.5)
    assert (stats.device_transform_s, stats.wait_s) == (5.0, 17.5)
    assert "host_transform 2,000 ms, device_transform 1,000 ms" in unwrapped(stats)
    spans = loader.timeline.spans
    assert Counter(span.lane for span in spans) == dict.fromkeys(
        ("read", "host_transform", "device_transform", "wait", "lend", "compute"), 5
    )
    assert durations(spans, "read") == [2.5] * 5
    assert durations(spans, "host_transform") == [2.0] * 5
    assert durations(spans, "device_transform") == [1.0] * 5
    first = {span.lane: span for span in spans if span.batch == 0}
    assert first["read"].start_s < first["host_transform"].start_s
    assert first["host_transform"].end_s <= first["read"].end_s
    assert first["read"].end_s <= first["device_transform"].start_s
    loader.timeline.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == ["read", "host_transform", "device_transform", "loop"]


@pytest.mark.parametrize("depth", [0, 2])
def test_transforms_of_a_feeder_have_times_of_their_own(depth: int) -> None:
    clock = Clock()
    feeder = Feeder(
        np.zeros((40, 3), np.float32),
        batch_size=10,
        device=SimDevice(favour("read", "compute", "transform"), now=clock),
        depth=depth,
        timeline=True,
        host_transform=passing(clock, 2.0),
        device_transform=passing(clock, 1.0),
    )
    with timed(feeder, clock):
        list(feeder)
        stats = feeder.stats
        spans = feeder.timeline.spans
    assert (stats.host_transform_s, stats.read_s, stats.device_transform_s) == (8.0, 0.0, 4.0)
    assert durations(spans, "read") == [0.0] * 4
    assert durations(spans, "host_transform") == [2.0] * 4
    # The device is ready, and waits for what the function queues.
    assert durations(spans, "device_transform") == [1.0] * 4


def test_the_device_times_the_work_of_its_function() -> None:
    clock = Clock()
    device = SimDevice(lazy, now=clock)

    def work(batch: Any) -> Any:
        device.launch(lambda _: clock.pass_s(5.0), batch)
        return batch

    feeder = Feeder(
        np.zeros((80, 3), np.float32),
        batch_size=10,
        device=device,
        timeline=True,
        device_transform=work,
    )
    with timed(feeder, clock):
        for batch in feeder:
            device.launch(lambda _: clock.pass_s(1.0), batch)
        spans = feeder.timeline.spans
        assert durations(spans, "device_transform") == [5.0] * 8
        assert sorted(durations(spans, "device"))[0] == 1.0
        # Queueing takes no time.
        assert feeder.stats.device_transform_s == 0.0
        assert list(by_thread(spans)) == ["read", "copy", "device_transform", "loop", "device"]


def test_overlapping_calls_have_a_lane_each(tmp_path: Path) -> None:
    n_threads = 3
    together = threading.Barrier(n_threads, timeout=60)

    def meeting(batch: Any) -> Any:
        together.wait()
        return batch

    feeder = Feeder(
        np.zeros((60, 3), np.float32),
        batch_size=10,
        device="cpu",
        depth=2,
        timeline=True,
        host_transform=meeting,
        transform_threads=n_threads,
    )
    with feeder:
        list(feeder)
        spans = feeder.timeline.spans
        feeder.timeline.save(tmp_path / "t.json")
    calls = [span for span in spans if span.lane == "host_transform"]
    assert sorted(span.batch for span in calls) == list(range(6))
    total = sum(durations(spans, "host_transform"))
    assert feeder.stats.host_transform_s == pytest.approx(total)
    tracks = {span.batch: track for span, track in by_thread(spans)["host_transform"]}
    assert set(tracks.values()) == set(range(n_threads))
    assert sorted(tracks[i] for i in range(3)) == [0, 1, 2]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert [name for name in names if name.startswith("host")] == [
        f"host_transform {i}" for i in (1, 2, 3)
    ]


def test_each_thread_takes_the_times_of_its_own_calls() -> None:
    clock = Clock()
    inside = threading.Barrier(2, timeout=60)
    function = BatchTransform(
        "host_transform",
        lambda batch: batch if inside.wait() >= 0 else None,
        Seed(0, 0, None),
        "cpu",
        now=clock,
    )

    def call(number: int) -> list[int]:
        function(torch.zeros(2 + number), 0, number)
        inside.wait()
        return [one.number for one in function.take_calls()]

    with ThreadPool(2, "test") as pool:
        assert [one.result() for one in [pool.submit(call, i) for i in (0, 1)]] == [[0], [1]]
    assert function.take_calls() == []
    assert function.returned_nbytes == 12
