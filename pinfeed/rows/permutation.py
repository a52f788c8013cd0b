"""Random permutations and draws, computed at any position without a table."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import Library, address_of, library, packing

Numbers = npt.NDArray[np.int64]
"""Numbers, shape (n,)."""
Words = npt.NDArray[np.uint32]
"""Numbers of 32 bits, shape (n,) or ()."""

# Up to this size a permutation is a table, because a network needs a few hundred rows to share the
# cost of its steps.
_TABLE_ROWS = 1 << 12

# Constants of the network are arrays without axes, because numpy takes twice as long to begin an
# operation if it first has to convert a scalar.
_SHIFT_15 = np.array(15, np.uint32)
_SHIFT_16 = np.array(16, np.uint32)
_FACTOR = np.array(0x7FEB352D, np.uint32)
_LAST_FACTOR = np.array(0x846CA68B, np.uint32)

# Odd integer nearest to 2^64 divided by the golden ratio: the distance of SplitMix64's states.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permutation(n: int, salt: str) -> Callable[[Numbers], Numbers]:
    """Return a random permutation of [0, n) as a function of positions.

    Small permutations are tables. Large ones are a Feistel network on a rectangle that is not much
    larger than n, applied until the result is below n (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002). They take no memory.

    Args:
        n: Size of the permutation.
        salt: Text that the permutation is a function of.
    """
    if n <= _TABLE_ROWS:
        table = np.argsort(_mix(np.arange(n, dtype=np.uint64) ^ keys_of(salt, 1)[0]), kind="stable")
        return lambda positions: table[positions]
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)
    numbers = keys_of(salt, 6).astype(np.uint32)
    keys = [np.asarray(key) for key in numbers]

    # Every number is below width * height, which is slightly larger than n.
    dtype = np.uint32 if n <= 1 << 31 else np.int64

    def network(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        left = (x // width).astype(np.uint32, copy=False)
        right = (x - left * dtype(width)).astype(np.uint32, copy=False)
        random = np.empty_like(left)
        spare = np.empty_like(left)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            _mix32(right, even, random, spare)
            _add(left, random, height, spare)
            _mix32(left, odd, random, spare)
            _add(right, random, width, spare)
        found: npt.NDArray[Any] = left.astype(dtype, copy=False)
        found *= width
        found += right
        return found

    native = library()
    # The compiled network has signed numbers of 32 bits.
    if native is not None and width * height < 1 << 31:
        # The high half of a coordinate below 2^16 is 0, so the high half of its sum with a key is
        # that of the key, which is added to the low half here instead of in every step.
        folded = (numbers ^ (numbers >> 16)).tolist()
        return functools.partial(_permute, native, (n, width, height, *folded))

    def at(positions: Numbers) -> Numbers:
        found = network(positions.astype(dtype, copy=False))
        outside = np.flatnonzero(found >= n)
        while len(outside):
            found[outside] = again = network(found[outside])
            outside = outside[again >= n]
        return found.astype(np.int64, copy=False)

    return at


def _permute(native: Library, network: tuple[int, ...], positions: Numbers) -> Numbers:
    """Return the permuted numbers at ``positions``, computed by the compiled function."""
    positions = np.ascontiguousarray(positions, np.int64)
    out = np.empty_like(positions)
    request = (address_of(positions), len(positions), address_of(out), *network)
    native.permute(packing(len(request))(*request))
    return out


def draws(n: int, salt: str) -> Callable[[Numbers], Numbers]:
    """Return independent draws from [0, n) as a function of positions.

    They are the outputs of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014) modulo ``n``. A number is more probable than another one by at most n / 2^64.

    Args:
        n: Number of values, at least 1.
        salt: Text that the draws are a function of.
    """
    numbers = _random_words(salt)
    return lambda positions: (numbers(positions) % np.uint64(n)).astype(np.int64)


def uniforms(salt: str) -> Callable[[Numbers], npt.NDArray[np.float64]]:
    """Return independent numbers as a function of positions, uniform multiples of 2^-53 in [0, 1).

    Args:
        salt: Text that the numbers are a function of.
    """
    numbers = _random_words(salt)
    return lambda positions: (numbers(positions) >> np.uint64(11)) * np.float64(2**-53)


def _random_words(salt: str) -> Callable[[Numbers], npt.NDArray[np.uint64]]:
    """Return the outputs of SplitMix64 as a function of positions."""
    key = keys_of(salt, 1)[0]
    return lambda positions: _mix(positions.astype(np.uint64) * _GOLDEN + key)


def _add(x: Words, random: Words, size: int, spare: Words) -> None:
    """Add random numbers to ``x`` in place, modulo ``size``.

    Args:
        x: Numbers below ``size``.
        random: Random bits, of which the high ones count; overwritten.
        size: The modulus, at most 2^31.
        spare: Memory of the same shape; overwritten.
    """
    modulus = np.array(size, np.uint32)
    if size <= 1 << 16:
        # 32 bits are enough, which is three times as fast as 64.
        random >>= _SHIFT_16
        random *= modulus
        random >>= _SHIFT_16
    else:
        random[:] = random.astype(np.uint64) * np.uint64(size) >> np.uint64(32)
    x += random
    # The difference wraps around and is large for an x that is below size already.
    np.subtract(x, modulus, spare)
    np.minimum(x, spare, out=x)


def keys_of(salt: str, n: int) -> npt.NDArray[np.uint64]:
    """Return ``n`` random numbers that are a function of ``salt``."""
    digest = hashlib.blake2b(salt.encode(), digest_size=8 * n).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit over all others by SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: Words, key: Words, out: Words, spare: Words) -> None:
    """Write numbers to ``out`` whose high bits depend on every bit of ``x`` and ``key``.

    The method is two rounds of multiply and xor-shift in 32 bits, which processors execute eight at
    a time, with the multipliers of lowbias32 (Wellons, "Prospecting for Hash Functions", 2018).

    Args:
        x: The numbers.
        key: The key.
        out: Memory of the result.
        spare: Memory of the same shape; overwritten.
    """
    np.bitwise_xor(x, key, out)
    out ^= np.right_shift(out, _SHIFT_16, spare)
    out *= _FACTOR
    out ^= np.right_shift(out, _SHIFT_15, spare)
    out *= _LAST_FACTOR
