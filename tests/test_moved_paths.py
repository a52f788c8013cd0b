"""Old module paths still work, and warn with the new path; public paths import their module."""

import importlib
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pinfeed
from pinfeed.compat import moved

DOCUMENTED = [
    "pinfeed.config.Item",
    "pinfeed.loader.LoaderFeeder",
    "pinfeed.loader.StatefulLoaderFeeder",
    "pinfeed.readers.ReaderFeeder",
    "pinfeed.restarting.Restartable",
    "pinfeed.restarting.StatefulRestartable",
    "pinfeed.seeing.stats.ProcessMemory",
    "pinfeed.seeing.stats.Totals",
    "pinfeed.seeing.timeline.Timeline",
    "pinfeed.training.big.check.Check",
    "pinfeed.training.big.choice.Chosen",
    "pinfeed.training.big.offload.Offload",
    "pinfeed.training.big.offload.OffloadStats",
    "pinfeed.training.manage.callbacks.Callbacks",
    "pinfeed.training.manage.history.History",
    "pinfeed.training.manage.history.Row",
    "pinfeed.training.manage.monitor.Snapshot",
    "pinfeed.training.memory.budget.Budget",
    "pinfeed.training.memory.report.Estimate",
    "pinfeed.training.memory.report.Layer",
    "pinfeed.training.rowloop.RowLoop",
]
"""The names that the reference and the guide once gave by their module."""

PICKLED = [
    "pinfeed.config.Plan",
    "pinfeed.feeder.Batch",
    "pinfeed.ranks.Ranks",
    "pinfeed.rowdataset.RowDataset",
    "pinfeed.seeing.stats.FeederStats",
    "pinfeed.stores.extent.Extent",
    "pinfeed.stores.mmap.MmapStore",
    "pinfeed.stores.ranges.RemoteFile",
    "pinfeed.training.embedding.HostEmbedding",
    "pinfeed.training.memory.config.Config",
]
"""Classes whose pickles name an old module."""


def new_name_of(old: str) -> tuple[Any, str]:
    """Look a name up under its old path; return the object and the warning's text."""
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=r" has moved to pinfeed\..*; ") as said:
        found = getattr(importlib.import_module(module), name)
    assert [Path(one.filename).name for one in said] == [Path(__file__).name]
    return found, str(said[0].message)


@pytest.mark.parametrize("old", DOCUMENTED)
def test_a_documented_path_gives_the_object_of_the_new_one(old: str) -> None:
    found, message = new_name_of(old)
    assert message.startswith(f"{old} has moved to pinfeed.")
    new = message.removeprefix(f"{old} has moved to ").partition(";")[0]
    module, _, name = new.rpartition(".")
    assert getattr(importlib.import_module(module), name) is found


@pytest.mark.parametrize("old", moved.RENAMED)
def test_a_renamed_class_is_found_by_its_old_name(old: str) -> None:
    found, message = new_name_of(old)
    assert moved.RENAMED[old] in message
    assert found.__name__ == moved.RENAMED[old].rpartition(".")[2]


@pytest.mark.parametrize("old", moved.MOVED)
def test_an_old_module_has_the_classes_of_the_new_one(old: str) -> None:
    new = importlib.import_module(moved.MOVED[old])
    classes = [
        name
        for name, value in vars(new).items()
        if isinstance(value, type) and value.__module__ == new.__name__
    ]
    assert classes
    for name in classes:
        assert new_name_of(f"{old}.{name}")[0] is vars(new)[name]


@pytest.mark.parametrize("old", PICKLED)
def test_a_pickle_finds_its_class_under_the_old_path(old: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to "):
        found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert isinstance(found, type)


def test_a_store_of_an_old_pickle_opens_its_file(tmp_path: Path) -> None:
    """The layouts of the files had another name in the state of the store."""
    array = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "x.npy", array)
    with pinfeed.MmapStore(tmp_path / "x.npy") as store:
        state = store.__getstate__()
    state["_extents"] = state.pop("_layouts")
    state["_closed"] = False
    opened = pinfeed.MmapStore.__new__(pinfeed.MmapStore)
    opened.__setstate__(state)
    with opened:
        out = np.empty((2, 3))
        opened.gather(np.array([3, 1]), out)
    np.testing.assert_array_equal(out, array[[3, 1]])
    assert "_extents" not in vars(opened)


@pytest.mark.parametrize("name", ["BlockShuffled", "PerRank", "Sequential", "Shuffled"])
def test_a_pickled_order_finds_its_class_in_the_package(name: str) -> None:
    found = pickle.loads(f"cpinfeed.rows\n{name}\n.".encode())
    assert found.__module__ == "pinfeed.rows.orders"


def test_a_public_name_is_said_by_its_public_path() -> None:
    found, message = new_name_of("pinfeed.training.big.offload.Offload")
    assert found is pinfeed.Offload
    assert "has moved to pinfeed.Offload;" in message


def test_a_name_that_never_was_is_an_error() -> None:
    old = importlib.import_module("pinfeed.config")
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = old.NoSuchName
    with pytest.raises(ImportError, match="NoSuchName"):
        exec("from pinfeed.seeing.stats import NoSuchName")
    with pytest.raises(ModuleNotFoundError, match=r"pinfeed\.seeing\.none"):
        importlib.import_module("pinfeed.seeing.none")
    assert not hasattr(pinfeed, "no_such_module")


def test_old_paths_are_attributes_of_the_package() -> None:
    with pytest.warns(DeprecationWarning, match=r"pinfeed\.seeing\.stats\.Totals has moved to "):
        found = pinfeed.seeing.stats.Totals  # type: ignore[attr-defined]
    assert found is importlib.import_module("pinfeed.profiling.stats").Totals


def test_new_paths_and_the_import_of_an_old_module_cause_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("pinfeed.training.big")
        importlib.import_module("pinfeed.training.big.offload")
        assert pinfeed.Offload.__module__ == "pinfeed.training.offload.offload"


def test_the_warning_points_at_the_importing_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\nfrom pinfeed.training.manage.history import Row, History\n")
    done = subprocess.run(
        [sys.executable, "-W", "always", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert [line.startswith(f"{program}:2: ") for line in said] == [True, True]


def test_the_old_paths_load_nothing_before_they_are_used() -> None:
    program = (
        "import sys, pinfeed, pinfeed.compat.moved as moved; moved.install();"
        "print('torch' in sys.modules, any(map(moved.is_old, sys.modules)),"
        "sum(isinstance(one, moved.MovedModules) for one in sys.meta_path))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False False 1\n"


def test_the_checkpoint_module_is_imported_by_its_public_path() -> None:
    code = (
        "from pinfeed.checkpoint import save\n"
        "import pinfeed, pinfeed.checkpoint as public, pinfeed.training.checkpoint as private\n"
        "assert public is private is pinfeed.checkpoint and save is public.save"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
