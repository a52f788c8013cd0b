"""The pages: their code runs, their links work, and the map and the reference are complete.

The pages fetch nothing from the network; their build checks the same of the pages that it makes.
"""

import contextlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pinfeed

# The event loop of zarr lives as long as the process, so it begins before any test.
with contextlib.suppress(ImportError):
    import zarr

    zarr.zeros((1,), store={})

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}


def blocks(page: Path) -> list[str]:
    """Return the code blocks of a page, in tabs too, without those marked ``python no-run``."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    # The tensors are so small that several threads would only wait for each other.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [name for name, page in NAMES.items() if blocks(page)])
def test_code_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks run in order, in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(NAMES[name])):
        exec(compile(block, f"{name}, block {number}", "exec"), namespace)


def test_every_kind_of_page_is_run() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/quick-start.md", "docs/migration.md"} <= {
        name for name, page in NAMES.items() if blocks(page)
    }


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    page = NAMES[name]
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), (
                f"{name} has a link to {target}, which is not there"
            )


def test_every_package_is_on_the_map_and_the_map_is_short() -> None:
    found = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    packages = [path.parent.name for path in (ROOT / "pinfeed").glob("*/__init__.py")]
    assert sorted(found) == sorted(packages)
    assert len(found) <= 16


def test_the_picture_of_the_layers_is_the_import_contract() -> None:
    picture = re.search(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    contract = re.search(
        r'name = "imports go down".*?layers = \[\n(.*?)\n\]',
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL,
    )
    assert picture is not None
    assert contract is not None
    drawn = [line.split("  ")[0] for line in picture[1].splitlines()]
    assert drawn == re.findall(r'"(.+?)"', contract[1])


def test_the_root_has_nothing_but_packages() -> None:
    modules = {path.name for path in (ROOT / "pinfeed").glob("*.py")}
    assert modules == {"__init__.py", "__main__.py", "checkpoint.py", "errors.py"}


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = (
        {"pinfeed.errors." + name for name in vars(pinfeed.errors)}
        if "::: pinfeed.errors\n" in text
        else set()
    )
    shown |= set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    # An earlier name of NpyStore.
    names = {*pinfeed.__all__} - {"MmapStore"}
    missing = [name for name in names if not {f"pinfeed.{name}", f"pinfeed.errors.{name}"} & shown]
    assert not missing, f"docs/reference shows no {', '.join(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_can_be_copied(name: str) -> None:
    """Commands alone have no prompt; commands with output have one.

    The copy button leaves out prompts and output.
    """
    text = NAMES[name].read_text()
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        commands = [line.startswith("$ ") for line in block.splitlines()]
        assert commands[0], (
            f"{name} has a console block that does not begin with a command:\n{block}"
        )
        assert not all(commands), (
            f"{name} has a console block without output; make it a bash block without prompts:"
            f"\n{block}"
        )
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        assert not re.search(r"^\$ ", block, re.MULTILINE), (
            f"{name} has prompts in a bash block:\n{block}"
        )


FETCHED = {
    '<script src="https://unpkg.com/iframe-worker/shim"></script>': [
        "https://unpkg.com/iframe-worker/shim"
    ],
    '<link rel="stylesheet" href="//fonts.example.org/a.css">': ["//fonts.example.org/a.css"],
    "<img alt=x src=http://example.org/x.png>": ["http://example.org/x.png"],
    '@import "https://example.org/a.css"; a { background: url(//example.org/b.png) }': [
        "https://example.org/a.css",
        "//example.org/b.png",
    ],
    '<pre class="mermaid"><code>': ["https://unpkg.com/mermaid"],
    '<a href="https://example.org">x</a> <script src="vendor/a.js"></script> '
    "<code>url(x) // https://example.org</code>": [],
}


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("text", FETCHED)
def test_what_a_page_fetches_is_found(text: str) -> None:
    assert hooks().fetched(text) == FETCHED[text]


def test_the_guide_is_configured_to_fetch_nothing() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    # The offline plugin adds the shim of its search from unpkg.com, unless a file of that name is
    # listed.
    assert re.search(r"^  - offline\b", config, re.MULTILINE)
    assert re.search(r"^  font: false$", config, re.MULTILINE)
    listed = re.findall(r"(?:polyfills|extra_css|extra_javascript): \[(.*)\]", config)
    files = [name.strip() for names in listed for name in names.split(",")]
    assert any("iframe-worker" in name for name in files)
    for name in files:
        assert (ROOT / "docs" / name).is_file(), f"mkdocs.yml lists {name}, which is not in docs/"
    assert not re.search(r"https?://", config)


def test_files_of_others_have_their_licence() -> None:
    for path in (ROOT / "docs/vendor").iterdir():
        assert "Permission is hereby granted, free of charge" in path.read_text(), (
            f"{path.name} lacks its licence"
        )
        assert path.name in (ROOT / "CONTRIBUTING.md").read_text(), (
            f"CONTRIBUTING does not say where {path.name} is from"
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/")])
def test_pages_fetch_nothing(name: str) -> None:
    text = re.sub(
        r"^( *)```.*?^\1```$", "", NAMES[name].read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert not hooks().fetched(text), f"{name} fetches from the network"
    assert not re.search(r"!\[[^]]*\]\((?:https?:)?//", text), (
        f"{name} has a picture from the network"
    )
    assert "```mermaid" not in NAMES[name].read_text(), (
        f"{name} has a Mermaid diagram, which the theme draws with a script from unpkg.com"
    )


def test_messages_of_the_faq_are_those_of_the_code() -> None:
    files = (ROOT / "pinfeed").rglob("*.py")
    code = "".join(re.sub(r'"\n\s*f?"', "", path.read_text()) for path in files)
    page = NAMES["docs/faq.md"].read_text()
    messages = re.findall(r"^\| `([^`]+)`(?: \(.*?\))? \|", page, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        # Names and numbers between the words are the user's.
        for words in re.findall(r"\b[a-z][a-z_ ]{9,}[a-z]\b", message):
            assert words in code, f"no message of pinfeed has {words!r}"


def test_the_header_links_to_the_repository_of_the_clone() -> None:
    repository = hooks().repository
    assert repository("git@example.org:group/pinfeed.git") == "https://example.org/group/pinfeed"
    assert repository("https://example.org/pinfeed.git") == "https://example.org/pinfeed"
    # A clone of a folder has no page.
    assert repository("/home/user/pinfeed") == repository("") == "changelog.html"
