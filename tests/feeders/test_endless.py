"""endless(): the batches of epoch after epoch."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import pinfeed
from pinfeed.errors import ArgumentError

# StatefulDataLoader calls the deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

N_ROWS = 10
N_BATCHES = 3
"""Batches of an epoch."""


def feeder(**options: Any) -> pinfeed.Feeder[Any]:
    return pinfeed.Feeder(np.arange(N_ROWS), batch_size=4, shuffle=True, device="cpu", **options)


def samples() -> Any:
    return pinfeed.wrap_dataset(range(N_ROWS), batch_size=4, shuffle=True, threads=2, device="cpu")


def stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(1)
    return pinfeed.wrap_loader(StatefulDataLoader(range(N_ROWS), batch_size=4), device="cpu")


MAKE = [feeder, samples, stateful_loader]


def epochs(source: Any, n: int) -> list[list[int]]:
    """Return the batches of ``n`` separate loops."""
    return [batch.tolist() for _ in range(n) for batch in source]


@pytest.mark.parametrize("make", MAKE)
def test_batches_are_those_of_one_loop_after_another(make: Callable[[], Any]) -> None:
    expected = epochs(make(), 3)
    batches = pinfeed.endless(make())
    assert [next(batches).tolist() for _ in expected] == expected


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("k", range(2 * N_BATCHES + 1))
def test_a_state_continues_after_any_batch(make: Callable[[], Any], k: int) -> None:
    expected = epochs(make(), 3)
    before = pinfeed.endless(make())
    list(itertools.islice(before, k))
    after = pinfeed.endless(make())
    after.load_state_dict(before.state_dict())
    assert [next(after).tolist() for _ in expected[k:]] == expected[k:]


def test_islice_leaves_the_next_batch_to_the_next_call() -> None:
    expected = epochs(feeder(), 2)
    batches = pinfeed.endless(feeder())
    parts = [list(itertools.islice(batches, 2)) for _ in range(3)]
    assert [batch.tolist() for part in parts for batch in part] == expected


def test_a_loader_of_torch_is_iterated_again_and_again() -> None:
    batches = pinfeed.endless(DataLoader(range(5), batch_size=3))
    assert [next(batches).tolist() for _ in range(3)] == [[0, 1, 2], [3, 4], [0, 1, 2]]
    assert not hasattr(batches, "state_dict")


def test_close_ends_the_epoch_and_next_begins_another() -> None:
    expected = epochs(feeder(), 2)
    source = feeder()
    batches = pinfeed.endless(source)
    next(batches)
    batches.close()
    assert next(batches).tolist() == expected[N_BATCHES]
    batches.close()
    source.set_epoch(0)
    assert next(batches).tolist() == expected[0]


def test_an_error_of_a_batch_is_raised_in_its_place() -> None:
    def transform(batch: torch.Tensor) -> torch.Tensor:
        if 7 in batch.tolist():
            raise ValueError("seven")
        return batch

    batches = pinfeed.endless(feeder(host_transform=transform))
    with pytest.raises(ValueError, match="seven"):
        list(itertools.islice(batches, N_BATCHES))


def test_an_empty_epoch_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="an epoch has no batch"):
        next(pinfeed.endless([]))


@pytest.mark.parametrize("given", [3, iter([1])])
def test_what_cannot_be_iterated_again_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        pinfeed.endless(given)


def test_a_data_loader_cannot_take_samples_of_it() -> None:
    with pytest.raises(TypeError, match="already batches"):
        next(iter(DataLoader(pinfeed.endless(feeder()), sampler=[0], batch_size=1)))


def test_an_iterator_in_a_cycle_ends_its_loop_when_collected() -> None:
    class Owner:
        """An object that keeps an iterator, and itself."""

    owner: Any = Owner()
    owner.self = owner
    owner.batches = pinfeed.endless(pinfeed.Feeder(np.arange(1000), batch_size=4, device="cpu"))
    next(owner.batches)
    before = threading.active_count()
    del owner
    gc.collect()
    assert threading.active_count() <= before


def test_a_state_that_is_refused_leaves_the_position() -> None:
    batches = pinfeed.endless(pinfeed.Feeder(np.arange(6), batch_size=2, device="cpu"))
    assert next(batches).tolist() == [0, 1]
    other = pinfeed.Feeder(np.arange(8), batch_size=2, device="cpu")
    with pytest.raises(ArgumentError, match="another feeder"):
        batches.load_state_dict(other.state_dict())
    assert next(batches).tolist() == [2, 3]
    batches.load_state_dict(batches.state_dict())
    assert next(batches).tolist() == [4, 5]
