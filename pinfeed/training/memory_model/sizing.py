"""The largest batch that fits: found by estimates at a few sizes, never by a line through small ones."""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(need: Callable[[int], float], limit: float, most: int | None) -> int:
    """The largest ``n`` of 1 to ``most`` with ``need(n) <= limit``; 0 if there is none.

    ``need`` grows with ``n``, nearly in a line beyond some size: a few calls find the place, and
    halving makes sure of it.

    Args:
        need: Bytes, or a share; called a few times, again for the same ``n`` too.
        limit: Likewise.
        most: None where nothing bounds it.
    """
    fits, least = 0, need(1)
    if least > limit or most == 0:
        return 0
    fits, at_fits = 1, least
    if most is not None:
        if most == 1 or need(most) <= limit:
            return most
        too_many, at_too_many = most, need(most)
    else:
        too_many, at_too_many = 2, need(2)
        while at_too_many <= limit:
            fits, at_fits = too_many, at_too_many
            too_many *= 4
            at_too_many = need(too_many)
    halve = False
    while too_many - fits > 1:
        share = 0.5 if halve else (limit - at_fits) / (at_too_many - at_fits)
        guess = min(max(fits + int(share * (too_many - fits)), fits + 1), too_many - 1)
        taken = need(guess)
        if taken <= limit:
            halve = not halve and (too_many - guess) > (guess - fits)
            fits, at_fits = guess, taken
        else:
            halve = not halve and (guess - fits) > (too_many - guess)
            too_many, at_too_many = guess, taken
    return fits
