"""The data stall warning: when it is given, and what it says."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import runner_of
from support.simulated_loops import Clock, simulated
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import ArrayStore, NpyStore, wrap_readers
from pinfeed.devices.cpu import HostDevice
from pinfeed.memory.units import duration
from pinfeed.pipeline.sources.loader_source import LoaderSource
from pinfeed.profiling.bottleneck import (
    STRETCH_BATCHES,
    WARM_UP_BATCHES,
    StarvationMonitor,
    explanation,
)
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.stats import Totals
from pinfeed.readahead.select import choose
from pinfeed.readahead.strategy import IN_MEMORY_HINT, FreeMemory, main_hint
from pinfeed.testing import favour


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


def run(
    watch: StarvationMonitor,
    counters: Counters,
    clock: Clock,
    waits: list[float],
    works_s: float,
    depth: int = 2,
    *,
    is_excused: bool = False,
) -> None:
    """A loop as the counters see it."""
    counters.enter(depth, 1, asynchronous=False)
    watch.begin()
    for number, wait_s in enumerate(waits):
        clock.pass_s(wait_s)
        counters.read_s += wait_s + works_s
        counters.receive(number, 10, 120, clock.s, idle=True)
        # A loop that compares depths is checked while it prefetches.
        if counters.batches >= watch.next_check and not (is_excused and number > 20):
            watch.check()
        counters.lend()
        clock.pass_s(works_s)
        counters.request()
    counters.receive_none()
    watch.end(is_excused=is_excused)
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
        ([9.0] * WARM_UP_BATCHES + [0.0] * 100, 0.2, 0),
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


@pytest.mark.parametrize(
    ("seconds", "bottleneck", "words"),
    [
        ({"read_s": 2.0, "host_transform_s": 7.0}, "host_transform", "for your host_transform"),
        # Four threads read, and one at a time calls the function.
        (
            {"read_s": 12.0, "host_transform_s": 8.0, "n_readers": 4},
            "host_transform",
            "per batch: host_transform 800 ms.",
        ),
        (
            {"read_s": 1.0, "device_transform_s": 8.0},
            "device_transform",
            "device_transform is the bottleneck",
        ),
        # One thread calls both functions.
        (
            {"host_transform_s": 4.0, "device_transform_s": 5.0},
            "device_transform",
            "host_transform 400 ms, device_transform 500 ms",
        ),
        ({"read_s": 7.0, "source_s": 3.5, "host_transform_s": 6.5}, "reading", "share 0.50"),
        (
            {"read_s": 1.0, "device_transform_s": 0.1, "copy_wait_s": 8.0, "asynchronous": True},
            "copying",
            "If device_transform takes long",
        ),
        (
            {"copy_wait_s": 6.0, "device_transform_s": 8.0, "watched": "device"},
            "device_transform",
            "takes longer than the training step",
        ),
        (
            {"copy_wait_s": 8.0, "device_transform_s": 7.0, "watched": "device"},
            "copying",
            "copying to the device is the bottleneck",
        ),
        ({"read_s": 4.0, "host_transform_s": 5.0}, "unevenness", "A higher depth"),
    ],
)
def test_a_loop_that_waits_for_transforms(
    seconds: dict[str, Any], bottleneck: str, words: str
) -> None:
    found = Totals(batches=10, rows=80, seconds=10.0, wait_s=6.0, starved_s=6.0, depth=2, **seconds)
    assert found.bottleneck == bottleneck
    assert words in explanation(found, lambda share: f"share {share:.2f}")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_slow_host_transform_moves_to_the_device_only_on_a_gpu(has_gpu: bool) -> None:
    counted = Totals(
        batches=100,
        seconds=10.0,
        wait_s=8.0,
        starved_s=8.0,
        read_s=2.0,
        host_transform_s=7.0,
        depth=2,
        asynchronous=has_gpu,
    )
    assert counted.bottleneck == "host_transform"
    advice = explanation(counted, str)
    assert "worker processes of a DataLoader" in advice
    assert ("device_transform can do its work" in advice) == has_gpu


def test_unknown_bytes_are_not_named() -> None:
    found = Totals(
        batches=1, rows=8, seconds=50.0, wait_s=40.0, starved_s=40.0, read_s=1.0, depth=2
    )
    assert "A batch of 8 rows takes 1,000 ms to read" in explanation(found, lambda share: "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.64e-6, "7.64 µs"), (99.9e-6, "99.9 µs"), (99.96e-6, "0.1 ms"), (0.0123, "12.3 ms")],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("is_excused", "n_warnings"), [(False, 1), (True, 0)])
def test_a_loop_that_measures_depth_0_gets_no_hint_to_prefetch(
    caplog: pytest.LogCaptureFixture, is_excused: bool, n_warnings: int
) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    watch = StarvationMonitor(counters, str)
    run(watch, counters, clock, [0.3] * 60, 0.2, 0, is_excused=is_excused)
    assert len(caplog.records) == n_warnings
    assert all("depth=2 prefetches" in record.getMessage() for record in caplog.records)


def test_short_loops_are_judged_together(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    counters = Counters(now=clock)
    watch = StarvationMonitor(counters, lambda share: "feed it")
    for _ in range(20):
        run(watch, counters, clock, [0.05] * (WARM_UP_BATCHES + STRETCH_BATCHES), 0.02)
    assert len(caplog.records) == 1
    for _ in range(20):
        # The first batches of a loop do not count, because they could not be prefetched.
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
        "The loop waited 60% of the last",
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
    # The statistics show 13%, which is no reason for a warning.
    assert feeder.stats.bottleneck != "computing"
    feeder.close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("rows", "is_cautious"),
    [
        (None, False),
        (pinfeed.rows.shuffled(0), False),
        (torch.utils.data.RandomSampler(range(1000)), False),
        (torch.arange(1000), False),
        # A loop may append to the list from which this generator draws.
        ((row for row in range(1000)), True),
    ],
    ids=["all", "order", "sampler", "tensor", "generator"],
)
def test_no_depth_is_advised_for_rows_of_an_iterator(rows: Any, is_cautious: bool) -> None:
    found = Totals(batches=10, seconds=10.0, wait_s=6.0, starved_s=6.0, read_s=6.0)
    late = dataclasses.replace(found, depth=2, read_s=1.0)
    overhead = dataclasses.replace(late, wait_s=0.0, overhead_s=6.0)
    with pinfeed.Feeder(np.zeros((1000, 2)), rows=rows, batch_size=10, depth=0) as feeder:
        source = runner_of(feeder).source
        texts = [
            explanation(totals, str, source.depth_caution) for totals in (found, late, overhead)
        ]
    advice = ["depth=2 prefetches", "A higher depth", "depth=0 needs no threads"]
    given = [words in text for words, text in zip(advice, texts, strict=True)]
    assert given == [not is_cautious] * 3
    assert all(("pinfeed advises no depth" in text) == is_cautious for text in texts[:2])
    assert not any("same results" in text for text in texts)


def test_no_depth_is_advised_for_batches_of_an_iterator() -> None:
    class Growing(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any: ...

    data = torch.zeros(10)
    drawn = [LoaderSource(loader).depth_caution() for loader in (iter([1]), DataLoader(Growing()))]
    assert all("before these steps" in text for text in drawn)
    own = DataLoader(data, sampler=iter([1]))  # type: ignore[arg-type]
    assert LoaderSource(own).depth_caution()
    torchs = DataLoader(data), DataLoader(data, shuffle=True), DataLoader(data, batch_size=None)
    assert not any(LoaderSource(loader).depth_caution() for loader in torchs)


def test_more_readers_than_cores_are_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    hints = []
    for n_readers in (1, 2, 3):
        feeder = wrap_readers(
            [1] * 4,
            [1] * 4,
            read_input=lambda i: [i],
            get_output=lambda i: [i],
            batch_size=4,
            n_readers=n_readers,
            device="cpu",
        )
        hints.append(runner_of(feeder).source.hint(0.0))
        feeder.close()
    assert ["Raise n_readers" in hint for hint in hints] == [True, False, False]
    assert "n_readers=2 already uses all 2 cores" in hints[1]


def test_writing_is_explained_without_a_method_of_some_loops() -> None:
    found = Totals(batches=9, seconds=9.0, starved_s=6.0, write_wait_s=6.0, depth=2)
    assert found.bottleneck == "writing"
    assert "write_back" not in explanation(found, str)


def test_sources_know_what_to_change(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 64), np.float32))
    store = NpyStore(tmp_path / "x.npy", keep_cache=False)

    def hint(order: Any, free: int) -> str:
        choice = choose([store], order, 100, FreeMemory(free, free))
        found: str = choice.strategies[0].hint
        for access in choice.strategies:
            access.close()
        return found

    shuffled, blocks = (
        pinfeed.rows.shuffled(0),
        pinfeed.rows.block_shuffled(0, block_rows=256, window_blocks=1),
    )
    assert "x.npy is still being loaded into memory" in hint(shuffled, 1 << 30)
    assert "block_shuffled(seed, block_rows=1024)" in hint(shuffled, 0)
    assert "With 250.0 KiB of memory for the whole file" in hint(shuffled, 0)
    assert "read in sequence" in hint(pinfeed.rows.sequential(), 1 << 30)
    assert "page cache" in hint(blocks, 0)
    assert "Windows of x.npy" in hint(blocks, 240_000)
    # Rows in memory are never the reason if other rows are in a file.
    pairs = [(4096.0, IN_MEMORY_HINT), (8.0, hint(blocks, 0))]
    assert main_hint(pairs) == main_hint(pairs[::-1]) == hint(blocks, 0)
    own = choose([OfMyOwn()], shuffled, 100, FreeMemory(0, 0)).strategies[0].hint
    assert own.startswith("The loop waits for gather() of the OfMyOwn")
    assert (
        "rows are in memory"
        in choose([ArrayStore(np.zeros(3))], shuffled, 100, FreeMemory(0, 0)).strategies[0].hint
    )
    store.close()
    with NpyStore(tmp_path / "x.npy", memory_map=False) as store:
        assert "block_shuffled(seed, block_rows=1024)" in hint(shuffled, 0)
        assert "block_shuffled" not in hint(blocks, 0)
    loader = DataLoader(torch.zeros(10), num_workers=1)
    assert "num_workers=1" in LoaderSource(loader).hint(0.9)
    assert "smaller dtype" in LoaderSource(loader).hint(0.1)
    assert "loader (list)" in LoaderSource([1]).hint(0.9)
    feeder = wrap_readers(
        [1], [1], read_input=lambda i: [i], get_output=lambda i: [i], batch_size=2, device="cpu"
    )
    assert "Raise n_readers (now 1" in runner_of(feeder).source.hint(0.0)
    feeder.close()
    feeder = wrap_readers(
        [1], [1], read_input=lambda i: [i], get_output=lambda i: [i], batch_size=1, device="cpu"
    )
    assert "n_readers has no effect" in runner_of(feeder).source.hint(0.0)
    feeder.close()
    loop = pinfeed.train_rows(
        [], {pinfeed.HostEmbedding(5, 2, name="users"): "ids"}, device=HostDevice()
    )
    assert "Gathering rows of users" in runner_of(loop).source.hint(0.2)
    assert "loader (list)" in runner_of(loop).source.hint(0.8)
