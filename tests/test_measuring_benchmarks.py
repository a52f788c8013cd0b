"""Measurements that the benchmarks share: memory by kind, raw rates, a step, the page cache."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ceilings, conditions
from benchmarks.conditions import (
    ComputingStep,
    cached_share,
    drop,
    memory_by_kind,
    read_through,
    touch_memory,
)
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
    monkeypatch.setattr(conditions, "free_host_bytes", lambda: MiB(1))
    touch_memory(MiB(8))
    assert sum(sizes[3:]) == MiB(1) // 2, "half of the free memory is left to others"


def test_rows_are_gathered_without_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [np.array([3, 1, 2]), np.arange(10, 13), np.array([0, 499])]
    for n_threads in (1, 2):
        monkeypatch.setattr(ceilings, "_MOST_THREADS", n_threads)
        assert ceilings.gather_rate(Path("x.npy"), batches) > 0


def test_a_file_is_read_in_three_ways() -> None:
    assert ceilings.read_rate(Path("x.npy"), 1) > 0
    assert ceilings.populate_rate(Path("x.npy")) >= 0
    assert ceilings.cold_rate(Path("x.npy")) > 0


def test_a_step_is_a_fixed_number_of_products() -> None:
    step = ComputingStep(3)
    step()
    assert step.n_products == 3
    assert step.alone_s() > 0


def test_files_are_read_into_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel decides what it keeps in the page cache, so the test simulates its answer."""
    read_through(["x.npy"])
    n_there = 3
    monkeypatch.setattr(
        conditions,
        "cached_pages",
        lambda fd, begin, end: np.arange(-(-(end - begin) // 4096)) < n_there,
    )
    assert cached_share("x.npy") == 3 / -(-os.path.getsize("x.npy") // 4096)
    asked: list[int] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, offset, length, advice: asked.append(advice)
    )
    monkeypatch.setattr(conditions.time, "sleep", lambda _: None)
    assert drop(["x.npy"]) == cached_share("x.npy")
    assert asked == [os.POSIX_FADV_DONTNEED] * 20, "pages in use may stay"
    n_there, asked = 0, []
    assert drop(["x.npy"]) == 0
    assert asked == [os.POSIX_FADV_DONTNEED]
