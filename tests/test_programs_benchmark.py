"""The benchmark of programs compares equal batches and losses, and reports time and memory."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.environment import RESULTS
from benchmarks.programs import compare, run
from benchmarks.programs.program import NAMES, OURS, Program, Step, load


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """Restore the settings that are made for a process of the benchmark."""
    n_threads = torch.get_num_threads()
    logger = logging.getLogger("pinfeed")
    level = logger.level
    yield
    run._prepared.cache_clear()
    logger.setLevel(level)
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_and_its_pinfeed_version_have_equal_results(name: str, tmp_path: Path) -> None:
    if name == "single_cells":
        pytest.importorskip("scipy")
    program = load(name)
    size = program.sizes["tiny"]
    program.prepare(tmp_path, size)
    # Starting worker processes takes longer than all other ways together.
    ways = [way for way in program.ways if "workers" not in way]
    expected, *others = (run.results(name, "tiny", way, str(tmp_path)) for way in ways)
    assert OURS in ways[1:]
    assert len(expected["batches"]) == size.n_batches
    assert len(set(expected["losses"])) == size.n_steps
    assert all(found == expected for found in others)
    removed, added = program.changed_lines()
    assert added <= removed


def short_program(folder: Path, size: object, step: Step) -> None:
    """Train on a single batch."""
    step(torch.zeros(2, dtype=torch.int64))


def program(**given: object) -> Program:
    values = {"sizes": {}, "prepare": None, "make_step": None, "original": (), "moved": ()}
    return Program("short", **(values | given))  # type: ignore[arg-type]


def test_a_program_with_too_few_batches_is_found() -> None:
    short = program(ways={OURS: short_program})
    with pytest.raises(AssertionError, match="short: pinfeed has 1 batches, not 2"):
        run.run(short, None, OURS, Path(), run.nothing, 2)


def test_checksums_tell_values_dtypes_and_shapes() -> None:
    batch = torch.arange(4)
    others = (batch + 1, batch.int(), batch.view(2, 2))
    assert run.checksum(batch) == run.checksum((batch,))
    assert len({run.checksum(one) for one in (batch, *others)}) == 4


class OldClass:
    """Docstring."""

    def value(self) -> int:
        """Return a value."""
        # A comment.
        return 1


def old() -> int:
    """Add two values."""
    a = OldClass().value()
    b = 2

    return a + b


def new(by: int = 1) -> int:
    """Add a value."""
    b = 2
    return by + b


def test_changed_lines_are_counted_without_comments() -> None:
    changed = program(ways={}, original=(OldClass, old), moved=(new,))
    # The class has three lines, and the function loses one and changes one.
    assert changed.changed_lines() == (5, 1)


def test_a_batch_is_timed_and_memory_is_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_TOUCHED", 4096)
    load("nanogpt").prepare(tmp_path, load("nanogpt").sizes["tiny"])
    assert run.batch_ms("nanogpt", "tiny", OURS, str(tmp_path), False) > 0
    before = compare.memory_of(os.getpid())
    with compare.Peak(os.getpid()) as peak:
        held = np.ones(2**23)
    assert peak.found["own"] - before["own"] > held.nbytes // 2


def test_the_table_has_a_line_for_each_way() -> None:
    fast = program(ways={"theirs": short_program, OURS: short_program})
    memory = {"own": 2**21, "mapped": 2**22}
    found = compare.record(
        fast,
        {"batches": 1000, "losses": 2},
        {"theirs": [4.0, 9.0, 8.0], OURS: [2.0, 3.0, 8.0]},
        {"theirs": [4.0, 4.0, 4.0], OURS: [5.0, 5.0, 5.0]},
        {"theirs": memory, OURS: memory},
    )
    head, rule, theirs, ours = compare.table([found]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, theirs, ours)]
    assert cells[1:] == [
        ["**short**: theirs", "", "", "8.00", "", "4.00", "", "2 + 4"],
        ["pinfeed", "-0 +0", "1,000, 2", "3.00", "2.00", "5.00", "0.80", "2 + 4"],
    ]
    assert len(cells[0]) == rule.count("|") - 1


def test_the_tables_of_the_pages_are_made_of_the_results() -> None:
    titles = []
    for path in sorted(RESULTS.glob("programs-*.json")):
        results = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == compare.table(results) + "\n"
        titles += [found["title"] for found in results]
    assert sorted(titles) == sorted(load(name).title for name in NAMES)
