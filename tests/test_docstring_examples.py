"""The examples in public docstrings: each class has one, and each one runs."""

import contextlib
import doctest
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

# Its functions keep the process group that is there at the time of the import.
import torch.distributed.nn

import pinfeed
from pinfeed.training.distributed import rank_loop

# The event loop of zarr lives as long as the process, so it begins before any test.
with contextlib.suppress(ImportError):
    import zarr

    zarr.zeros((1,), store={})

ROOT = Path(__file__).parent.parent
NAMES = {"np": np, "torch": torch, "pinfeed": pinfeed}
"""Names that an example may use without importing them."""


def reference() -> dict[str, Any]:
    """Return the classes and functions of the API reference by their names, without errors."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    found: dict[str, Any] = {}
    for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        value = pkgutil.resolve_name(name)
        if isinstance(value, ModuleType):
            names = getattr(value, "__all__", [])
            found |= {f"{name}.{key}": getattr(value, key) for key in names}
        else:
            found[name] = value
    return {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value)
        or (inspect.isclass(value) and value is not Any and not issubclass(value, BaseException))
    }


def with_examples() -> list[str]:
    """Return the names whose docstrings, or those of whose methods, must or do have examples."""
    return sorted(
        name for name, value in reference().items() if inspect.isclass(value) or examples(name)
    )


def examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a class with its methods, or of a function."""
    found = doctest.DocTestFinder().find(reference()[name], name, globs=NAMES)
    return [test for test in found if test.examples]


@pytest.fixture
def sharded_examples() -> Iterator[None]:
    """Drop the process groups that pinfeed made for sharded tables."""
    yield
    rank_loop._rank_groups.clear()


@pytest.mark.usefixtures("sharded_examples")
# torchdata calls a function of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")
@pytest.mark.parametrize("name", with_examples())
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "pinfeed.ZarrStore":
        pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    tests = examples(name)
    assert name in {test.name for test in tests}, f"{name} has no example (Examples: with >>>)"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        assert runner.run(test).failed == 0
