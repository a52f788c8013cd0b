"""The streaming benchmark compares rows, counts waits by the loop's clock, and reports losses."""

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import onerun, streaming
from benchmarks.environment import RESULTS
from benchmarks.onerun import EpochTiming, Meeting
from benchmarks.peers import CONTESTANTS, LIMITED, Task
from benchmarks.rowfile import Kind, create
from benchmarks.streaming import Contest, all_cells
from pinfeed import MiB

KIND = Kind("small", (16,), 32, 1)
RUN: dict[str, Any] = {
    "epochs": [
        {"gb_per_s": 2.0, "waited": 0.5},
        {"gb_per_s": 4.0, "waited": 0.25},
        {"gb_per_s": 6.0, "waited": 0.15},
    ],
    "growth": {"anonymous": MiB(8), "file": MiB(64), "shared": 0},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create(tmp_path / "rows.npy", KIND, 1000 * KIND.row_nbytes)
    create(tmp_path / "tiny.npy", Kind("tiny", (1,), 8, 0), 64)
    return tmp_path / "rows.npy"


@pytest.mark.parametrize(("name", "order"), [("pinfeed", "shuffled"), ("loop", "sequential")])
def test_a_run_times_each_epoch(path: Path, name: str, order: str) -> None:
    onerun.check(path, KIND, order, name)
    found = onerun.run(
        path,
        path.with_name("tiny.npy"),
        KIND,
        order,
        name,
        cold=False,
        computes=False,
        cap_s=30,
        meeting=Meeting(path.parent),
    )
    assert found["complete"]
    assert [0 <= epoch["waited"] <= 1 for epoch in found["epochs"]] == [True] * 3
    assert set(found["growth"]) == {"anonymous", "file", "shared"}


def test_wrong_rows_are_found(path: Path) -> None:
    task = Task.make(path, KIND, "shuffled", 2, cold=False)
    total = float(sum(rows.sum() for rows in task.epochs[0]))
    right = EpochTiming(992, 1.0, 0.5, total)
    onerun.compare_sums(task, [right], complete=True)
    wrong = EpochTiming(992, 1.0, 0.5, total + 1)
    with pytest.raises(AssertionError, match="epoch 0: the rows are not those of the file"):
        onerun.compare_sums(task, [wrong], complete=True)
    # An epoch that was ended early lacks rows.
    onerun.compare_sums(task, [right, EpochTiming(32, 1.0, 0.5, 0.0)], complete=False)


def test_waits_are_counted_by_the_clock_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(onerun.time, "perf_counter", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    def epoch(batch_s: float) -> Iterator[torch.Tensor]:
        for number in range(3):
            work(batch_s)
            yield torch.full((8, 2), float(number))
        work(1)

    def epochs() -> Iterator[Iterator[torch.Tensor]]:
        # The construction of the loader is a part of the first epoch.
        work(10)
        yield epoch(2)
        yield epoch(1)

    timings, complete = onerun.timed(epochs(), lambda: work(5), 1000, lambda: work(100))
    assert complete
    assert timings == [EpochTiming(24, 32, 17, 24), EpochTiming(24, 19, 4, 24)]
    now[0] = 0.0
    timings, complete = onerun.timed(epochs(), lambda: work(5), 20, lambda: None)
    assert (len(timings), timings[0].n_rows, complete) == (1, 16, False)


def test_processes_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = [Meeting(tmp_path, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(lambda meeting: meeting.wait("here"), meetings))
    monkeypatch.setattr(onerun, "_MEETING_S", 0.0)
    with pytest.raises(TimeoutError, match="not all of 2 processes"):
        meetings[0].wait("there")


def results() -> dict[str, Any]:
    """Return results of a contest in which pinfeed wins only the later epochs."""
    contest = Contest(Path(), all_cells(), list(CONTESTANTS))
    rates = {f"gather, {order}": 8.0 for order in streaming.ORDERS}
    rates |= {"sequential, cold": 1.5, "step_s": 0.002}
    contest.ceilings = {kind: [rates] for kind in contest.kinds}
    slower = copy.deepcopy(RUN)
    slower["epochs"] = [{"gb_per_s": 3.0, "waited": 0.5}]
    for cell in contest.cells:
        contest.runs[str(cell)] = {
            name: [[RUN if name == "pinfeed" else slower] * cell.n_processes]
            for name in contest.names
            if cell.has(name)
        }
    return contest.results()


def test_pinfeed_and_fast_peers_are_in_every_kind_of_cell() -> None:
    cells = all_cells()
    assert {str(cell) for cell in cells} >= streaming.QUICK
    for cell in cells:
        names = {name for name in CONTESTANTS if cell.has(name)}
        assert names >= {"pinfeed", "torchdata.nodes", "grain"}
        is_plain = not cell.computes and cell.n_processes == 1
        assert (LIMITED in names) == (cell.kind.name == "4 KiB" and is_plain)


def test_medians_add_up_processes() -> None:
    cells = {cell["cell"]: cell for cell in results()["cells"]}
    one = cells["4 KiB, warm, shuffled"]["contestants"]["pinfeed"]
    two = cells["4 KiB, warm, shuffled, 2 processes"]["contestants"]["pinfeed"]
    assert (one["first"], one["later"], one["waited_first"], one["waited_later"]) == (
        2,
        5,
        0.5,
        0.2,
    )
    assert (two["first"], two["later"], two["waited_first"], two["waited_later"]) == (
        4,
        10,
        0.5,
        0.2,
    )
    assert (one["anonymous_mib"], two["file_mib"]) == (8, 128)
    assert cells["4 KiB, cold, shuffled"]["ceiling"] == 1.5


def test_tables_show_first_and_later_epochs() -> None:
    lines = [" ".join(line.split()) for line in streaming.tables(results()).splitlines()]
    for part in (
        "| 4 KiB, warm, shuffled | 8.00 | 2.00 | 3.00 (loop) | 0.67 | 5.00 |",
        "| 4 KiB, warm, shuffled + step | 2.10 | 50% / 20% | ",
        "| 4 KiB, warm, shuffled, 2 processes | 16 / 128 |",
    ):
        assert any(line.startswith(part) for line in lines), part


def test_the_tables_of_the_page_are_made_of_the_results() -> None:
    for path in RESULTS.glob("streaming-*.json"):
        saved = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == streaming.tables(saved) + "\n"
