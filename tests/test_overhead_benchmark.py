"""The benchmarks of the overhead measure what they say, and run with an earlier pinfeed."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import forwarding, handover
from benchmarks.earlier import Earlier, opened
from benchmarks.idledevice import IdleDevice
from benchmarks.lock_sampler import LockSampler
from pinfeed import Feeder

ROOT = Path(__file__).parents[1]
N_ROWS = 8


class CountedTable(forwarding.VirtualTable):
    """A table that counts the rows which are written to it."""

    def __init__(self) -> None:
        self._n_rows = 0

    @property
    def n_writes(self) -> int:
        """Return the number of batches of ``N_ROWS`` that were written."""
        assert self._n_rows % N_ROWS == 0
        return self._n_rows // N_ROWS

    def scatter(self, rows: Any, values: Any) -> None:
        self._n_rows += len(rows)


@pytest.mark.parametrize("n_pending", range(forwarding.DEPTH + 1))
def test_pending_writes_when_the_loop_receives_a_batch(n_pending: int) -> None:
    table = CountedTable()
    device = IdleDevice(direct=False)
    batches = [np.arange(N_ROWS) + N_ROWS * i for i in range(20)]
    with Feeder(table, rows=batches, depth=forwarding.DEPTH, device=device) as feeder:
        loop = forwarding.WriteLoop(feeder, device, n_pending)
        for i in range(len(batches)):
            loop.prepare_take()
            loop.take()
            assert i - table.n_writes == min(i, n_pending)
            loop.prepare_write()
            loop.write()
    assert table.n_writes == len(batches)


def test_a_write_that_the_consumer_thread_waits_for_is_completed() -> None:
    table = CountedTable()
    device = IdleDevice(direct=False)
    batches = [np.arange(N_ROWS) + N_ROWS * i for i in range(20)]
    with Feeder(table, rows=batches, depth=2, device=device) as feeder:
        for i, batch in enumerate(feeder.batches()):
            # The queue holds two write-backs.
            assert i - table.n_writes == min(i, 2)
            batch.write_back(batch.data)
        assert table.n_writes == len(batches)


@pytest.mark.parametrize("is_shared", [False, True], ids=["none shared", "half shared"])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
def test_batches_have_the_rows_in_common_that_a_cell_says(is_sorted: bool, is_shared: bool) -> None:
    n_rows = 64
    batches = forwarding.row_indices(n_rows, is_sorted, is_shared)
    n_shared = n_rows // 2 if is_shared else 0
    # The first batch follows the last one again.
    for before, batch in zip([batches[-1], *batches[:-1]], batches, strict=True):
        assert len(np.unique(batch)) == n_rows
        assert len(np.intersect1d(before, batch)) == n_shared
        assert bool((np.diff(batch) > 0).all()) == is_sorted
    window = np.concatenate(batches[: 2 * forwarding.DEPTH + 2])
    assert len(np.unique(window)) >= len(window) // (2 if is_shared else 1)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
def test_a_cell_of_write_backs_is_measured(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "CAP_S", 0.0)
    results = forwarding.measure([64], direct=direct)
    assert len(results) == len(forwarding.cells([64]))
    assert all(result["after"]["batches"] == [3, 3] for result in results)
    report = forwarding.report(results)
    assert "64 unsorted rows, half in common" in report
    assert "before:" not in report


def test_a_loop_is_measured_by_this_and_by_an_earlier_pinfeed(earlier: Earlier) -> None:
    arguments = ("cpu", 1, handover.WRITES, 20)
    keys = {"p50", "p90", "mean", "training_cpu", "others_cpu"}
    assert keys <= handover.one_cell(*arguments).keys()
    assert keys <= earlier.call("benchmarks.handover:one_cell", *arguments).keys()


def test_the_holder_of_the_lock_is_sampled_where_permitted() -> None:
    with LockSampler() as sampler:
        sorted(range(1_000_000))
    assert sampler.seconds > 0
    assert (sampler.training is None) == (sampler.others is None)
    if sampler.training is not None and sampler.others is not None:
        assert 0 <= sampler.training + sampler.others <= 1


@pytest.mark.parametrize("depth", handover.DEPTHS)
def test_every_way_counts_its_batches(depth: int) -> None:
    def count(batches: Iterable[Any], body: handover.Body) -> handover.Figures:
        n = 0
        for batch in batches:
            body(batch)
            n += 1
        return {"n": n}

    found = [way() for way in handover.ways("cpu", depth, 5, count).values()]
    assert found == [{"n": 5}] * len(found)


def test_the_report_of_loops_names_goals_that_are_missed() -> None:
    keys = [key for keys in handover.TABLES.values() for key in keys]
    cells = {
        f"{name}, depth {depth}": dict.fromkeys(keys, 20.0)
        for name in handover.GOALS_US
        for depth in handover.DEPTHS
    }
    last = f"{handover.WRITES}, depth 4"
    partly = cells | {last: {**cells[last]}}
    del partly[last]["others_lock"]
    results = {"before": {"cpu": cells}, "after": {"cpu": partly}}
    report = handover.report(results)
    assert "µs (median, 90th percentile):\n\n| " in report
    assert "| 20, 20 → 20     |" in report
    goals = handover.goals(results).splitlines()
    first = "cpu: a feeder, empty source, depth 0: median 20.0 → 20.0 µs, goal 10: missed"
    assert goals[0] == first
    assert [line.rpartition(" ")[2] for line in goals] == [
        *("missed", "met", "missed", "missed"),
        *("met", "met", "met", "met"),
        "met",
    ]


@pytest.fixture(scope="module")
def earlier() -> Iterator[Earlier]:
    """The pinfeed of this checkout, as if it was an earlier one."""
    with opened(ROOT) as process:
        assert process is not None
        yield process


def test_an_earlier_pinfeed_is_imported_in_its_own_process(earlier: Earlier) -> None:
    assert earlier.call("platform:python_version").count(".") == 2
    assert earlier.call("os:getpid") != earlier.call("os:getppid")
    assert earlier.call("benchmarks.environment:environment").startswith("pinfeed ")


def test_an_error_of_an_earlier_pinfeed_is_raised_here(earlier: Earlier) -> None:
    with pytest.raises(RuntimeError, match=r"TypeError: .*n_pending"):
        earlier.call("benchmarks.forwarding:one_cell", {"n_rows": 64})
    assert earlier.call("os:getpid")


def test_a_process_that_has_ended_is_an_error() -> None:
    with opened(ROOT) as process:
        assert process is not None
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended during os:_exit"):
                process.call("os:_exit", 3)


def test_a_folder_without_pinfeed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a checkout"), opened(tmp_path):
        pass
