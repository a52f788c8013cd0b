"""The benchmarks of orders: counted rows, programs that resume, and tables made of the results."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks import orders, packing, resume
from benchmarks.environment import RESULTS


def test_repeated_and_lost_rows_are_counted() -> None:
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    figures = {"equal": False, "n_resumed": 4, "repeated": 0, "lost": 0}
    same = resume.compared([[4, 5], [6, 7]], whole, 2)
    assert same == figures | {"equal": True}
    assert resume.compared([[5, 4], [6, 7]], whole, 2) == figures
    # Row 3 is from before the saved position, and row 5 comes twice.
    found = resume.compared([[3, 5], [5, 6]], whole, 2)
    assert found == figures | {"repeated": 2, "lost": 2}


def test_a_resumed_program_has_the_rest_of_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume, "SIZES", {"web": 1400, "code": 550})
    monkeypatch.setattr(resume, "BATCH_SIZE", 40)
    resume.prepare_pinfeed(tmp_path)

    def run(n_ranks: int, rank: int) -> list[dict[str, Any]]:
        resume.run_program("pinfeed", tmp_path, n_ranks, rank)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    whole = run(1, 0)
    assert len(whole) % resume.SAVE_EVERY
    state = (tmp_path / "state.pt").read_bytes()
    n_done = len(whole) // resume.SAVE_EVERY * resume.SAVE_EVERY
    of_ranks = []
    for rank in range(2):
        (tmp_path / "state.pt").write_bytes(state)
        of_ranks.append(run(2, rank))
    found = [[*one["rows"], *other["rows"]] for one, other in zip(*of_ranks, strict=True)]
    assert of_ranks[0][0]["batch"] == n_done + 1
    assert found == [one["rows"] for one in whole[n_done:]]


def test_batches_without_padding_are_as_long_as_most_in_the_mean() -> None:
    assert packing.flattened_rows(np.array([10, 20, 30]), 100) == 5
    assert packing.flattened_rows(np.array([10, 20, 30]), 4) == 1


@pytest.mark.parametrize("module", [orders, packing, resume], ids=lambda one: one.__name__)
def test_the_tables_of_the_pages_are_made_of_the_results(module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    paths = list(RESULTS.glob(f"{name}-*.json"))
    assert paths
    for path in paths:
        results = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == module.report(results) + "\n"
