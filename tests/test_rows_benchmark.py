"""The benchmark of rows compares losses first, and times steps of a small and a large model."""

from dataclasses import replace

import pytest

from benchmarks import rows, rowsteps
from benchmarks.rowcells import RowCell
from benchmarks.rowsteps import STEP_ALONE

SMALL = RowCell(16, 64, 0.5, table_bytes=64 << 10)


def test_other_losses_are_found() -> None:
    expected = rowsteps.losses(rowsteps.prefetched, SMALL, "cpu")
    with pytest.raises(AssertionError, match="synchronous: losses"):
        rowsteps.compare("synchronous", expected * (1 + 1e-6), expected)
    rowsteps.compare("whole table", expected * (1 + 1e-6), expected)


# FBGEMM, if installed, warns about missing parts of its own.
@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:(?s).*Failed to import:DeprecationWarning")
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_a_cell_is_measured(optimizer: str) -> None:
    found = rows.one_cell(replace(SMALL, optimizer=optimizer), "cpu", 1, n_steps=4)
    assert {STEP_ALONE, "prefetch", "synchronous", "whole table"} <= found["small_ms"].keys()
    assert all(ms > 0 for ms in found["large_ms"].values())
    assert f"{found['small_ratio']:.2f}" in rows.report([found])
