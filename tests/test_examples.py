"""The examples beside other libraries run, to their own assertions."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch._inductor.config

from tests.test_loader import queues_closed

__all__ = ["queues_closed"]
EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # Lightning asks it of torch
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the resumed trainer is to save nothing
def test_lightning() -> None:
    example("lightning_module").main()


def test_accelerate() -> None:
    example("accelerate_loop").main()


def test_datasets(capsys: pytest.CaptureFixture[str]) -> None:
    example("huggingface_datasets").main()
    assert "source['name']: a column of string" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # StatefulDataLoader calls it
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")  # one process, as it says
def test_stateful_loader() -> None:
    example("stateful_loader").main()


NOT_A_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf"  # the compiler looks at what a table's rows were computed from


@pytest.mark.filterwarnings(NOT_A_LEAF)
def test_compiled() -> None:
    example("compiled").main("eager")


@pytest.mark.stress
@pytest.mark.filterwarnings("default")  # of the compiler
def test_compiled_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # the compiler's processes would outlive the test
    example("compiled").main("inductor")
