"""Byte units, and sizes, rates and times as text."""

from __future__ import annotations

from typing import Any

from pinfeed.errors import ArgumentError


def KiB(count: float = 1) -> int:
    """Return the bytes in ``count`` KiB, rounded down."""
    return _bytes(count, 10, "KiB")


def MiB(count: float = 1) -> int:
    """Return the bytes in ``count`` MiB, rounded down."""
    return _bytes(count, 20, "MiB")


def GiB(count: float = 1) -> int:
    """Return the bytes in ``count`` GiB, rounded down."""
    return _bytes(count, 30, "GiB")


def _bytes(count: Any, shift: int, unit: str) -> int:
    if not hasattr(count, "__float__"):
        # A string times a number would give a long string.
        raise ArgumentError(f"{unit}({count!r}): expected a number, such as {unit}(64)")
    return int(count * (1 << shift))


def human(nbytes: float) -> str:
    """Return a number of bytes as text for people: ``1.5 GiB``."""
    if nbytes < 0:
        return f"-{human(-nbytes)}"
    if round(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        # The check uses the printed number, because 1023.96 MiB would print as "1024.0 MiB".
        if round(nbytes, 1) < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} PiB"


def human_rate(bytes_per_s: float) -> str:
    """Return a rate as text for people, with three digits: ``1.25 GB/s`` is 1.25e9 bytes/s."""
    rate = bytes_per_s
    unit = "B/s"
    for larger in ("KB/s", "MB/s", "GB/s"):
        if round(rate) < 1000:
            break
        rate /= 1000
        unit = larger
    if unit == "B/s" or rate >= 99.95:
        return f"{rate:,.0f} {unit}"
    if rate >= 9.995:
        return f"{rate:.1f} {unit}"
    return f"{rate:.2f} {unit}"


def duration(seconds: float) -> str:
    """Return a time as text for people: ``1.32 ms``, or ``7.64 µs`` below 0.1 ms."""
    us = seconds * 1e6
    ms = seconds * 1e3
    if us < 99.95:
        return f"{us:.3g} µs"
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms:,.0f} ms"
