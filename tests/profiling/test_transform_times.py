"""Batch transforms in statistics and timelines: their times, lanes, tracks and verdicts."""

import json
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
from pinfeed.profiling.plot_bars import place
from pinfeed.profiling.spans import Span
from pinfeed.testing import SimDevice, favour, lazy


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
    found = loader.timeline._totals(spans, 0.0, 17.5)
    assert (found.read_s, found.host_transform_s, found.device_transform_s) == (2.5, 10.0, 5.0)
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
        found = feeder.timeline._totals(spans, spans[0].start_s, 48.0)
        assert found.verdict.endswith("device_transform is the bottleneck")
        rows, _ = place(spans, 0.0, 1.0)
        assert [row.name for row in rows] == ["read", "copy", "device_transform", "loop", "device"]
