"""A full disk: files that pinfeed writes through memory maps are an OSError, never a SIGBUS."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_disk import file_limit, fill

from pinfeed import HostEmbedding, NpyStore, ReplayBuffer
from pinfeed.compat import speedtorch
from pinfeed.errors import StoreError

PARTS: dict[str, Any] = {"obs": ((64,), "float32"), "next_obs": ((64,), "float32")}
NEXT = {"next_of": {"next_obs": "obs"}}


def replay(folder: Path) -> Path:
    ReplayBuffer(500, PARTS, path=folder / "replay")
    return folder / "replay" / "next_obs.npy"


def table(folder: Path) -> Path:
    with NpyStore.create(folder / "table.npy", (500, 64)) as store, store.mapped():
        return folder / "table.npy"


def gadget(folder: Path) -> Path:
    NpyStore.create(folder / "gadget.npy", (500, 64)).close()
    one = speedtorch.DataGadgetMM(str(folder / "gadget.npy"))
    one.gadgetInit()
    one.getNumpyVersion()
    one.close()
    return folder / "gadget.npy"


@pytest.mark.parametrize("make", [replay, table, gadget])
def test_disk_space_is_reserved_for_a_map(make: Any, tmp_path: Path) -> None:
    status = os.stat(make(tmp_path))
    assert status.st_size > 500 * 256
    assert status.st_blocks * 512 >= status.st_size


def test_a_full_disk_is_an_error_that_names_the_file(small_disk: Path) -> None:
    fill(small_disk, 200_000)
    with pytest.raises(StoreError, match=r"a file for 'next_obs' .*No space left.*next_obs.npy"):
        ReplayBuffer(500, {"obs": ((), "int64"), **PARTS}, path=small_disk / "replay")
    assert os.listdir(small_disk / "replay") == []
    ReplayBuffer(100, PARTS, path=small_disk / "replay")
    with pytest.raises(OSError, match="No space left") as caught:
        HostEmbedding(1000, 64, store=small_disk / "table.npy")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(small_disk / "table.npy")
    assert not (small_disk / "table.npy").exists()


def test_a_buffer_that_cannot_grow_is_unchanged(tmp_path: Path) -> None:
    parts = {"x": ((8,), "float32"), "next_x": ((8,), "float32"), **PARTS}
    next_of = {"next_x": "x", "next_obs": "obs"}
    buffer = ReplayBuffer(100, parts, next_of=next_of, path=tmp_path / "replay")

    def add(i: int) -> None:
        # From step 120 on, no frame repeats, so both files soon need more space, in the same step.
        # That for `x` is small.
        change = 1 if i < 120 else 0.5
        x, obs = np.full(8, i, "float32"), np.full(64, i, "float32")
        buffer.add(x=x, next_x=x + change, obs=obs, next_obs=obs + change)

    size = max(path.stat().st_size for path in (tmp_path / "replay").iterdir())
    n = 0
    with file_limit(size + 1000), pytest.raises(StoreError, match=r"file for 'obs' cannot be made"):
        while True:
            add(n)
            n += 1
    assert 120 < n < 1000
    assert sorted(os.listdir(tmp_path / "replay")) == ["obs.npy", "x.npy"]

    def require_latest(n: int) -> None:
        (batch,) = buffer.batches(2000, n=1, device="cpu")
        steps = batch["x"][:, 0]
        assert set(steps.tolist()) <= set(range(max(0, n - 100), n))
        assert set(steps.tolist()) >= {max(0, n - 100), n - 1}
        change = torch.where(steps < 120, 1, 0.5)
        assert torch.equal(batch["next_x"], batch["x"] + change[:, None])
        assert torch.equal(batch["obs"][:, 0], steps)
        assert torch.equal(batch["next_obs"][:, 63], steps + change)

    require_latest(n)
    for i in range(n, n + 150):
        add(i)
    require_latest(n + 150)


def test_a_buffer_that_cannot_load_keeps_its_files(tmp_path: Path) -> None:
    parts = {"obs": ((8,), "float32"), "next_obs": ((8,), "float32")}
    full = ReplayBuffer(100, parts, next_of={"next_obs": "obs"})
    for i in range(100):
        full.add(obs=np.full(8, i, "float32"), next_obs=np.full(8, i + 0.5, "float32"))
    folder = tmp_path / "replay"
    buffer = ReplayBuffer(100, parts, next_of={"next_obs": "obs"}, path=folder)
    (file,) = folder.iterdir()
    with file_limit(file.stat().st_size), pytest.raises(StoreError, match="cannot be made"):
        buffer.load_state_dict(full.state_dict())
    assert list(folder.iterdir()) == [file]
