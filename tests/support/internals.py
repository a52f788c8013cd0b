"""Parts of a feeder that tests look at. Only this file knows where they are."""

from typing import Any


def runner_of(feeder: Any) -> Any:
    """Return the runner of a feeder's epochs."""
    return feeder._loop


def counters_of(feeder: Any) -> Any:
    """Return the counters of a feeder's loops; ``now`` is their clock."""
    return runner_of(feeder)._counters


def mover_of(feeder: Any) -> Any:
    """Return what moves a feeder's batches to its device."""
    return runner_of(feeder)._transfer
