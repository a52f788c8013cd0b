"""The benchmark pages: tables are made of stored results, and other pages name the same figures."""

import re
from pathlib import Path

import pytest

from docs.pictures.measured import PAGES, TOPICS, shown, with_stored_tables, with_table

ROOT = Path(__file__).parent.parent
FIGURES = re.compile(r"\[([^]]*?\d[^]]*?)\]\(([^)#]*benchmarks/[\w-]+\.md)[^)]*\)")
"""Links whose text has a number, such as "[1.4 times as fast](docs/benchmarks/images.md)"."""


@pytest.mark.parametrize("name", TOPICS)
def test_the_table_of_a_page_is_made_of_the_results(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert with_table(page, TOPICS[name]()) == page, "run python -m docs.pictures.measured"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_stored_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert with_stored_tables(text) == text, "run python -m docs.pictures.measured"


def test_a_ratio_has_two_or_three_digits() -> None:
    assert [shown(value) for value in (None, 0.037, 2.345, 10.26, 29.7)] == [
        "",
        "0.04",
        "2.35",
        "10.3",
        "30",
    ]


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without separators of thousands."""
    return re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))


def rounds_to(exact: str, given: str) -> bool:
    digits = len(given.partition(".")[2])
    # A figure of 15.45 may be given as 15.4 or 15.5, because it was rounded before.
    return abs(float(exact) - float(given)) <= 0.501 * 10**-digits


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / "docs/cookbook").glob("*"),
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_linked_figures_are_on_the_benchmark_page(page: Path) -> None:
    for text, target in FIGURES.findall(page.read_text()):
        linked = (page.parent / target).read_text()
        for number in numbers(text):
            assert any(rounds_to(exact, number) for exact in numbers(linked)), (
                f"[{text}] links to {target}, which does not have {number}"
            )
