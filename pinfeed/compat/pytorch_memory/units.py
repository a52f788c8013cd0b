"""Units of the original: unlike ``pinfeed.MiB`` and ``pinfeed.GiB``, they round down in steps."""

from __future__ import annotations

import math


def KiB(coef: float = 1) -> int:
    """Return the bytes in ``coef`` KiB, rounded down."""
    return math.floor(coef * 1024)


def MiB(coef: float = 1) -> int:
    """Return the bytes in ``coef`` MiB, rounded down to whole KiB."""
    return 1024 * KiB(coef)


def GiB(coef: float = 1) -> int:
    """Return the bytes in ``coef`` GiB, rounded down to whole MiB."""
    return 1024 * MiB(coef)


def round_to(number: int, modulo: int) -> int:
    """Return the largest multiple of ``modulo`` that is not above ``number``."""
    return number // modulo * modulo
