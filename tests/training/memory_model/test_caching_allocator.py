"""The simulated caching allocator."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinfeed.training.memory_model.cuda_memory import (
    CachingAllocator,
    Event,
    reserved_bytes,
)

MIB = 1 << 20


def program(seed: int, sizes: list[int]) -> list[Event]:
    """Return events that allocate tensors in order, and free all of them in a random order."""
    rng = random.Random(seed)
    events = []
    live = []
    for number, size in enumerate(sizes):
        events.append((number, size))
        live.append((number, size))
        while live and rng.random() < 0.45:
            number_gone, gone = live.pop(rng.randrange(len(live)))
            events.append((number_gone, -gone))
    return events + [(number, -size) for number, size in live]


SIZES = st.lists(
    st.one_of(st.integers(1, 5000), st.integers(1, 3 * MIB), st.integers(9 * MIB, 50 * MIB)),
    max_size=40,
)


@given(SIZES, st.integers(0, 9))
def test_reserved_memory_covers_allocated_memory(sizes: list[int], seed: int) -> None:
    allocator = CachingAllocator()
    live = {}
    most = 0
    for number, nbytes in program(seed, sizes):
        if nbytes > 0:
            allocator.malloc(number, nbytes)
            live[number] = -(-nbytes // 512) * 512
        else:
            allocator.free(number)
            del live[number]
        most = max(most, sum(live.values()))
        assert sum(live.values()) <= allocator.allocated <= allocator.reserved
    assert allocator.allocated == 0
    assert most <= allocator.reserved == reserved_bytes(program(seed, sizes))
    free = [block for blocks in allocator._free.values() for block in blocks]
    assert sum(block.size for block in free) == allocator.reserved
    assert all(block.before is None and block.after is None for block in free), (
        "all that is free is joined again"
    )


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB] * 2, 2 * MIB),
        ([MIB] * 3, 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([MIB + 1, 10 * MIB - 512, 8 * MIB], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([511 * MIB + 3], 512 * MIB),
    ],
)
def test_segments_of_torch(sizes: list[int], reserved: int) -> None:
    assert reserved_bytes(enumerate(sizes)) == reserved


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    for number, size in enumerate((40 * MIB, 30 * MIB, 20 * MIB)):
        allocator.malloc(number, size)
    for number in range(3):
        allocator.free(number)
    allocator.malloc(3, 25 * MIB)
    assert allocator._live[3].segment == 2
    assert allocator.reserved == 90 * MIB


def test_a_free_block_that_is_too_small_stays_reserved() -> None:
    assert reserved_bytes([(0, 40 * MIB), (0, -40 * MIB), (1, 60 * MIB)]) == 100 * MIB
