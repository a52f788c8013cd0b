"""Measurements that the benchmarks share: memory by kind, raw rates, a step, the page cache."""

import math
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bandwidth, conditions
from benchmarks.conditions import (
    ComputingStep,
    cached_share,
    drop,
    memory_by_kind,
    read_through,
    touch_memory,
)
from benchmarks.mapped_rows import Rows
from pinfeed import MiB

X = np.random.default_rng(0).normal(size=(500, 3, 8)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)


def test_memory_is_counted_by_kind() -> None:
    before = memory_by_kind()
    own = np.ones(MiB(32), np.uint8)
    shared = mmap.mmap(-1, MiB(16))
    shared.write(bytes(MiB(16)))
    growth = {kind: nbytes - before[kind] for kind, nbytes in memory_by_kind().items()}
    assert growth["anonymous"] >= 0.9 * own.nbytes
    assert growth["shared"] == pytest.approx(MiB(16), abs=MiB(1))
    assert growth["file"] < MiB(8)
    shared.close()


def test_memory_is_touched_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def huge(nbytes: int) -> np.ndarray:
        sizes.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    monkeypatch.setattr(conditions, "huge", huge)
    monkeypatch.setattr(conditions, "_TOUCHED_BYTES", MiB(1))
    touch_memory(MiB(2) + 100)
    assert sizes == [MiB(1), MiB(1), 100]
    touch_memory(MiB(2), seconds=-1)
    assert len(sizes) == 3, "it stops at the time limit"
    monkeypatch.setattr(conditions, "free_host_bytes", lambda: MiB(1))
    touch_memory(MiB(8))
    assert sum(sizes[3:]) == MiB(1) // 2, "half of the free memory is left to others"


def test_rows_are_gathered_without_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.array_equal(bandwidth._populated("x.npy"), X)
    batches = [np.array([3, 1, 2]), np.arange(10, 13), np.array([0, 499])]
    for n_threads in (1, 2):
        monkeypatch.setattr(bandwidth, "_MOST_THREADS", n_threads)
        assert bandwidth.gather_rate("x.npy", batches) > 0


def test_a_file_is_read_in_three_ways() -> None:
    for seconds in (math.inf, -1):
        rates = bandwidth.sequential_rates("x.npy", seconds=seconds)
        assert rates.keys() >= {"pread, 1 threads", "pread, 4 threads"}


def test_a_step_is_a_fixed_number_of_products() -> None:
    step = ComputingStep(3)
    step()
    assert step.n_products == 3
    assert ComputingStep.lasting(1e-9).n_products == 1


def test_files_are_read_into_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel decides what it keeps in the page cache, so the test simulates its answer."""
    np.save("y.npy", X[:300])
    assert read_through(["x.npy", "y.npy"])
    assert not read_through(["x.npy"], seconds=-1), "it stops at the time limit"
    n_there = 3
    monkeypatch.setattr(
        conditions,
        "cached_pages",
        lambda fd, begin, end: np.arange(-(-(end - begin) // 4096)) < n_there,
    )
    n_pages = sum(-(-os.path.getsize(path) // 4096) for path in ("x.npy", "y.npy"))
    assert cached_share(["x.npy", "y.npy"]) == 6 / n_pages
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


def test_rows_of_maps() -> None:
    """Single rows, ordered rows and unordered rows are tensors that own their memory."""
    np.save("s-0.npy", X[:300].astype(">f4"))
    np.save("s-1.npy", X[300:].astype(">f4"))
    for found in (Rows(["x.npy"]), Rows(["s-0.npy", "s-1.npy"])):
        assert len(found) == 500
        for chosen in (np.array([499, 0, 300, 299]), np.arange(250, 350)):
            np.testing.assert_array_equal(found[chosen].numpy(), X[chosen])
        assert all(torch.equal(found[row], torch.from_numpy(X[row])) for row in (0, 299, 300, 499))
