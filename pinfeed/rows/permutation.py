"""Random permutations of any size, computed at any position without a table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""Numbers, shape (n,)."""

# Up to this size a permutation is a table, because a network needs some hundred rows to share the
# cost of its steps.
_TABLE_ROWS = 1 << 12


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
    keys = keys_of(salt, 6).astype(np.uint32)
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)

    def network(x: Numbers) -> Numbers:
        quotient = x // width
        left = quotient.astype(np.uint32)
        right = (x - quotient * width).astype(np.uint32)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            _add(left, _mix32(right, even), height)
            _add(right, _mix32(left, odd), width)
        return left.astype(np.int64) * width + right

    def at(positions: Numbers) -> Numbers:
        x = network(positions)
        while len(outside := np.flatnonzero(x >= n)):
            x[outside] = network(x[outside])
        return x

    return at


def _add(x: npt.NDArray[np.uint32], random: npt.NDArray[np.uint32], size: int) -> None:
    """Add random numbers to ``x`` in place, modulo ``size``.

    Args:
        x: Numbers below ``size``.
        random: Random bits, of which the high ones count; overwritten.
        size: The modulus, at most 2^31.
    """
    if size <= 1 << 16:
        # 32 bits are enough, which is three times as fast as 64.
        random >>= np.uint32(16)
        random *= np.uint32(size)
        random >>= np.uint32(16)
        x += random
    else:
        x += ((random.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.uint32)
    # The difference wraps around and is large for an x that is below size already.
    np.minimum(x, x - np.uint32(size), out=x)


def keys_of(salt: str, n: int) -> npt.NDArray[np.uint64]:
    """Return ``n`` random numbers that are a function of ``salt``."""
    digest = hashlib.blake2b(salt.encode(), digest_size=8 * n).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit over all others by SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: npt.NDArray[np.uint32], key: np.uint32) -> npt.NDArray[np.uint32]:
    """Return numbers whose high bits depend on every bit of ``x`` and ``key``.

    They are two rounds of multiply and xor-shift in 32 bits, which processors do eight at a time,
    with the multipliers of lowbias32 (Wellons, "Prospecting for Hash Functions", 2018).
    """
    x = x ^ key
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x
