"""Measurements that the commands and the benchmarks share: memory by kind, raw rates, a step."""

import math
import mmap

import numpy as np
import pytest
from support.command import X

from pinfeed import MiB
from pinfeed.cli import bandwidth, conditions
from pinfeed.cli.conditions import ComputingStep, memory_by_kind, touch_memory


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
