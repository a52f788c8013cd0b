"""The examples with other libraries run, and their own assertions hold."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch._inductor.config
from PIL import ExifTags, Image
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


# Lightning calls this deprecated function.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
# The resumed trainer has no ModelCheckpoint, because it saves nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_lightning() -> None:
    example("lightning_module").main()


def test_accelerate() -> None:
    example("accelerate_loop").main()


def test_datasets(capsys: pytest.CaptureFixture[str]) -> None:
    example("huggingface_datasets").main()
    assert "897 rows, equal to dataset[i]" in capsys.readouterr().out


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    # The upper half of the photo is white. It is stored as the left half.
    stored = np.zeros((64, 64, 3), np.uint8)
    stored[:, :32] = 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(stored).save(tmp_path / "x.jpg", exif=exif, quality=95)
    x, _ = example("images").load((tmp_path / "x.jpg", 0), torch.Generator().manual_seed(0))
    assert x.std(1).mean() > 10 * x.std(2).mean()


def test_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["demo.py", "--size", "16MiB"])
    n_threads = torch.get_num_threads()
    example("demo").main()
    torch.set_num_threads(n_threads)
    said = capsys.readouterr().out
    assert "- 0 of 2 losses differ" in said
    assert "times as fast as a DataLoader of whole batches" in said
    assert (tmp_path / "demo/timeline.png").exists()


def test_graphsage() -> None:
    example("graphsage").main(n_nodes=1000, n_features=8)


# PyG calls a deprecated function when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_graphsage_with_batches_of_pyg() -> None:
    from torch_geometric.data import Data

    example("graphsage").main(n_nodes=300, n_features=8, make_batch=Data)


def test_nanogpt_batches() -> None:
    example("nanogpt_batches").main(n_tokens=5000, length=32, n_batches=20)


def test_forecasting() -> None:
    example("forecasting").main(n_times=400, n_series=3)


def test_token_batches() -> None:
    example("token_batches").main(n_sequences=200, longest=300)


def test_mixture(tmp_path: Path) -> None:
    example("mixture").main(tmp_path, n_steps=5)


def test_dlrm() -> None:
    example("dlrm").main(n_batches=30, n_tests=2)


def test_augment_images() -> None:
    example("augment_images").main(n_images=200, n_epochs=2)


def test_images() -> None:
    example("images").main(n_images=120, n_epochs=2)


def test_tokenize_lines() -> None:
    example("tokenize_lines").main(n_lines=200)


def test_bad_samples() -> None:
    example("bad_samples").main()


def test_hdf5_images() -> None:
    example("hdf5_images").main(n_images=500)


# StatefulDataLoader calls this deprecated function.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
# The distributed checkpoint has one process.
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
