"""The benchmark of images compares equal batches, and reports the better variant of a library."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks import image_samples, images
from benchmarks.environment import RESULTS
from benchmarks.image_loaders import BATCH_SIZE, CONTESTANTS, WHOLE, Task
from benchmarks.image_samples import SIZE, Box, Images, crop_of

N_FILES = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"pinfeed-images-{N_FILES}"


@pytest.mark.parametrize("name", CONTESTANTS)
def test_contestants_yield_equal_batches(folder: Path, name: str) -> None:
    if not CONTESTANTS[name].is_installed:
        pytest.skip(f"{name} is not installed")
    images.check(name, N_FILES, "Pillow")


def test_other_batches_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "batch", lambda task, indices: torch.zeros(BATCH_SIZE))
    with pytest.raises((AssertionError, ValueError)):
        images.check("DataLoader", N_FILES, "Pillow")


def test_an_incomplete_folder_is_made_again(folder: Path) -> None:
    first = Path(image_samples.files_of(N_FILES)[0])
    content = first.read_bytes()
    first.write_bytes(content[:1000])
    assert Path(image_samples.files_of(N_FILES)[0]).read_bytes() == content


def test_a_sample_is_a_function_of_its_index(folder: Path) -> None:
    dataset = Images(N_FILES, "Pillow")
    image, index = dataset[1]
    assert (image.shape, image.dtype, index) == ((3, SIZE, SIZE), torch.float32, 1)
    assert torch.equal(image, dataset[1][0])
    # The files are copies, so that only the random numbers differ.
    assert not torch.equal(image, dataset[2][0])


def test_crops_are_within_the_image() -> None:
    for seed in range(200):
        box = crop_of(90, 40, torch.Generator().manual_seed(seed))
        assert box.left >= 0
        assert box.left + box.width <= 90
        assert box.top >= 0
        assert box.top + box.height <= 40


def test_a_crop_keeps_enough_pixels() -> None:
    assert Box(0, 0, 448, 600).least_size(800, 600) == (400, 300)
    assert Box(0, 0, 100, 600).least_size(800, 600) == (800, 600)


def test_the_report_has_the_better_variant_of_a_library() -> None:
    rate, memory = "images per s, Pillow, training step", "MiB, Pillow"
    ours = "pinfeed, wrap_dataset"
    runs = {
        rate: {
            ours: [{"per_s": 300.0, "waited": 0.1}] * 2,
            "SPDL": [{"per_s": 150.0, "waited": 0.5}],
            f"SPDL{WHOLE}": [{"per_s": 160.0, "waited": 0.4}, {"per_s": 240.0, "waited": 0.2}],
            "DataLoader": [{"per_s": 100.0, "waited": 0.9}] * 2,
        },
        memory: {ours: [{"nbytes": 3 << 20}], "SPDL": [{"nbytes": 2 << 20}]},
    }
    text = images.report({"runs": runs, "steps_s": [0.03, 0.05, 0.04]})
    for part in ("1.50 (SPDL)", "200 \\*", "takes 40 ms", "| 10% "):
        assert part in text


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    for path in RESULTS.glob("images-*.json"):
        results = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == images.report(results) + "\n"
