"""``pinfeed bench``: a feeder compared with DataLoaders on equal rows; the page cache."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command import X, run, values

from pinfeed import MiB, NpyStore, rows
from pinfeed.cli import conditions
from pinfeed.cli import trial as trials
from pinfeed.cli.bench import _report
from pinfeed.cli.conditions import cached_share, drop, read_through
from pinfeed.cli.dataloader import Rows
from pinfeed.cli.orders import OrderOptions
from pinfeed.cli.trial import Rate, Timing


def test_bench(quick: list[str]) -> None:
    found = values(
        "bench", "s-0.npy", "s-1.npy", "--shuffle", "--batch-size", "32", "--workers", "0,1", *quick
    )
    assert (found["batch_size"], found["order"], found["device"], found["warm"]) == (
        32,
        "shuffled",
        "cpu",
        True,
    )
    assert found["ceilings_gb_per_s"]["copy in memory"] > 0
    assert found["ceilings_gb_per_s"]["gather from the page cache"] > 0
    assert found["step_products"] >= 1
    others = [f"DataLoader, {what}, {n} workers" for what in ("batches", "rows") for n in (0, 1)]
    assert [timing["name"] for timing in found["contestants"]] == ["pinfeed", *others]
    for timing in found["contestants"]:
        assert timing["problem"] == ""
        assert timing["first_epoch"]["rows"] <= 500
        assert timing["later_epochs"]["rows_per_s"] > 0
        assert 0 < timing["with_step"]["waited"] < 1
        assert set(timing["memory_bytes"]) == {"anonymous", "file", "shared"}
        assert timing["pinfeed_ratio"] > 0
    assert found["contestants"][0]["pinfeed_ratio"] == 1


def test_bench_of_parallel_sources(quick: list[str]) -> None:
    np.save("y.npy", np.arange(500))
    found = values(
        "bench",
        "x.npy",
        "--with",
        "y.npy",
        "--shuffle",
        "--batch-size",
        "32",
        "--workers",
        "0,1",
        *quick,
    )
    assert found["with"][0]["dtype"] == "int64"
    for timing in found["contestants"]:
        assert timing["problem"] == ""
        later = timing["later_epochs"]
        assert later["row_nbytes"] == 3 * 8 * 4 + 8
        assert later["gb_per_s"] == pytest.approx(later["rows_per_s"] * 104 / 1e9)
    with NpyStore("x.npy") as x, NpyStore("y.npy") as y:
        trial = trials.Trial([x, y], rows.shuffled(1), 32, "cpu", 0.01)
        np.save("z.npy", np.arange(500)[::-1])
        # The batches are compared with the rows of these files.
        trial.sources = [["x.npy"], ["z.npy"]]
        assert [timing.equal for timing in trial.timings([])] == [False]


def test_bench_cold_in_words(quick: list[str]) -> None:
    result = run("bench", "x.npy", "--cold", "--workers", "0", *quick)
    assert result.exit_code == 0, result.output
    for said in (
        "cold: the files are dropped from the OS page cache",
        "disk, in sequence",
        "In the first epoch, pinfeed ",
        "DataLoader, rows, 0 workers",
    ):
        assert said in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("block_rows", [None, 8])
def test_all_contestants_stream_the_same_rows(block_rows: int | None) -> None:
    """All contestants stream the same rows in each epoch, and a difference is detected."""
    order = OrderOptions(shuffle=block_rows is None, block_rows=block_rows, seed=5).order
    with NpyStore(["s-0.npy", "s-1.npy"]) as store:
        trial = trials.Trial([store], order, 32, "cpu", 0.01)
        with (
            trial._feeder() as epochs,
            trials.loader_epochs(
                trial.sources, trial.batches, "cpu", n_workers=0, by_row=True
            ) as others,
        ):
            for epoch in (0, 1):
                assert torch.equal(torch.cat(list(epochs(epoch))), torch.cat(list(others(epoch))))
        assert all(timing.equal for timing in trial.timings([]))
        trial.sources = [["s-1.npy", "s-0.npy"]]
        timings = list(trial.timings([]))
    assert [timing.equal for timing in timings] == [False]
    report = _report(trial, "shuffled", {"copy in memory": 1.0}, timings)
    assert report.findings == ("pinfeed: its batches differ from the rows of the files",)


def test_rates_and_shares_are_shown() -> None:
    """First and later epochs are compared separately, and memory is shown by kind."""
    with NpyStore("x.npy") as store:
        trial = trials.Trial([store], rows.shuffled(1), 32, "cpu", 0.01)
    rate = functools.partial(Rate, row_nbytes=96, complete=True)
    memory = {"anonymous": MiB(12), "file": MiB(2048), "shared": 0}
    timings = [
        Timing("pinfeed", rate(500, 1.0), rate(500, 0.5), rate(500, 2.0, waited_s=0.5), memory),
        Timing("slow", rate(500, 2.0), rate(500, 2.0), memory={}),
        Timing("fast", rate(500, 0.5), rate(500, 0.52), memory={}),
    ]
    report = _report(trial, "shuffled", {"gather from the page cache": 0.25}, timings)
    lines = report.text.splitlines()
    ours, slow = (
        [line.split() for line in lines if line.startswith(name)] for name in ("pinfeed ", "slow ")
    )
    assert ours == [["pinfeed", "4.8e-05", "9.6e-05", "1.00", "25%", "12", "2,048"]]
    assert slow == [["slow", "2.4e-05", "2.4e-05", "4.00"]]
    said = " ".join(report.text.split())
    assert "In the first epoch, pinfeed has 50% of the rate of the fastest other (fast)." in said
    assert "In later epochs, pinfeed is about as fast as the fastest other (fast)." in said
    assert report.values["contestants"][0]["with_step"]["waited"] == 0.25


def test_waits_are_counted_by_the_clock_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(4):
            work(3)
            yield torch.zeros(8)
        work(2)

    with NpyStore("x.npy") as store:
        trial = trials.Trial([store], rows.shuffled(1), 32, "cpu", 0.01)
    whole = trial._rate(batches(), 0.0, 100, lambda: work(5))
    assert whole == Rate(32, 34.0, 96, True, 14.0)
    assert whole.waited == 14 / 34
    now[0] = 0.0
    monkeypatch.setattr(trials, "_LEAST_TIMED", 2)
    assert trial._rate(batches(), 0.0, 10, lambda: work(5)) == Rate(16, 16.0, 96, False, 6.0)


def test_rates_of_slow_loaders_are_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the time to leave the first epoch nor a single batch is a rate of later epochs."""
    now = [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])

    def epoch(number: int) -> Iterator[torch.Tensor]:
        # Workers still read batches of the epoch that was left.
        now[0] += 16.0 * (number > 0)
        for _ in range(100):
            now[0] += 2.0
            yield torch.zeros(32, 3, 8)

    @contextlib.contextmanager
    def slow() -> Iterator[trials.Epochs]:
        yield epoch

    with NpyStore("x.npy") as store:
        trial = trials.Trial([store], rows.shuffled(1), 32, "cpu", 0.5)
    monkeypatch.setattr(trial, "_gives_the_rows", lambda _: True)
    monkeypatch.setattr(trial, "_settle", lambda: None)
    timing = trial._timed("slow", slow)
    assert timing.first == Rate(256, 16.0, 96, False, 16.0)
    assert timing.later == Rate(256, 16.0, 96, False, 16.0)


def test_step_ms_of_zero_measures_no_step(quick: list[str]) -> None:
    found = values("bench", "x.npy", "--step-ms", "0", "--workers", "0", *quick)
    assert found["step_products"] is None
    assert found["contestants"][0]["with_step"] is None


def test_a_loader_that_fails_says_why(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(_: Any) -> Any:
        raise RuntimeError("no room\nat all")

    # The loader of rows collates; the loader of batches does not.
    monkeypatch.setattr(torch.utils.data._utils.collate, "default_collate", collate)
    found = values("bench", "x.npy", "--workers", "0", *quick)
    assert [timing["problem"] for timing in found["contestants"]] == [
        "",
        "",
        "RuntimeError: no room at all",
    ]
    assert (
        found["contestants"][2]["first_epoch"] is found["contestants"][2]["pinfeed_ratio"] is None
    )
    shown = " ".join(run("bench", "x.npy", "--workers", "0", *quick).stdout.split())
    assert "DataLoader, rows, 0 workers failed" in shown
    assert "DataLoader, rows, 0 workers: RuntimeError: no room at all" in shown


def test_rows_of_maps() -> None:
    """Single rows, ordered rows and unordered rows are tensors that own their memory."""
    np.save("s-0.npy", X[:300].astype(">f4"))
    np.save("s-1.npy", X[300:].astype(">f4"))
    for found in (Rows(["x.npy"]), Rows(["s-0.npy", "s-1.npy"])):
        assert len(found) == 500
        for chosen in (np.array([499, 0, 300, 299]), np.arange(250, 350)):
            np.testing.assert_array_equal(found[chosen].numpy(), X[chosen])
        assert all(torch.equal(found[row], torch.from_numpy(X[row])) for row in (0, 299, 300, 499))


def test_warm_needs_files_that_fit_in_memory(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "free_host_bytes", lambda: 1000)
    result = run("bench", "x.npy", "--warm")
    assert result.exit_code == 3
    assert (
        "--warm: the files have 46.9 KiB, but they may fill only half of the free memory (1000 B)"
        in result.stderr
    )
    assert values("bench", "x.npy", "--workers", "0", *quick)["warm"] is False


def test_bench_of_rows_without_bytes() -> None:
    np.save("none.npy", X[:, :0])
    assert "its rows have 0 bytes; expected rows to read" in run("bench", "none.npy").stderr


def test_files_are_read_into_the_page_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel decides what it keeps in the page cache, so the test simulates its answer."""
    assert read_through(["x.npy", "s-0.npy"])
    assert not read_through(["x.npy"], seconds=-1), "it stops at the time limit"
    n_there = 3
    monkeypatch.setattr(
        conditions,
        "cached_pages",
        lambda fd, begin, end: np.arange(-(-(end - begin) // 4096)) < n_there,
    )
    n_pages = sum(-(-os.path.getsize(path) // 4096) for path in ("x.npy", "s-0.npy"))
    assert cached_share(["x.npy", "s-0.npy"]) == 6 / n_pages
    asked: list[int] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, offset, length, advice: asked.append(advice)
    )
    monkeypatch.setattr(conditions.time, "sleep", lambda _: None)
    drop(["x.npy"])
    assert asked == [os.POSIX_FADV_DONTNEED] * 20, "pages in use may stay"
    n_there, asked = 0, []
    drop(["x.npy"])
    assert asked == [os.POSIX_FADV_DONTNEED]


@pytest.mark.gpu
def test_bench_on_a_gpu() -> None:
    found = values(
        "bench", "x.npy", "--shuffle", "--seconds", "0.05", "--workers", "0", "--device", "cuda"
    )
    assert found["device"].startswith("cuda")
    assert found["ceilings_gb_per_s"]["link to the GPU"] > 0
    assert [timing["problem"] for timing in found["contestants"]] == ["", "", ""]
