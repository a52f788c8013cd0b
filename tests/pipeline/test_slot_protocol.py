"""Small batches that are gathered together are right in every schedule of the device."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from support.internals import mover_of, runner_of
from support.schedules import corners, next_stream, randomly, sharing_function
from support.sim_engine import SimEngineDevice

from pinfeed import ArrayStore, Feeder
from pinfeed.testing import SimDevice

SIZE, N_BATCHES = 2, 20
X = np.arange(N_BATCHES * SIZE * 3, dtype=np.float64).reshape(-1, 3)
Y = np.arange(N_BATCHES * SIZE, dtype=np.int32)
CORNERS = corners(dict.fromkeys(("compute", "another", "read"), (0, 3, 9)))
# The loop changes its stream within the first slot, within a later one, or after each batch.
SWITCHES: list[dict[str, Any]] = [
    {"switch_once": 1},
    {"switch_once": 5},
    {"switch_once": 11},
    {"switch_after": 2},
]


def check(
    device: SimDevice, *, switch_after: int | None = None, switch_once: int | None = None
) -> None:
    """Compare a loop over small batches with slices of the rows."""
    seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    with Feeder((ArrayStore(X), ArrayStore(Y)), batch_size=SIZE, device=device) as feeder:
        for i, (x, y) in enumerate(feeder):
            assert mover_of(feeder)._gather.batches_per_slot == 8
            device.launch(lambda x, y, i=i: seen.__setitem__(i, (x.copy(), y.copy())), x, y)
            del x, y
            for array in [device.array((1024,), "u1") for _ in range(3)]:
                # The step needs as much memory as some slots.
                device.launch(lambda a: a.fill(7), array)
            if name := next_stream(i, switch_after, switch_once):
                device.switch(name)
        device.drain()
    assert sorted(seen) == list(range(N_BATCHES))
    for i, (x, y) in seen.items():
        rows = slice(i * SIZE, (i + 1) * SIZE)
        np.testing.assert_array_equal(x, X[rows])
        np.testing.assert_array_equal(y, Y[rows])


def fails(device: SimDevice, **kwargs: Any) -> bool:
    try:
        check(device, **kwargs)
    except AssertionError:
        return True
    return False


@pytest.mark.sweep(4)
@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules(corner: str) -> None:
    for direct, kwargs in itertools.product((False, True), SWITCHES):
        check(SimDevice(CORNERS[corner](), direct=direct), **kwargs)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    device = SimDevice(randomly(seed), direct=rng.random() < 0.5)
    check(device, switch_once=rng.randint(1, 19), switch_after=rng.choice([None, None, 1, 4]))


def test_the_wait_of_later_batches_is_needed() -> None:
    """Only a loop that changes its stream within a slot has this wait."""
    plain, changing = SimDevice(), SimDevice()
    check(plain)
    check(changing, switch_once=1)
    (site,) = changing.sites - plain.sites
    every = itertools.product(CORNERS.values(), SWITCHES)
    assert any(fails(SimDevice(choose(), deaf_to=site), **kwargs) for choose, kwargs in every)


def test_the_memory_of_later_batches_must_be_shared() -> None:
    class Forgetful(SimEngineDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            if sharing_function() != "lend_next":
                super().share(tensor, stream)

    every = itertools.product(CORNERS.values(), SWITCHES)
    assert any(fails(Forgetful(choose()), **kwargs) for choose, kwargs in every)


@pytest.mark.parametrize(
    ("depth", "n_batches", "n_slots"), [(2, 1, 3), (5, 2, 3), (6, 1, 7), (8, 3, 3), (23, 8, 3)]
)
def test_small_batches_of_a_depth_share_slots(depth: int, n_batches: int, n_slots: int) -> None:
    """The slots are equal, and together prefetch as many batches as the depth says."""
    rows = np.arange(4000.0).reshape(1000, 4)
    for device in (SimDevice(), SimEngineDevice(has_engine=True), "cpu"):
        with Feeder(rows, batch_size=7, depth=depth, device=device) as feeder:
            found = list(feeder)
            mover = mover_of(feeder)
            schedule = runner_of(feeder)._schedule
            assert (schedule.batches_per_slot, schedule.n_slots) == (n_batches, n_slots)
            assert schedule.n_slots * n_batches == depth + 1
            assert feeder.plan.depth == depth
            # Loops that write have the same depth, in single batches.
            next(iter(feeder.batches()))
            assert len(mover.slots) >= depth + 1
        assert len(found) == 143


@pytest.mark.parametrize("depth", [5, 8])
def test_values_of_batches_that_share_slots(depth: int) -> None:
    rows = np.arange(4000.0).reshape(1000, 4)
    for has_engine in (False, True):
        device = SimEngineDevice(randomly(depth), has_engine=has_engine)
        seen: list[np.ndarray] = []
        with Feeder(rows, batch_size=7, depth=depth, device=device) as feeder:
            for batch in feeder:
                device.launch(lambda values, seen=seen: seen.append(values.copy()), batch)
        device.drain()
        np.testing.assert_array_equal(np.concatenate(seen), rows)
