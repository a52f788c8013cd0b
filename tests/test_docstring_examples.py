"""The examples in the docstrings of public classes: each class has one, and each one runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import distributed

import pinfeed
from pinfeed.training.distributed import process_groups

ROOT = Path(__file__).parent.parent
NAMES = {"np": np, "torch": torch, "pinfeed": pinfeed}
"""Names that an example may use without importing them."""


def reference() -> dict[str, type]:
    """Return the classes that the API reference shows, by their names there, without errors."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    found: dict[str, type] = {}
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
        if inspect.isclass(value) and not issubclass(value, BaseException)
    }


@pytest.fixture(scope="module")
def gloo() -> None:
    """Open the files that torch keeps for every later process group of gloo."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    distributed.new_group([0], backend="gloo")
    distributed.destroy_process_group()


@pytest.fixture
def sharded_examples(gloo: None) -> Iterator[None]:
    """Drop the process groups that pinfeed made for sharded tables."""
    yield
    process_groups._rank_groups.clear()


@pytest.mark.usefixtures("sharded_examples")
@pytest.mark.parametrize("name", sorted(reference()))
def test_a_public_class_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = reference()[name]
    module = importlib.import_module(value.__module__)
    parsed = doctest.DocTestParser().get_doctest(
        inspect.getdoc(value) or "", dict(NAMES), name, module.__file__, None
    )
    assert parsed.examples, f"{name} has no example (a section Examples with >>>)"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(parsed).failed == 0
