"""Permutations: complete, random, and computed at any position."""

import itertools
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.row_batches import whole

from pinfeed.rows.orders import shuffled
from pinfeed.rows.permutation import permutation

SIZES = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    16,
    100,
    255,
    256,
    257,
    1000,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    131072,
]


@pytest.mark.parametrize("n", SIZES)
def test_a_permutation_has_every_number_once(n: int) -> None:
    numbers = permutation(n, "salt")(np.arange(n))
    assert numbers.dtype == np.int64
    assert np.array_equal(np.sort(numbers), np.arange(n))


def test_a_permutation_of_any_small_size_has_every_number_once() -> None:
    for n in range(1, 300):
        assert np.array_equal(np.sort(permutation(n, f"{n}")(np.arange(n))), np.arange(n))


# Saved positions continue in these permutations, so they are equal in every version and on every
# machine. The numbers are checksums of the little-endian bytes at 30,000 positions.
GOLDEN = {
    4_096: 0xEC8E6F72,
    4_097: 0x0C36AED8,
    65_536: 0x1E1E1003,
    65_537: 0x608D9644,
    100_000: 0x5E412966,
    1_000_000: 0xC8E010D3,
    100_000_000: 0x4194AC65,
    2_147_483_647: 0x23B880AA,
    2_147_483_648: 0x066082FE,
    2_147_483_649: 0xF20A4E8E,
    4_294_967_297: 0xCDDEF867,
    1_000_000_000_000: 0x68AD389A,
    4_611_686_018_427_387_904: 0x5C2B294F,
}


@pytest.mark.parametrize(("n", "checksum"), GOLDEN.items())
def test_a_permutation_is_the_same_in_every_version(n: int, checksum: int) -> None:
    positions = np.unique(np.linspace(0, n, 30_000, endpoint=False).astype(np.int64))
    numbers = permutation(n, "golden")(positions)
    assert zlib.crc32(numbers.astype("<i8").tobytes()) == checksum


@settings(max_examples=30)
@given(n=st.integers(65537, 1 << 18), salt=st.text(max_size=8))
def test_a_large_permutation_has_every_number_once(n: int, salt: str) -> None:
    assert np.bincount(permutation(n, salt)(np.arange(n)), minlength=n).max() == 1


@pytest.mark.parametrize("n", [10**12, (1 << 40) - 1, 1 << 40, (1 << 40) + 1, 1 << 62])
def test_a_permutation_of_more_rows_than_memory(n: int) -> None:
    positions = np.unique(
        np.concatenate([np.arange(20_000), np.arange(0, n, n // 50_000), np.arange(n - 20_000, n)])
    )
    numbers = permutation(n, "huge")(positions)
    assert numbers.min() >= 0
    assert numbers.max() < n
    assert len(np.unique(numbers)) == len(positions)
    assert abs(numbers.mean() / n - 0.5) < 0.01
    assert abs(np.corrcoef(positions, numbers)[0, 1]) < 0.02


@pytest.mark.parametrize("n", [1000, 4096, 4097, 200_000])
def test_a_permutation_looks_random(n: int) -> None:
    numbers = permutation(n, "random")(np.arange(n))
    assert abs(np.corrcoef(np.arange(n), numbers)[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / n**0.5
    n_consecutive = int((np.abs(np.diff(numbers)) == 1).sum())
    assert n_consecutive < 12, "about 2 pairs of consecutive numbers are expected to stay together"
    assert (numbers == np.arange(n)).sum() < 8, "about 1 number is expected to stay where it is"


def test_every_row_comes_first_equally_often() -> None:
    n, draws = 10, 5000
    first = np.bincount(
        [int(shuffled(seed).bind(n, 0)(np.zeros(1, np.int64))[0]) for seed in range(draws)],
        minlength=n,
    )
    chi_square = ((first - draws / n) ** 2 / (draws / n)).sum()
    assert chi_square < 27.9, "0.1 % point of chi-square with 9 degrees of freedom"


def test_every_row_is_equally_often_first_in_a_permutation() -> None:
    n = 70_000
    draws = 4000
    bins = 10
    first = [int(shuffled(7).bind(n, epoch)(np.zeros(1, np.int64))[0]) for epoch in range(draws)]
    chi_square = ((np.histogram(first, bins, (0, n))[0] - draws / bins) ** 2 / (draws / bins)).sum()
    assert chi_square < 27.9


def test_all_permutations_of_three_are_equally_likely() -> None:
    draws = 6000
    counts = Counter(tuple(whole(shuffled(seed), 3).tolist()) for seed in range(draws))
    assert set(counts) == set(itertools.permutations(range(3)))
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5, (
        "0.1 % point of chi-square with 5 degrees of freedom"
    )
