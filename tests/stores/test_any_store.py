"""Conditions of all stores, and a custom store."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import Feeder, NpyStore, PinnedStore, errors

WRONG_SHAPES = {
    (): "expected .*, whole numbers",
    (0, 3): "has no rows",
    (-1, 3): "has no rows",
    (3, -1): "has no rows",
    (1.5, 2): r"shape=\(1.5, 2\); expected .*, whole numbers",
    (True, 2): "expected .*, whole numbers",
    ("3", 2): "expected .*, whole numbers",
    "32": "shape='32'; expected .*, whole numbers",
    5: "shape=5; expected .*, whole numbers",
    (2**62, 4): (
        r"shape \(4611686018427387904, 4\) of float32 needs 73,786,976,294,838,206,464 bytes; "
        "expected at most 9,223,372,036,854"
    ),
    (2**61,): "needs 9,223,372,036,854,775,808 bytes",
    (2**61 - 1,): "needs 9,223,372,036,854,775,804 bytes",
    (2**70, 0): "expected at most",
}


@pytest.mark.parametrize("shape", WRONG_SHAPES, ids=str)
def test_shapes_that_no_store_can_have(shape: Any, tmp_path: Path) -> None:
    """Nothing is made, and an existing file stays."""
    np.save(tmp_path / "old.npy", np.ones((3, 2), np.float32))
    makers: dict[str, Callable[[], object]] = {
        "PinnedStore": lambda: PinnedStore.empty(shape, pin=False),
        "new.npy": lambda: NpyStore.create(tmp_path / "new.npy", shape),
        "old.npy": lambda: NpyStore.create(tmp_path / "old.npy", shape, overwrite=True),
    }
    for name, make in makers.items():
        with pytest.raises(errors.StoreError, match=f"{name}: .*{WRONG_SHAPES[shape]}"):
            make()
    assert os.listdir(tmp_path) == ["old.npy"]
    assert (np.load(tmp_path / "old.npy") == 1).all()


def test_rows_of_no_bytes_are_made_in_memory_only(tmp_path: Path) -> None:
    assert PinnedStore.empty((3, 0), pin=False).row_shape == (0,)
    with pytest.raises(errors.StoreError, match=r"shape \(3, 0\) has rows of 0 bytes"):
        NpyStore.create(tmp_path / "x.npy", (3, 0))
    assert not os.listdir(tmp_path)


def test_a_custom_store(tmp_path: Path) -> None:
    """A feeder accepts every store that keeps the contract."""

    class Squares:
        n_rows = 1000
        row_shape = (2,)
        dtype = np.dtype(np.int64)
        writable = False
        resident_bytes = 0

        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            out[:, 0], out[:, 1] = rows, rows**2

        def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
            raise AssertionError

        def flush(self) -> None: ...

        def close(self) -> None:
            raise AssertionError("a store that was given is its giver's to close")

    with Feeder(Squares(), batch_size=64, shuffle=True, device="cpu") as feeder:
        out = torch.cat(list(feeder))
    assert torch.equal(out[:, 0] ** 2, out[:, 1])
    assert sorted(out[:, 0].tolist()) == list(range(1000))
