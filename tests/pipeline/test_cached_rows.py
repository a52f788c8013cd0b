"""Rows that stay in a cache on the device equal those of the synchronous loop, in any schedule."""

import linecache
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cached_rows import N, CachedRun, check_cached
from support.schedules import corners, randomly

from pinfeed.testing import SimDevice, lazy

FIXED = [
    [0, 1, 2],
    [3, 4, 5, 6, 7],
    [1, 2],
    [8, 9],
    [0, 2, 9],
    [],
    [1],
    [10, 11],
    [1, 8, 9],
    [0, 2, 4, 9, 11],
]
GROWING = [[0], [1], [0], [1], [3], [3, 4, 5, 6, 7], [1, 2], [0, 4, 5, 8, 9]]
CORNERS = corners(dict.fromkeys(("compute", "read"), (5, 9, 14, 20, 27, 35)))


@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules(corner: str) -> None:
    rng = random.Random(corner)
    for depth in (0, 1, 2, 4):
        device = SimDevice(
            CORNERS[corner](), direct=rng.random() < 0.5, duplex=rng.random() < 0.7
        )
        check_cached(
            device,
            depth,
            FIXED,
            capacity=rng.choice([1, 4, 8, N]),
            policy=rng.choice([None, depth]),
            n_ahead=rng.randrange(3),
            stop_after=rng.choice([None, 4]),
            switch_after=rng.choice([None, 1]),
            flushes=rng.random() < 0.5,
        )


@pytest.mark.parametrize("seed", range(150))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    batches = [sorted(rng.sample(range(N), rng.randint(0, 5))) for _ in range(rng.randint(1, 9))]
    ways = [rng.random() < 0.5 for _ in range(6)]
    check_cached(
        SimDevice(randomly(seed), direct=rng.random() < 0.5, duplex=rng.random() < 0.7),
        rng.randint(0, 5),
        batches,
        capacity=rng.choice([1, 3, 5, 8, N]),
        policy=rng.choice([None, seed]),
        n_ahead=rng.choice([0, 1, 2, 9]),
        stop_after=rng.choice([None, None, 3]),
        switch_after=rng.choice([None, 1, 2, 3]),
        flushes=rng.random() < 0.5,
        ways=rng.choice([None, None, ways]),
    )


row_batches = st.lists(
    st.lists(st.integers(0, N - 1), max_size=5, unique=True).map(sorted), min_size=1, max_size=9
)


@given(
    st.lists(st.integers(0, 5), max_size=300),
    row_batches,
    st.tuples(st.integers(0, 3), st.integers(1, N), st.integers(0, 3), st.integers(0, 99)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([{}, {"stop_after": 5}, {"switch_after": 2}]),
)
@settings(max_examples=60, deadline=None)
def test_any_schedule(
    moves: list[int],
    batches: list[list[int]],
    sizes: tuple[int, int, int, int],
    flags: tuple[bool, bool],
    kwargs: dict[str, Any],
) -> None:
    coming = iter(moves)
    depth, capacity, n_ahead, policy = sizes
    direct, flushes = flags

    def choose(ready: Any) -> str | None:
        return next(iter([None, *ready][next(coming, 0) :]), None)

    check_cached(
        SimDevice(choose, direct=direct),
        depth,
        batches,
        capacity=capacity,
        n_ahead=n_ahead,
        policy=policy,
        flushes=flushes,
        **kwargs,
    )


VARIANTS: list[tuple[bool, dict[str, Any]]] = [
    (direct, {"policy": policy, **kwargs})
    for direct in (False, True)
    for policy in (0, 3)
    for kwargs in (
        {"batches": FIXED},
        {"batches": FIXED, "stop_after": 3},
        {"batches": GROWING},
        {"batches": FIXED, "switch_after": 2},
        {"batches": FIXED, "flushes": True},
    )
]


def synchronisations() -> list[tuple[str, int]]:
    """Return every call site of wait and sync."""
    sites: set[tuple[str, int]] = set()
    for direct, kwargs in VARIANTS:
        device = SimDevice(lazy, direct=direct)
        check_cached(device, 2, **kwargs)
        sites |= device.sites
    return sorted(sites)


@pytest.mark.parametrize(
    "site", synchronisations(), ids=lambda s: linecache.getline(*s).split("#")[0].strip()
)
def test_every_synchronisation_is_needed(site: tuple[str, int]) -> None:
    """A device that ignores one of them gives wrong results or uses freed memory in a schedule."""
    assert site[0].endswith("transfer.py"), "a wait or sync outside of transfer.py"
    devices = (
        (SimDevice(choose(), direct=direct, deaf_to=site), kwargs)
        for choose in CORNERS.values()
        for direct, kwargs in VARIANTS
    )
    assert any(fails(device, kwargs) for device, kwargs in devices)


def fails(device: SimDevice, kwargs: dict[str, Any]) -> bool:
    try:
        check_cached(device, 2, **kwargs)
    except AssertionError:
        return True
    return False


def test_memory_used_in_another_stream_must_be_shared_with_it() -> None:
    class Forgetful(SimDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            pass

    assert any(
        fails(Forgetful(choose()), {"batches": FIXED, "switch_after": after})
        for choose in CORNERS.values()
        for after in (1, 2)
    )
