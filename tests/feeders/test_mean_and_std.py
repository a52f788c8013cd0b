"""mean_and_std: the statistics of numpy in float64, whatever the batches are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import ArgumentError, HDF5Store, RaggedStore, mean_and_std
from pinfeed.feeders import mean_and_std as module

h5py = pytest.importorskip("h5py")

RNG = np.random.default_rng(0)
IMAGES = (RNG.standard_normal((53, 3, 4, 5)) * 10 + 1000).astype(np.float32)


@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("axis", [None, 1, 2, 3])
def test_they_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, batch_bytes: int, axis: int | None
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", batch_bytes)
    whole = IMAGES.astype(np.float64)
    others = tuple(i for i in range(4) if i != axis) if axis is not None else None
    found = mean_and_std(IMAGES, channel_axis=axis)
    assert found.mean.shape == (() if axis is None else (IMAGES.shape[axis],))
    assert found.mean.dtype == torch.float64
    np.testing.assert_allclose(found.mean.numpy(), whole.mean(others), rtol=1e-12)
    np.testing.assert_allclose(found.std.numpy(), whole.std(others), rtol=1e-10)


def test_large_numbers_have_the_statistics_of_equal_ones() -> None:
    found = mean_and_std(np.full(8, 1e300))
    assert (found.mean.item(), found.std.item()) == (1e300, 0)
    with np.errstate(over="ignore"):
        assert mean_and_std(np.array([1e300, -1e300])).std.item() == np.std([1e300, -1e300])


def test_structures_of_any_numbers(tmp_path: Path) -> None:
    labels = RNG.integers(0, 9, 53)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=IMAGES, chunks=(10, 3, 4, 5), compression="gzip")
    with HDF5Store(tmp_path / "x.h5") as store:
        found = mean_and_std({"x": store, "more": (labels, labels > 3)})
    assert found["x"].mean.item() == pytest.approx(IMAGES.mean(dtype=np.float64))
    for one, values in zip(found["more"], (labels, labels > 3), strict=True):
        assert one.mean.item() == pytest.approx(values.mean())
        assert one.std.item() == pytest.approx(values.std())


@pytest.mark.parametrize(
    ("source", "axis", "message"),
    [
        (RaggedStore(np.arange(5), np.array([0, 2, 5])), None, "ragged rows"),
        (np.zeros((4, 2), "complex64"), None, "complex numbers"),
        (np.zeros((4, 2)), 2, "channel_axis=2: .* have 2 axes; expected 1 to 1, or None"),
        (np.zeros((4, 2)), 0, "channel_axis=0"),
        (np.zeros((4, 2)), -1, "channel_axis=-1"),
    ],
)
def test_what_has_no_statistics_is_refused(source: Any, axis: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mean_and_std(source, channel_axis=axis)
