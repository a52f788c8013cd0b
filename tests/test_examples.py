"""The examples with other libraries run, and their own assertions hold."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch._inductor.config
from support.loaders import queues_closed

__all__ = ["queues_closed"]
EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Lightning calls it.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
# The resumed trainer has no ModelCheckpoint, because it saves nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_lightning() -> None:
    example("lightning_module").main()


def test_accelerate() -> None:
    example("accelerate_loop").main()


def test_datasets(capsys: pytest.CaptureFixture[str]) -> None:
    example("huggingface_datasets").main()
    assert "source['name']: a column of string" in capsys.readouterr().out


# StatefulDataLoader calls it.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
# The distributed checkpoint is of one process.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_stateful_loader() -> None:
    example("stateful_loader").main()


# The compiler reads .grad of the tensors that a table's rows were computed from.
NOT_A_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf"


@pytest.mark.filterwarnings(NOT_A_LEAF)
def test_compiled() -> None:
    example("compiled").main("eager")


@pytest.mark.stress
# The compiler warns of deprecations in its own code.
@pytest.mark.filterwarnings("default")
def test_compiled_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, the compiler's processes would outlive the test.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    example("compiled").main("inductor")
