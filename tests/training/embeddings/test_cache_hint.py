"""The hint that a cache on the device would help a loop over rows of tables."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pinfeed
from pinfeed import ArrayStore, HostEmbedding, MmapStore, RowOptimizer
from pinfeed.devices.cpu import HostDevice
from pinfeed.pipeline.sources.source import RowGroup
from pinfeed.profiling.starvation import explanation
from pinfeed.profiling.stats import Totals
from pinfeed.training.embeddings.cache_hint import CacheHint, gains_from_cache

N_ROWS = 4_000
ADVICE = "would serve 100% of its lookups: use HostEmbedding(device_cache=0.05)."


def hot(n_batches: int = 40) -> list[torch.Tensor]:
    """Return batches that look up the same 100 rows."""
    return [torch.arange(0, N_ROWS, 40)] * n_batches


def hint_after(loader: Any, **options: Any) -> str:
    """Read the rows of an epoch; return the hint of a loop that stalls on reading rows."""
    table = HostEmbedding(N_ROWS, 2, name="users", **options)
    optimizer = RowOptimizer(torch.optim.Adam, [table])
    loop = pinfeed.train_rows(
        loader, {table: lambda ids: ids}, optimizer=optimizer, depth=2, device=HostDevice()
    )
    for _ in loop:
        pass
    hint: str = loop._loop.source.hint(0.2)
    assert loop._loop._starvation._transfer_hint() in hint
    loop.close()
    optimizer.close()
    table.close()
    return hint


def test_a_loop_whose_batches_look_up_the_same_rows(tmp_path: Path) -> None:
    hint = hint_after(hot(), store=tmp_path / "users.npy")
    assert hint.startswith(
        "Gathering rows of users takes most of the time. A device cache with 5% "
    )
    assert f"KiB with their state) {ADVICE}" in hint


def test_a_loop_whose_batches_look_up_other_rows(tmp_path: Path) -> None:
    loader = list(torch.randperm(N_ROWS).view(40, 100))
    hint = hint_after(loader, store=tmp_path / "users.npy")
    assert "A table in memory (store=None) is faster" in hint
    assert "device_cache" not in hint


def test_rows_in_memory_are_not_cached_on_the_cpu(tmp_path: Path) -> None:
    assert "device_cache" not in hint_after(hot())
    memory = ArrayStore(np.zeros((10, 2)))
    with contextlib.closing(MmapStore.create(tmp_path / "file.npy", (10, 2), "float32")) as file:
        assert gains_from_cache([memory], is_unified=False)
        assert not gains_from_cache([memory, memory], is_unified=True)
        assert gains_from_cache([memory, file], is_unified=True)


def test_the_tables_that_save_most_are_named() -> None:
    stores = {
        name: ArrayStore(np.zeros((1_000, dim)))
        for name, dim in zip("abcd", (4, 1, 2, 3), strict=True)
    }
    hint = CacheHint(None if name == "d" else (name, [store]) for name, store in stores.items())
    assert not hint.text()
    hint.begin_epoch()
    for _ in range(60):
        hint.add([RowGroup(np.arange(10), 0, [store]) for store in stores.values()])
    assert hint.text() == (
        "A device cache with 1% of the rows of a (320 B) would serve 100% of its lookups: use "
        "HostEmbedding(device_cache=0.01). A device cache with 1% of the rows of c (160 B) would "
        "serve 100% of its lookups: use HostEmbedding(device_cache=0.01)."
    )


@pytest.mark.parametrize(("cause", "is_said"), [("write_wait_s", True), ("overhead_s", False)])
def test_loops_that_wait_for_writes_get_the_hint(cause: str, is_said: bool) -> None:
    totals = Totals(batches=1, rows=8, seconds=5.0, starved_s=4.0, depth=2, **{cause: 4.0})
    text = explanation(totals, str, lambda: "Give a cache.")
    assert text.endswith(" Give a cache.") == is_said
    assert explanation(totals, str) == text.removesuffix(" Give a cache.")
