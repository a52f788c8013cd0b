"""Byte units, sizes that users give, and sizes, rates and times as text."""

from __future__ import annotations

import math
import re
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.validation.arguments import whole_number

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{k}ib": 1 << 10 * i for i, k in enumerate("kmgt", 1)},
    **{f"{k}b": 1000**i for i, k in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)


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


def parse_size(value: Any, name: str, *, least: int = 1, note: str = "") -> int:
    """Return a number of bytes that a user gives as an int or as text.

    Text is a number and a unit, such as ``"2GiB"`` and ``"512MiB"`` (powers of 1024), ``"2GB"``
    (powers of 1000), or bytes without a unit (``"1.5e9"``). Fractions of a byte are cut off.

    Args:
        value: The user's argument.
        name: The argument's name.
        least: The smallest number of bytes that is accepted.
        note: Text that the error appends to the expected sizes.

    Raises:
        ArgumentError: If ``value`` is no size, or is below ``least``.
    """
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) is not None:
        nbytes = float(found[1]) * _UNITS.get(found[2].lower(), math.nan)
        if least <= nbytes < 1 << 63:
            return int(nbytes)
    sizes = " (bytes: pinfeed.GiB(2)), or text such as '2GiB', '512MiB' or '1.5e9'"
    return whole_number(value, name, least=least, note=f"{sizes}{note}")


class SizeField:
    """Field of a dataclass: a size in bytes, at least 1, or None, which is the default.

    The field accepts text, and its value is always an int or None. A type checker knows both types
    from the annotation.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> int | None:
        # A dataclass reads the default of a field from its class.
        return None if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: int | str | None) -> None:
        if value is not None:
            value = parse_size(value, self._name, note=", or None")
        instance.__dict__[self._name] = value


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
