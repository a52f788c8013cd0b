"""Prefetch depth: its default, its bounds, and how many batches a depth keeps in memory."""

from __future__ import annotations

from pinfeed.validation.arguments import whole_number

DEFAULT_DEPTH = 2
MAX_DEPTH = 1024
"""Most batches that a feeder prefetches.

Each batch needs memory, and pinfeed compares each write-back with the rows of all these batches.

Each prefetched batch hides a stall of up to one training step, so a few are enough. More than a few
hundred have no further benefit.
"""


def check_depth(depth: int) -> int:
    """Return ``depth`` as an int.

    Raises:
        ArgumentError: If it is not a whole number from 0 to ``MAX_DEPTH``.
    """
    return _check(depth, "")


def check_optional_depth(depth: int | None) -> int | None:
    """Return ``depth`` as an int; None stays as it is.

    Raises:
        ArgumentError: If it is neither None nor a whole number from 0 to ``MAX_DEPTH``.
    """
    return None if depth is None else _check(depth, ", or None to let pinfeed choose")


def _check(depth: int, alternative: str) -> int:
    note = (
        f" (0 is the synchronous loop){alternative}; each prefetched batch needs memory, and 2 to "
        "32 are enough"
    )
    return whole_number(depth, "depth", least=0, most=MAX_DEPTH, note=note)


def n_batches(depth: int, batches_per_slot: int = 1) -> int:
    """Return how many batches are in memory at a time.

    The training step uses ``batches_per_slot`` batches, the loop receives the next one before it
    drops these, and ``depth`` more are prefetched.
    """
    return depth + 1 + batches_per_slot


def n_held(depth: int) -> int:
    """Return how many write-backs are in memory at a time.

    At most ``max(depth, 2)`` write-backs are not written yet (one without prefetching), and a
    prefetched batch may still need the values of ``depth + 1`` others.
    """
    return (max(depth, 2) if depth else 1) + depth + 1
