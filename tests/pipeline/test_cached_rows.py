"""Rows that stay in a cache on the device equal those of the synchronous loop, in any schedule."""

import itertools
import linecache
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cached_rows import N, check_cached
from support.schedules import corners, randomly, sharing_function

from pinfeed.devices import layout
from pinfeed.native import library as native
from pinfeed.testing import SimDevice, lazy

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

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
CORNERS = corners(dict.fromkeys(("compute", "read"), (5, 9, 14, 20, 27, 35)))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules(corner: str) -> None:
    rng = random.Random(corner)
    for depth in (0, rng.choice([1, 2, 4])):
        window = rng.random() < 0.5
        direct = window or rng.random() < 0.5
        device = SimDevice(CORNERS[corner](), direct=direct)
        check_cached(
            device,
            depth,
            FIXED,
            window=window,
            capacity=rng.choice([1, 4, 8, N]),
            policy=rng.choice([None, depth]),
            stop_after=rng.choice([None, 4]),
            switch_after=rng.choice([None, 1]),
            switch_once=rng.choice([None, 1, 4]),
            switch_in=rng.choice([None, 0, 3]),
            switches_within=rng.random() < 0.2,
            flushes=rng.random() < 0.5,
        )


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    batches = [sorted(rng.sample(range(N), rng.randint(0, 5))) for _ in range(rng.randint(1, 9))]
    window = rng.random() < 0.5
    direct = window or rng.random() < 0.5
    check_cached(
        SimDevice(randomly(seed), direct=direct),
        rng.randint(0, 5),
        batches,
        window=window,
        capacity=rng.choice([1, 3, 5, 8, N]),
        policy=rng.choice([None, seed]),
        stop_after=rng.choice([None, None, 3]),
        switch_after=rng.choice([None, 1, 2, 3]),
        switch_once=rng.choice([None, 1, 2, 3]),
        switch_in=rng.choice([None, None, 1, 2]),
        flushes=rng.random() < 0.5,
        frozen=rng.random() < 0.2,
        switches_within=rng.random() < 0.3,
    )


row_batches = st.lists(
    st.lists(st.integers(0, N - 1), max_size=5, unique=True).map(sorted), min_size=1, max_size=9
)


@given(
    st.lists(st.integers(0, 5), max_size=300),
    row_batches,
    st.tuples(st.integers(0, 3), st.integers(1, N), st.integers(0, 99)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(
        [{}, {"stop_after": 5}, {"switch_after": 2}, {"switch_once": 1}, {"switch_in": 1}]
    ),
)
@settings(max_examples=30)
def test_any_schedule(
    moves: list[int],
    batches: list[list[int]],
    sizes: tuple[int, int, int],
    flags: tuple[bool, bool],
    kwargs: dict[str, Any],
) -> None:
    coming = iter(moves)
    depth, capacity, policy = sizes
    direct, flushes = flags

    def choose(ready: Any) -> str | None:
        return next(iter([None, *ready][next(coming, 0) :]), None)

    check_cached(
        SimDevice(choose, direct=direct),
        depth,
        batches,
        capacity=capacity,
        policy=policy,
        flushes=flushes,
        **kwargs,
    )


WORST = [CORNERS[name] for name in ("fast ", "fast read+pinfeed-read", "fast compute")]
VARIANTS: list[dict[str, Any]] = [
    {"switch_after": 2},
    {"switch_once": 1},
    {"switches_within": True},
    {"switch_after": 2, "flushes": True},
    {"switch_after": 2, "frozen": True, "stop_after": 5},
]


def fails(device: SimDevice, **kwargs: Any) -> bool:
    try:
        check_cached(device, 2, FIXED, **kwargs)
    except AssertionError:
        return True
    return False


def waits_for_caches() -> list[tuple[str, int]]:
    """Return the call sites of wait and sync that a loop without a cache does not have."""
    sites: set[tuple[str, int]] = set()
    for direct, kwargs in itertools.product((False, True), VARIANTS):
        device = SimDevice(lazy, direct=direct)
        check_cached(device, 2, FIXED, **kwargs)
        sites |= device.sites
    of_pinfeed = [(path, line) for path, line in sites if "pinfeed" in Path(path).parts]
    files = ("/transfer.py", "/row_cache.py", "/batch_copies.py")
    assert all(path.endswith(files) for path, _ in of_pinfeed), "a wait elsewhere"
    return [site for site in of_pinfeed if "cache" in linecache.getline(*site)]


def test_every_wait_for_a_cache_is_needed() -> None:
    """A device that ignores it gives wrong results or uses freed memory in a schedule.

    ``test_protocol.py`` shows the same of the waits that loops without a cache have as well.
    """
    sites = waits_for_caches()
    assert len(sites) == 1
    for site in sites:
        assert any(
            fails(SimDevice(choose(), deaf_to=site), policy=policy, **kwargs)
            for choose, kwargs, policy in itertools.product(CORNERS.values(), VARIANTS, range(4))
        )


def test_flushes_in_another_stream_than_that_of_the_batch() -> None:
    for choose, policy, capacity in itertools.product(WORST, range(6), (3, 5)):
        options: Any = {"policy": policy, "capacity": capacity}
        check_cached(SimDevice(choose()), 2, FIXED, switches_within=True, flushes=True, **options)


def test_a_step_that_changes_its_stream_for_good() -> None:
    for choose, i, policy in itertools.product(WORST, (0, 1, 2), (0, 1)):
        check_cached(SimDevice(choose()), 2, FIXED, switch_in=i, policy=policy)


@pytest.mark.parametrize("of_cache", [True, False], ids=["the cache", "a batch"])
def test_memory_used_in_another_stream_must_be_shared_with_it(
    of_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each part has a block of memory of its own, as large parts have.
    monkeypatch.setattr(layout, "SMALL_NBYTES", 0)

    class Forgetful(SimDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            if sharing_function() != ("_follow" if of_cache else "put"):
                super().share(tensor, stream)

    assert any(
        fails(Forgetful(choose()), policy=policy, **kwargs)
        for choose, policy, kwargs in itertools.product(WORST, range(8), VARIANTS)
    )
