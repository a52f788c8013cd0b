"""The interpreter's lock: its share of the time, and advice on transform_threads."""

import logging
import threading
from typing import Any

import pytest
from support.simulated_loops import Clock

from pinfeed.profiling import lock_share
from pinfeed.profiling.bottleneck import StarvationMonitor, explanation
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.lock_share import LockSampler, more_threads_in_words, most_threads
from pinfeed.profiling.stats import Totals

SLOW: dict[str, Any] = {
    "batches": 10,
    "rows": 80,
    "seconds": 10.0,
    "wait_s": 8.0,
    "starved_s": 8.0,
    "depth": 2,
}


def n_samplers() -> int:
    return sum(thread.name.startswith("pinfeed-lock") for thread in threading.enumerate())


def test_python_code_holds_the_lock_and_waits_do_not() -> None:
    sampler = LockSampler(0.5)
    while not sampler._share.done():
        pass
    computing = sampler.stop()
    sampler = LockSampler(0.5)
    sampler._share.exception()
    waiting = sampler.stop()
    assert computing is not None
    assert waiting is not None
    assert computing > 0.5 > waiting
    assert not n_samplers()


def test_a_short_time_gives_no_share() -> None:
    assert LockSampler().stop() is None
    assert not n_samplers()


@pytest.mark.skipif(not lock_share.has_lock(), reason="the interpreter has no lock")
def test_a_sampler_does_not_wait_for_itself() -> None:
    sampler = LockSampler(0.0)
    sampler._share.exception()
    sampler._ident = threading.get_ident()
    assert sampler.stop() is None
    sampler._pool.shutdown()


@pytest.mark.parametrize(
    ("n_threads", "share", "n_cores", "most"),
    [
        (1, 0.0, 8, 8),
        (1, 0.1, 8, 8),
        (1, 0.25, 8, 4),
        (1, 0.6, 8, 2),
        (1, 0.98, 8, 1),
        (1, 0.1, 1, 1),
        (2, 0.5, 8, 4),
        (4, 1.0, 8, 4),
        (4, 0.1, 2, 4),
    ],
)
def test_the_lock_and_the_cores_limit_the_threads(
    n_threads: int, share: float, n_cores: int, most: int
) -> None:
    assert most_threads(n_threads, share, n_cores) == most


@pytest.mark.parametrize(
    ("n_threads", "share", "words"),
    [
        (1, 0.1, "for 10% of the time, so transform_threads=4 can help"),
        (1, 0.97, "for 97% of the time, so more transform_threads would help little"),
        (1, None, "helps if it releases the interpreter's lock"),
        (4, 0.1, "would not help, because this process may use 4 cores"),
    ],
)
def test_advice_depends_on_the_lock(
    n_threads: int, share: float | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert words in more_threads_in_words(n_threads, share)
    found = Totals(**SLOW, host_transform_s=9.0 * n_threads, n_transform_threads=n_threads)
    text = explanation(found, str, lock_share=share)
    assert words in text
    at_a_time = "one batch" if n_threads == 1 else f"up to {n_threads} batches"
    assert f"host_transform, which runs for {at_a_time} at a time" in text
    # The synchronous loop has no threads.
    assert words not in explanation(
        Totals(**{**SLOW, "depth": 0}, host_transform_s=9.0, is_measured=True), str
    )


def test_the_time_of_several_threads_is_divided_among_them() -> None:
    alone = Totals(**SLOW, host_transform_s=9.0, read_s=1.0)
    shared = Totals(**SLOW, host_transform_s=9.0, read_s=9.0, n_transform_threads=4)
    busy = Totals(**SLOW, host_transform_s=36.0, device_transform_s=8.0, n_transform_threads=4)
    assert alone.bottleneck == "host_transform"
    assert shared.bottleneck == "reading"
    assert busy.bottleneck == "host_transform"
    on_device = Totals(**SLOW, host_transform_s=9.0, device_transform_s=8.0, n_transform_threads=4)
    assert on_device.bottleneck == "device_transform"


def test_only_a_warning_of_host_transform_samples_the_lock(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    class Sampler(LockSampler):
        def __init__(self) -> None:
            begun.append(clock.s)
            super().__init__()

        def stop(self) -> float | None:
            super().stop()
            return 0.9

    monkeypatch.setattr("pinfeed.profiling.bottleneck.LockSampler", Sampler)
    for lane in ("read_s", "host_transform_s"):
        clock = Clock()
        counters = Counters(now=clock)
        watch = StarvationMonitor(counters, str)
        counters.enter(2, 1, asynchronous=False)
        watch.begin()
        for number in range(60):
            clock.pass_s(0.3)
            setattr(counters, lane, getattr(counters, lane) + 0.3)
            counters.receive(number, 10, 120, clock.s, idle=True)
            if counters.batches >= watch.next_check:
                watch.check()
            counters.lend()
            clock.pass_s(0.05)
            counters.request()
        watch.end()
        counters.leave()
        assert not n_samplers()
        (record,) = (one for one in caplog.records if one.levelno == logging.WARNING)
        caplog.clear()
        assert ("lock for 90%" in record.getMessage()) == (lane == "host_transform_s")
    assert len(begun) == 1
