"""Requests that a strategy sends to a file: consecutive rows are one request."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed import Feeder, NpyStore, Ranks, rows
from tests.support.stores import gathered, saved


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch, without_native: None) -> list[int]:
    """Return the list to which each later request appends its number of bytes."""
    found: list[int] = []
    read = os.preadv

    def counted(fd: int, buffers: Any, *args: Any) -> int:
        found.append(sum(map(len, buffers)))
        return read(fd, buffers, *args)

    monkeypatch.setattr(os, "preadv", counted)
    return found


@pytest.mark.parametrize("depth", [None, 2])
def test_a_batch_of_a_rank_in_file_order_is_one_request(
    tmp_path: Path, lengths: list[int], depth: int | None
) -> None:
    values = np.arange(1600.0).reshape(800, 2)
    path = saved(tmp_path / "x.npy", values)
    # The requests of a single epoch are counted.
    given = {"continuous": False} if depth is None else {"depth": depth, "continuous": False}
    with Feeder(
        path, batch_size=8, rows=rows.sequential(), ranks=Ranks(rank=1, world_size=2), **given
    ) as feeder:
        read = [batch.numpy() for batch in feeder]
    np.testing.assert_array_equal(
        np.concatenate(read), values.reshape(50, 2, 8, 2)[:, 1].reshape(400, 2)
    )
    assert lengths == [8 * 16] * 50


def test_runs_of_several_files(tmp_path: Path, lengths: list[int]) -> None:
    values = np.arange(60.0).reshape(30, 2)
    for i in range(3):
        saved(tmp_path / f"{i}.npy", values[i * 10 : i * 10 + 10])
    wanted = [*range(4, 14), 25, *range(20, 23), 3]
    with NpyStore(tmp_path / "*.npy") as store:
        np.testing.assert_array_equal(gathered(store, wanted), values[wanted])
    assert sorted(lengths) == [16, 16, 3 * 16, 4 * 16, 6 * 16]
