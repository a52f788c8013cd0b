"""The code of the README, of CONTRIBUTING and of the guide runs; the map and the reference leave nothing out; links lead somewhere."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pinfeed

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}


def blocks(page: Path) -> list[str]:
    """The code of a page, also where it stands in a tab; not what is marked ``python no-run``."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [name for name, page in NAMES.items() if blocks(page)])
def test_code_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(NAMES[name])):
        exec(compile(block, f"{name}, block {number}", "exec"), namespace)


def test_every_kind_of_page_is_run() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "docs/moving.md"} <= {name for name, page in NAMES.items() if blocks(page)}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    page = NAMES[name]
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), f"{name} has a link to {target}, which is not there"


def test_every_file_is_on_the_map() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "pinfeed").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"`{path.name}" in readme or path.parent.name == "testing", f"{path.name} is not on the README's map of the code"


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = {"pinfeed.errors." + name for name in vars(pinfeed.errors)} if "::: pinfeed.errors\n" in text else set()
    shown |= set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    missing = [name for name in pinfeed.__all__ if not {f"pinfeed.{name}", f"pinfeed.errors.{name}"} & shown]
    assert not missing, f"docs/reference shows no {', '.join(missing)}"
