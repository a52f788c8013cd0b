"""The data stall warning: when it is given, and what it says."""

import logging

import pytest
from support.simulated_loops import Clock, simulated

from pinfeed.memory.units import duration
from pinfeed.profiling.counters import STRETCH_BATCHES, WARM_UP_BATCHES, Counters, StallMonitor
from pinfeed.testing import favour


def run(
    monitor: StallMonitor, counters: Counters, clock: Clock, waits: list[float], works_s: float
) -> None:
    """A loop as the counters see it."""
    counters.enter(2, 1, asynchronous=False)
    for number, wait_s in enumerate(waits):
        clock.pass_s(wait_s)
        counters.counts.read_s += wait_s + works_s
        counters.receive(number, 10, 120, clock.s, idle=True)
        if counters.counts.batches >= monitor.next_check:
            monitor.check()
        counters.lend()
        clock.pass_s(works_s)
        counters.request()
    counters.receive_none()
    counters.leave()


@pytest.mark.parametrize(
    ("waits", "works_s", "warned"),
    [
        ([0.3] * 60, 0.2, 1),
        ([0.3] * 600, 0.2, 1),
        # A loop that waits for 13% of the time causes no warning.
        ([0.03] * 600, 0.2, 0),
        # Ten batches are too few.
        ([0.3] * 10, 0.2, 0),
        # Two loops of 2.4 seconds are too short.
        ([0.001] * 800, 0.002, 0),
        # Only the first batches are late.
        ([9.0] + [0.0] * 100, 0.2, 0),
        # The loop waits for data later.
        ([0.0] * 100 + [0.3] * 100, 0.2, 1),
        ([], 0.2, 0),
    ],
)
def test_a_loop_that_waits_for_data_causes_one_warning(
    waits: list[float], works_s: float, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    monitor = StallMonitor(counters)
    with caplog.at_level(logging.WARNING, "pinfeed"):
        for _ in range(2):
            run(monitor, counters, clock, waits, works_s)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert all("reading is the bottleneck; " in record.getMessage() for record in caplog.records)


def test_the_first_batches_of_a_feeder_prove_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    run(StallMonitor(counters), counters, clock, [9.0] * WARM_UP_BATCHES + [0.0] * 100, 0.2)
    assert not caplog.records


def test_short_loops_are_judged_together(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    monitor = StallMonitor(counters)
    for _ in range(20):
        run(monitor, counters, clock, [0.05] * STRETCH_BATCHES, 0.02)
    assert len(caplog.records) == 1
    monitor = StallMonitor(counters)
    for _ in range(20):
        # The first batch of a loop does not count, because it cannot be prefetched.
        run(monitor, counters, clock, [5.0] + [0.0] * STRETCH_BATCHES, 0.02)
    assert len(caplog.records) == 1


def test_statistics_are_read_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    monitor = StallMonitor(counters)
    stats = counters.stats
    read: list[float] = []
    monkeypatch.setattr(counters, "stats", lambda: read.append(clock.s) or stats())
    for _ in range(20):
        run(monitor, counters, clock, [0.0] * 500, 0.001)
        # An evaluation between two loops.
        clock.pass_s(60.0)
    # Ten seconds within loops.
    assert len(read) <= 25


def test_a_feeder_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    feeder, clock, _ = simulated(favour("read", "compute"), gather_s=0.3, n=60)
    for _ in range(2):
        for _ in feeder:
            clock.pass_s(0.2)
    feeder.close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pinfeed", "WARNING")
    text = record.getMessage()
    assert text.startswith("in the last ")
    assert " s, the loop waited 60% of the time: reading is the bottleneck; read fewer" in text


def test_a_feeder_that_keeps_up_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    feeder, clock, _ = simulated(favour("read", "compute"), gather_s=0.03, n=60)
    for _ in feeder:
        clock.pass_s(0.2)
    # The statistics show 13%, which is no reason for a warning.
    assert feeder.stats.bottleneck != "computing"
    feeder.close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.64e-6, "7.64 µs"), (99.9e-6, "99.9 µs"), (99.96e-6, "0.1 ms"), (0.0123, "12.3 ms")],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
