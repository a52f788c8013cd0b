"""The code of the README and of CONTRIBUTING runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_code_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


def test_every_file_is_on_the_map() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "pinfeed").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"`{path.name}" in readme or path.parent.name == "testing", f"{path.name} is not on the README's map of the code"
