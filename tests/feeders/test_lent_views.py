"""copy=False: batches are views of consecutive rows, equal to copies of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pinfeed
from pinfeed.errors import ArgumentError
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.tensors.numpy_torch import memory_of
from pinfeed.testing.sim import SimDevice


def lent(source: Any, batch_size: int = 4, **options: Any) -> pinfeed.Feeder[Any]:
    options = {"device": "cpu", "copy": False, **options}
    return pinfeed.Feeder(source, batch_size=batch_size, **options)


@settings(max_examples=30, deadline=None)
@given(
    n_rows=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    n_done=st.integers(0, 5),
)
def test_batches_equal_copies(
    tmp_path_factory: pytest.TempPathFactory,
    n_rows: list[int],
    batch_size: int,
    drop_last: bool,
    n_done: int,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    total = sum(n_rows)
    x = np.arange(2 * total, dtype=np.float32).reshape(total, 2)
    for number, part in enumerate(np.split(x, np.cumsum(n_rows)[:-1])):
        np.save(folder / f"x-{number}.npy", part)
    source = {"file": str(folder / "x-*.npy"), "array": x, "tensor": torch.arange(total)}
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    with lent(source, **options) as feeder, lent(source, **options) as resumed:
        expected = list(pinfeed.Feeder(source, device="cpu", **options))
        for epoch in (feeder, feeder):
            for batch, want in zip(epoch, expected, strict=True):
                assert all(torch.equal(batch[name], want[name]) for name in want)
        assert len(feeder) == len(expected)
        for _, _ in zip(range(n_done), feeder, strict=False):
            state = feeder.state_dict()
        if n_done and expected:
            resumed.load_state_dict(state)
            rest = list(resumed)
            if n_done < len(expected):
                assert len(rest) == len(expected) - n_done
                assert torch.equal(rest[0]["file"], expected[n_done]["file"])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_views_are_the_memory_of_an_array(dtype: str) -> None:
    array = np.arange(30).astype(DTYPES[dtype]).reshape(10, 3)
    for begin, batch in zip(range(0, 10, 4), lent(array), strict=True):
        assert np.shares_memory(memory_of(batch), array[begin : begin + 4])
        assert np.array_equal(memory_of(batch), array[begin : begin + 4])


def test_views_of_a_read_only_array_cause_no_warning() -> None:
    array = np.arange(10)
    array.flags.writeable = False
    assert torch.cat(list(lent(array))).tolist() == array.tolist()


def test_windows_of_a_file_are_views_that_overlap(tmp_path: Path) -> None:
    tokens = np.arange(50, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    with pinfeed.NpyStore.windows(
        tmp_path / "tokens.bin", length=9, step=4, dtype="uint16"
    ) as runs:
        found = torch.cat([batch.int() for batch in lent(runs, 2)])
    assert found.tolist() == [list(range(i, i + 9)) for i in range(0, 42, 4)]


def test_a_write_to_a_batch_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(10))
    for batch in lent(tmp_path / "x.npy"):
        batch += 1
    assert not np.load(tmp_path / "x.npy").any()


def test_the_plan_and_the_statistics_have_no_buffers() -> None:
    with lent(np.zeros((100, 8))) as feeder:
        assert feeder.plan.items == ()
        assert "views of the rows" in str(feeder.plan)
        n_batches = sum(1 for _ in feeder)
        assert feeder.stats.batches == n_batches == 25
        assert feeder.stats.bytes == 100 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "another order than the sequential one"),
        ({"rows": [0, 1, 2]}, "another order"),
        ({"ranks": pinfeed.Ranks("pad", rank=0, world_size=2)}, "another order"),
        ({"device_transform": torch.neg}, "a transform, which might change the rows"),
        ({"host_transform": torch.neg}, "a transform, which might change the rows"),
        ({"verify": True}, "leave out verify"),
        ({"copy": 0}, "copy=0: expected True or False"),
    ],
)
def test_other_loops_than_over_whole_rows_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        lent(np.arange(10), **options)


def test_rows_without_an_address_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10, dtype=">i4"))
    with pytest.raises(ArgumentError, match="byte order of this machine"):
        lent(tmp_path / "x.npy")
    joined = pinfeed.concat([np.arange(4), np.arange(4)])
    with pytest.raises(ArgumentError, match="no address in memory"):
        lent(joined)
    ragged = pinfeed.RaggedStore(np.arange(10), np.array([0, 4, 10]))
    with pytest.raises(ArgumentError, match="ragged rows"):
        lent(ragged)
    with pytest.raises(ArgumentError, match="expected device='cpu'"):
        lent(np.arange(10), device=SimDevice())
    with lent(np.arange(10)) as feeder, pytest.raises(ArgumentError, match="write rows back"):
        feeder.batches()
