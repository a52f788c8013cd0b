"""Runs: rows that are cut at the ends of parts, such as files and chunks."""

import numpy as np
import pytest

from pinfeed.rows.runs import Runs

ENDS = np.array([4, 4, 9, 20])


def rows_of_parts(runs: Runs) -> list[tuple[int, int, int]]:
    """Return the part, the row within it and the position of each row, in order of position."""
    found = [
        (number, row, place)
        for number, part in runs.by_part(ENDS)
        for row, place in zip(part.rows().tolist(), part.positions().tolist(), strict=True)
    ]
    return sorted(found, key=lambda row: row[2])


@pytest.mark.parametrize(
    "runs",
    [
        Runs.one(0, 20),
        Runs.one(3, 2, 7),
        Runs.one(5, 0),
        Runs.of_rows(np.array([19, 4, 3, 4, 8, 0])),
        Runs.of_rows(np.array([8, 9]), np.array([1, 6])),
        Runs.of_rows(np.array([], np.int64)),
        Runs(np.array([2, 18, 4]), np.array([8, 0, 16]), np.array([1, 9, 30])),
    ],
)
def test_each_row_is_in_its_part(runs: Runs) -> None:
    expected = []
    for row, place in zip(runs.rows().tolist(), runs.positions().tolist(), strict=True):
        number = int(np.searchsorted(ENDS, row, side="right"))
        expected.append((number, row - (ENDS[number - 1] if number else 0), place))
    assert rows_of_parts(runs) == expected
    numbers = [number for number, _ in runs.by_part(ENDS)]
    assert numbers == sorted(set(numbers))
