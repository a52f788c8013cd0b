"""The benchmark of rows compares losses first, and names the cells in which pinfeed is slower."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import rows, rowsteps
from benchmarks.earlier import Earlier, opened
from benchmarks.rowcells import RowCell
from benchmarks.rowsteps import BEFORE, STEP_ALONE, Timing

ROOT = Path(__file__).parents[1]
SMALL = RowCell(16, 64, 0.5, table_bytes=64 << 10)


@pytest.fixture(scope="module")
def earlier() -> Iterator[Earlier]:
    """The pinfeed of this checkout, as if it was an earlier one."""
    with opened(ROOT) as process:
        assert process is not None
        yield process


def test_losses_of_an_earlier_pinfeed_are_compared_exactly(earlier: Earlier) -> None:
    rows.check_earlier(SMALL, "cpu", earlier)
    expected = rowsteps.losses(rowsteps.prefetched, SMALL, "cpu")
    with pytest.raises(AssertionError, match="prefetch \\(before\\): losses"):
        rowsteps.compare("prefetch" + BEFORE, expected * (1 + 1e-6), expected)


# FBGEMM, if installed, warns about missing parts of its own.
@pytest.mark.filterwarnings("ignore:(?s).*Failed to import:DeprecationWarning")
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_all_contestants_have_the_same_losses(optimizer: str) -> None:
    rowsteps.check(replace(SMALL, optimizer=optimizer), "cpu")


def test_steps_are_timed_in_both_processes(earlier: Earlier) -> None:
    arguments = (asdict(SMALL), asdict(Timing("cpu", n_steps=4, n_warm=1, cap_s=0.0)))
    for name in (STEP_ALONE, "prefetch", "synchronous", "whole table"):
        step_s, _ = rowsteps.timed_step_s(name, *arguments)
        before_s, _ = earlier.call("benchmarks.rowsteps:timed_step_s", name, *arguments)
        assert step_s > 0
        assert before_s > 0


def test_the_report_names_cells_where_prefetching_is_slower() -> None:
    ms = {"step alone": 1.0, "prefetch": 3.0, "synchronous": 3.0}
    values = {"small_ms": ms, "small_ratio": 1.0, "small_choice": "depth=0"}
    values |= {"large_ms": ms, "large_ratio": 0.99, "large_choice": ""}
    values |= {"small_chosen_ratio": 1.04, "large_chosen_ratio": 1.06}
    few = {"cell": "few", "n_ids": 1024, **values}
    many = {"cell": "many", "n_ids": 8192, **values}
    report = rows.report([few, many])
    assert "small model, cells from 8,192 ids on in which prefetch / synchronous" in report
    assert "below 1.0: many (1.00)" in report
    assert "below 1.0: none" in report
    assert "depth chosen / synchronous is not below 1.05: none" in report
    assert "depth chosen / synchronous is not below 1.05: few (1.06); many (1.06)" in report
    assert "small model: depth=None chose\n  few: depth=0\n  many: depth=0" in report
