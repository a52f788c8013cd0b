"""The rows of a Feeder's batches: orders, samplers, and the epoch that they are in."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.feeders import DEPTHS, numbers
from support.unwrapped import unwrapped
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from pinfeed import Config, Feeder, MiB, errors, rows


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


def test_every_epoch_has_an_order_that_its_seed_repeats(x: np.ndarray) -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        with Feeder(x, batch_size=30, shuffle=True, seed=seed) as feeder:
            return [numbers(feeder) for _ in range(3)]

    first = epochs(1)
    again = epochs(1)
    other = epochs(2)
    assert first == again
    assert first != other
    assert len({str(e) for e in first}) == 3
    assert all(sorted(itertools.chain(*e)) == list(range(100)) for e in first)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([[1, 2, 3], [9], [4, 4]], [[1, 2, 3], [9], [4, 4]]),
        ([np.array([5, 6]), np.array([7], np.uint8)], [[5, 6], [7]]),
        ([torch.tensor([5, 6])], [[5, 6]]),
        (
            BatchSampler(SequentialSampler(range(10)), 4, drop_last=False),
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        ),
    ],
    ids=["lists", "arrays", "tensors", "BatchSampler"],
)
def test_rows_that_are_batches(x: np.ndarray, given: Any, wanted: list[list[int]]) -> None:
    with Feeder(x, rows=given) as feeder:
        assert len(feeder) == len(wanted)
        for _ in range(2):
            assert numbers(feeder) == wanted


@pytest.mark.parametrize(
    "given",
    [
        np.array([5, 3, 99, 5, 0]),
        [5, 3, 99, 5, 0],
        (i for i in [5, 3, 99, 5, 0]),
        torch.tensor([5, 3, 99, 5, 0]),
    ],
    ids=["array", "list", "generator", "tensor"],
)
def test_rows_that_are_single(x: np.ndarray, given: Any) -> None:
    with Feeder(x, rows=given, batch_size=2) as feeder:
        assert numbers(feeder) == [[5, 3], [99, 5], [0]]


def test_samplers_of_torch(x: np.ndarray) -> None:
    sampler = RandomSampler(x, generator=torch.Generator().manual_seed(3))
    want = list(RandomSampler(x, generator=torch.Generator().manual_seed(3)))
    with Feeder(x, rows=sampler, batch_size=16) as feeder:
        assert len(feeder) == 7
        assert list(itertools.chain(*numbers(feeder))) == want
    shared, same = (DistributedSampler(x, num_replicas=3, rank=1, seed=5) for _ in range(2))  # type: ignore[arg-type]
    with Feeder(x, rows=shared, batch_size=16) as feeder:
        for epoch in range(2):
            same.set_epoch(epoch)
            assert list(itertools.chain(*numbers(feeder))) == list(same)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("in_batches", [False, True])
def test_the_epoch_that_a_samplers_owner_has_set(
    x: np.ndarray, in_batches: bool, depth: int
) -> None:
    """The loop takes that epoch, as a DataLoader does, and continues with the epochs after it.

    Setting the same epoch again counts as well.
    """
    shared, same = (DistributedSampler(x, num_replicas=2, rank=0, seed=5) for _ in range(2))  # type: ignore[arg-type]
    rows: dict[str, Any] = (
        {"rows": BatchSampler(shared, 16, drop_last=False)}
        if in_batches
        else {"rows": shared, "batch_size": 16}
    )

    def order(epoch: int) -> list[int]:
        same.set_epoch(epoch)
        return list(same)

    def loop() -> list[int]:
        return list(itertools.chain(*numbers(feeder)))

    with Feeder(x, **rows, depth=depth) as feeder:
        shared.set_epoch(5)
        assert feeder.epoch == 5
        assert [loop() for _ in range(2)] == [order(5), order(6)]
        for epoch in (0, 0, 7, 7, 8):
            shared.set_epoch(epoch)
            assert (feeder.epoch, loop()) == (epoch, order(epoch))
        shared.set_epoch(1)
        feeder.set_epoch(2)
        assert (feeder.epoch, loop()) == (2, order(2)), "the last call decides"
        assert (feeder.epoch, loop()) == (3, order(3))
        for _ in feeder:
            # The order of the running epoch does not change.
            shared.set_epoch(9)
            state = feeder.state_dict()
            break
        assert (state["epoch"], feeder.epoch) == (4, 9)


def test_two_feeders_with_one_sampler(x: np.ndarray) -> None:
    """A feeder does not take the epoch that the other one sets for one that the owner has set."""
    shared, same = (DistributedSampler(x, num_replicas=2, rank=0, seed=5) for _ in range(2))  # type: ignore[arg-type]

    def order(epoch: int) -> list[int]:
        same.set_epoch(epoch)
        return list(same)

    with (
        Feeder(x, rows=shared, batch_size=10) as images,
        Feeder(np.arange(100), rows=shared, batch_size=10) as labels,
    ):
        for epoch in range(3):
            both = [
                (batch.rows.tolist(), other.tolist())
                for batch, other in zip(images.batches(), labels, strict=True)
            ]
            assert [list(itertools.chain(*rows)) for rows in zip(*both, strict=True)] == [
                order(epoch)
            ] * 2
            assert shared.epoch == images.epoch == labels.epoch == epoch + 1
        for epoch in range(3, 6):
            assert list(itertools.chain(*numbers(images))) == order(epoch)
            if epoch == 4:
                assert torch.cat(list(labels)).tolist() == order(3)


def test_a_sampler_whose_epoch_is_another_number_is_refused(x: np.ndarray) -> None:
    class Iterated:
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

        def set_epoch(self, number: int) -> None:
            self.epoch = 100 + number

    with (
        Feeder(x, rows=Iterated(), batch_size=5) as feeder,
        pytest.raises(errors.ArgumentError, match="its attribute epoch is 103"),
    ):
        feeder.set_epoch(3)


def test_a_sampler_that_does_not_tell_its_epoch_is_its_owners(x: np.ndarray) -> None:
    class Own:
        shift = 0

        def set_epoch(self, number: int) -> None:
            self.shift = number

        def __iter__(self) -> Iterator[int]:
            return iter([(i + self.shift) % 100 for i in range(100)])

    sampler = Own()
    with Feeder(x, rows=sampler, batch_size=50) as feeder:
        for epoch in (5, 5, 7):
            sampler.set_epoch(epoch)
            assert numbers(feeder)[0][0] == epoch
        assert numbers(feeder)[0][0] == 7, "as with a DataLoader"
        feeder.set_epoch(3)
        assert numbers(feeder)[0][0] == 3
        feeder.set_epoch(3)
        for _ in feeder:
            state = feeder.state_dict()
            break
    sampler = Own()
    with Feeder(x, rows=sampler, batch_size=50) as feeder:
        feeder.load_state_dict(state)
        sampler.set_epoch(feeder.epoch)
        assert [rows[0] for rows in numbers(feeder)] == [53]
        feeder.load_state_dict(state)
        sampler.set_epoch(4)
        with pytest.raises(errors.ArgumentError, match="other rows for epoch 3"):
            list(feeder)


def test_a_sampler_that_is_resumed_as_its_owner_does(
    x: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> tuple[Any, Feeder]:
        sampler = DistributedSampler(x, num_replicas=2, rank=0, seed=5)  # type: ignore[arg-type]
        return sampler, Feeder(x, rows=sampler, batch_size=16)

    sampler, feeder = make()
    with feeder:
        want = []
        for epoch in range(5, 8):
            sampler.set_epoch(epoch)
            want.append(numbers(feeder))
        sampler.set_epoch(6)
        for i, _ in enumerate(feeder):
            state = feeder.state_dict()
            if i == 1:
                break
    sampler, feeder = make()
    with feeder:
        feeder.load_state_dict(json.loads(json.dumps(state)))
        assert (feeder.epoch, sampler.epoch) == (6, 6)
        got = []
        for epoch in range(feeder.epoch, 8):
            sampler.set_epoch(epoch)
            got.append(numbers(feeder))
        assert got == [want[1][2:], want[2]]
        assert not caplog.records
        feeder.load_state_dict(state)
        sampler.set_epoch(5)
        assert numbers(feeder) == want[0]
        assert "the loaded position, batch 2 of epoch 6, is dropped" in caplog.text


def test_a_batch_sampler_passes_the_epoch_on(x: np.ndarray) -> None:
    shared = DistributedSampler(x, num_replicas=2, rank=0, seed=5)  # type: ignore[arg-type]
    with Feeder(x, rows=BatchSampler(shared, 16, drop_last=False)) as feeder:
        epochs = [list(itertools.chain(*numbers(feeder))) for _ in range(2)]
    for epoch, got in enumerate(epochs):
        shared.set_epoch(epoch)
        assert got == list(shared)


def test_batches_of_unknown_size(x: np.ndarray) -> None:
    with Feeder(x, rows=([i] * (i + 1) for i in range(50))) as feeder:
        assert feeder.plan.batch_size == 0
        assert "batches of unknown size" in unwrapped(feeder.plan)
        assert [len(batch) for batch in feeder] == list(range(1, 51))


def test_batches_that_the_limits_do_not_hold(x: np.ndarray) -> None:
    with pytest.raises(
        errors.BudgetError, match=r"up to 80 rows; the limits of config hold at most 40"
    ):
        Feeder(x, rows=[range(80)], config=Config(preferred_batch_size=40))


def test_orders_of_pinfeed(x: np.ndarray) -> None:
    config = Config(cpu_memory_limit=MiB(8), preferred_batch_size=9)
    with Feeder(x, rows=rows.block_shuffled(seed=1, block_rows=4), config=config) as feeder:
        assert sorted(itertools.chain(*numbers(feeder))) == list(range(100))
    shares = []
    for rank in range(3):
        with Feeder(
            x, rows=rows.per_rank(rows.shuffled(7), rank=rank, world_size=3), batch_size=9
        ) as feeder:
            shares.append(list(itertools.chain(*numbers(feeder))))
    assert [len(s) for s in shares] == [34] * 3
    assert set(itertools.chain(*shares)) == set(range(100))


def test_set_epoch(x: np.ndarray) -> None:
    with Feeder(x, batch_size=50, shuffle=True) as feeder:
        epochs = [numbers(feeder) for _ in range(3)]
        assert feeder.epoch == 3
        feeder.set_epoch(1)
        assert numbers(feeder) == epochs[1]
        assert numbers(feeder) == epochs[2]
