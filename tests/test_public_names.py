"""The public names: each names one object, and ``dir`` and ``import *`` find all of them."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
from support.programs import Programs
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import Config, Feeder, wrap_loader


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_a_public_name_is_one_thing() -> None:
    """An editor that adds imports takes a name from any module that has it.

    ``compat`` is left out, because it has the names of other systems.
    """
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(pinfeed.__path__, "pinfeed.")
        if not found.name.startswith(("pinfeed.compat.", "pinfeed.__main__"))
    ]
    assert len(modules) > 100
    others = [
        f"{module.__name__}.{name}"
        for module in modules
        for name in pinfeed.__all__
        if (found := vars(module).get(name)) is not None
        and (inspect.isclass(found) or inspect.isfunction(found))
        and found.__module__.startswith("pinfeed.")
        and found is not getattr(pinfeed, name)
    ]
    assert others == []


def test_the_config_of_the_arithmetic_has_a_name_of_its_own() -> None:
    assert not hasattr(importlib.import_module("pinfeed.memory.limits"), "Config")
    assert isinstance(Config(), importlib.import_module("pinfeed.memory.limits").MemoryLimits)
    with Feeder(np.zeros((4, 2)), config=Config(preferred_batch_size=2).for_feeder()) as feeder:
        assert len(feeder) == 2


def test_dir_has_the_public_names_and_loads_nothing() -> None:
    program = "import sys, pinfeed; print(*dir(pinfeed)); print('torch' in sys.modules)"
    names, torch_is_loaded = run(program).splitlines()
    assert {name for name in names.split() if not name.startswith("__")} == set(pinfeed.__all__)
    assert {"__version__", "__doc__", "__file__"} < set(names.split())
    assert torch_is_loaded == "False"


def test_a_star_import_has_the_public_names(programs: Programs) -> None:
    program = (
        "from pinfeed import *; print(*sorted(name for name in dir() if not name.startswith('__')))"
    )
    assert programs.run(program).stdout.split() == sorted(pinfeed.__all__)


@pytest.mark.parametrize(
    "module",
    [
        "checkpoint",
        "compat.infinitybatch",
        "compat.pytorch_memory",
        "compat.speedtorch",
        "rows",
        "testing",
    ],
)
def test_dir_of_a_public_module_has_its_public_names_only(module: str) -> None:
    imported = importlib.import_module(f"pinfeed.{module}")
    shown = {name for name in dir(imported) if not name.startswith("__")}
    assert shown == set(imported.__all__)


def test_dir_of_the_errors_has_the_exceptions_only() -> None:
    shown = {name for name in dir(pinfeed.errors) if not name.startswith("__")}
    assert "PinfeedError" in shown
    assert all(issubclass(getattr(pinfeed.errors, name), Exception) for name in shown)


def test_the_checkpoint_module_is_imported_by_its_public_path() -> None:
    program = (
        "from pinfeed.checkpoint import save;"
        "import pinfeed, pinfeed.checkpoint as public;"
        "print(public is pinfeed.checkpoint, save is public.save)"
    )
    assert run(program) == "True True\n"


@pytest.mark.parametrize("name", ["config", "feeder", "loader", "seeing"])
def test_names_of_former_modules_are_unknown(name: str) -> None:
    assert not hasattr(pinfeed, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"pinfeed.{name}")


@pytest.mark.parametrize("kind", [Feeder, pinfeed.HostEmbedding])
def test_there_is_one_name_for_flushing_writes(kind: type) -> None:
    assert hasattr(kind, "flush_writes")
    assert not hasattr(kind, "land")


def test_dir_of_a_wrapped_loader_has_what_it_asks_the_loader_for() -> None:
    with wrap_loader(DataLoader(TensorDataset(), batch_size=2)) as feeder:
        assert {"stats", "batch_sampler", "num_workers"} <= set(dir(feeder))
        assert "state_dict" not in dir(feeder)
        assert all(hasattr(feeder, name) for name in dir(feeder) if name != "timeline")


def test_import_is_quick_and_loads_no_framework() -> None:
    program = (
        "import sys, pinfeed;"
        "print([m for m in ('torch', 'cupy', 'tqdm', 'matplotlib') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        ).stdout
        == "[]\n"
    )


def test_public_names_are_sorted_and_exist() -> None:
    assert sorted(pinfeed.__all__) == pinfeed.__all__
    assert all(hasattr(pinfeed, name) for name in pinfeed.__all__)
