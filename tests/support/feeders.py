"""Helpers of the tests of Feeder."""

from typing import Any

DEPTHS = [0, 1, 2, 5]


def numbers(feeder: Any) -> list[list[int]]:
    """Return the row indices of every batch."""
    return [batch.rows.tolist() for batch in feeder.batches()]
