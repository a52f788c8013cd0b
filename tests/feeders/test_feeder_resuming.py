"""Resuming a Feeder at the position of a saved state."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.feeders import numbers
from torch.utils.data import DistributedSampler, RandomSampler

from pinfeed import Feeder, errors, rows


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


def feeder_of(x: np.ndarray, kind: str, depth: int = 3) -> Feeder:
    given: dict[str, Any] = {
        "shuffled": {"shuffle": True, "seed": 4, "batch_size": 7},
        "blocks": {"rows": rows.block_shuffled(2, block_rows=8, window_blocks=2), "batch_size": 7},
        "sampler": {"rows": DistributedSampler(x, num_replicas=1, rank=0), "batch_size": 7},  # type: ignore[arg-type]
        "batches": {"rows": [np.arange(i, i + 5) for i in range(0, 90, 5)]},
    }[kind]
    return Feeder(x, depth=depth, **given)


@pytest.mark.parametrize("kind", ["shuffled", "blocks", "sampler", "batches"])
def test_resume_anywhere(x: np.ndarray, kind: str) -> None:
    """From any batch of any epoch, the rest is the same in spite of prefetching.

    After the last batch, the rest is the next epoch.
    """
    states, all_rows = [], []
    with feeder_of(x, kind) as feeder:
        states.append((0, 0, feeder.state_dict()))
        for epoch in range(3):
            epoch_rows = []
            for batch in feeder.batches():
                epoch_rows.append(batch.rows.tolist())
                states.append((epoch, len(epoch_rows), feeder.state_dict()))
            states.append((epoch + 1, 0, feeder.state_dict()))
            all_rows.append(epoch_rows)
    for epoch, position, state in states:
        if epoch < 3 and (position % 4 == 0 or position >= len(all_rows[epoch]) - 1):
            with feeder_of(x, kind, depth=epoch) as feeder:
                if position == len(all_rows[epoch]):
                    epoch, position = epoch + 1, 0
                if epoch == 3:
                    continue
                feeder.load_state_dict(json.loads(json.dumps(state)))
                assert feeder.epoch == epoch
                assert numbers(feeder) == all_rows[epoch][position:]
                if epoch < 2:
                    assert numbers(feeder) == all_rows[epoch + 1]


@pytest.mark.parametrize("n_seen", [0, 2, 9, 10])
def test_the_state_has_the_number_of_the_next_batch(n_seen: int) -> None:
    def feeder() -> Feeder:
        return Feeder(np.arange(100), batch_size=10, shuffle=True, device="cpu")

    with feeder() as plain:
        expected = [(i, batch.tolist()) for _ in range(2) for i, batch in enumerate(plain)]
    with feeder() as left:
        state = left.state_dict()
        for _, _ in zip(range(n_seen), left, strict=False):
            state = left.state_dict()
    with feeder() as resumed:
        resumed.load_state_dict(state)
        found = [
            (i, batch.tolist())
            for _ in range(resumed.epoch, 2)
            for i, batch in enumerate(resumed, start=resumed.state_dict()["batch"])
        ]
    assert found == expected[n_seen:]


def test_a_whole_epoch_without_a_length_is_not_begun_again(x: np.ndarray) -> None:
    """The end of the sampler shows it, and the loop then continues with the next epoch."""

    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(20))

    with Feeder(x, rows=Unsized(), batch_size=7) as feeder:
        states = [feeder.state_dict() for _ in feeder]
    with Feeder(x, rows=Unsized(), batch_size=7) as feeder:
        feeder.load_state_dict(states[-1])
        assert numbers(feeder) == [list(range(7)), list(range(7, 14)), list(range(14, 20))]
        assert feeder.epoch == 2
        feeder.load_state_dict(states[-2])
        assert numbers(feeder) == [list(range(14, 20))]
        assert feeder.epoch == 1


@pytest.mark.parametrize("kind", ["shuffled", "blocks", "sampler", "batches"])
def test_set_epoch_keeps_a_position_in_that_epoch(
    x: np.ndarray, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A program resumes by ``for epoch in range(feeder.epoch, n): feeder.set_epoch(epoch)``."""
    with feeder_of(x, kind) as feeder:
        want = [numbers(feeder) for _ in range(3)]
        feeder.set_epoch(1)
        for i, _ in enumerate(feeder):
            state = feeder.state_dict()
            if i == 3:
                break
    with feeder_of(x, kind) as feeder:
        feeder.load_state_dict(state)
        got = []
        for epoch in range(feeder.epoch, 3):
            feeder.set_epoch(epoch)
            got.append(numbers(feeder))
        assert got == [want[1][4:], want[2]]
        assert not caplog.records
        feeder.load_state_dict(state)
        feeder.set_epoch(2)
        assert "the loaded position, batch 4 of epoch 1, is dropped" in caplog.text
        assert numbers(feeder) == want[2]
        feeder.set_epoch(2)
        assert numbers(feeder) == want[2], "the epoch that was run begins again"
        caplog.clear()
        feeder.set_epoch(1)
        for _ in feeder:
            state = feeder.state_dict()
        feeder.load_state_dict(state)
        assert feeder.epoch == 2
        feeder.set_epoch(1)
        assert "epoch 1 runs again" in caplog.text
        assert numbers(feeder) == want[1]


def test_resume_twice_in_one_epoch(x: np.ndarray) -> None:
    with feeder_of(x, "shuffled") as feeder:
        want = numbers(feeder)
    got: list[list[int]] = []
    state: dict[str, Any] | None = None
    while state is None or state["epoch"] == 0:
        with feeder_of(x, "shuffled") as feeder:
            if state is not None:
                feeder.load_state_dict(state)
            for i, batch in enumerate(feeder.batches()):
                got.append(batch.rows.tolist())
                if i == 3:
                    break
            state = feeder.state_dict()
            if state["batch"] == len(want):
                break
    assert got == want


def test_after_a_break_the_next_loop_is_the_next_epoch(
    x: np.ndarray,
) -> None:
    with feeder_of(x, "shuffled") as feeder:
        epochs = [numbers(feeder) for _ in range(2)]
    with feeder_of(x, "shuffled") as feeder:
        for i, _ in enumerate(feeder):
            if i == 2:
                break
        state = feeder.state_dict()
        assert numbers(feeder) == epochs[1]
        feeder.load_state_dict(state)
        assert numbers(feeder) == epochs[0][3:]


def test_a_state_of_another_feeder_is_refused(x: np.ndarray) -> None:
    with feeder_of(x, "shuffled") as feeder:
        state = feeder.state_dict()
    with Feeder(x, batch_size=7, shuffle=True, seed=5) as feeder:
        with pytest.raises(errors.ArgumentError, match=re.escape("order was 'Shuffled(seed=4)'")):
            feeder.load_state_dict(state)
        with pytest.raises(errors.ArgumentError, match="not a state"):
            feeder.load_state_dict({"epoch": 1})


def test_a_sampler_that_does_not_repeat_itself_is_found_out(x: np.ndarray) -> None:
    with Feeder(
        x, rows=RandomSampler(x, generator=torch.Generator().manual_seed(0)), batch_size=10
    ) as feeder:
        next(iter(feeder))
        state = feeder.state_dict()
    with Feeder(
        x, rows=RandomSampler(x, generator=torch.Generator().manual_seed(1)), batch_size=10
    ) as feeder:
        feeder.load_state_dict(state)
        with pytest.raises(errors.ArgumentError, match="gave other rows"):
            list(feeder)
