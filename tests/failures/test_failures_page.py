"""The table of the guide on failure handling: each row names its tests, and the tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/failures.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| fault")
]
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_the_tests_of_a_row_exist(row: list[str]) -> None:
    fault, seen, lost = row
    assert fault
    assert seen
    lost, comment, tests = lost.partition("<!--")
    assert lost.strip()
    assert comment
    named = re.findall(r"`(\w+)`", tests)
    assert named
    assert set(named) <= TESTS
