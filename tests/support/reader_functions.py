"""Functions, devices and helpers of the tests of wrap_readers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pinfeed import wrap_readers
from pinfeed.devices.cpu import HostDevice

DEPTHS = [0, 1, 2, 5]
DEPTHS_AND_READERS = [(0, 1), (1, 1), (2, 1), (2, 3)]
"""Depth, and number of readers."""


class StagingDevice(HostDevice):
    """Host device that copies all batches from staging memory, as a GPU does."""

    unified = False

    def adopts(self, part: Any) -> bool:
        return False

    def reaches(self, source: Any) -> bool:
        return False


DEVICES: dict[str, Callable[[], Any]] = {"cpu": lambda: "cpu", "staged": StagingDevice}


def image(i: int) -> Iterator[np.ndarray]:
    yield np.full((2, 3), i, np.float32)


def label(i: int) -> Iterator[int]:
    yield i


def several(count: int) -> dict[str, Any]:
    """Return functions that yield ``count`` samples of each identity."""
    return {
        "read_input": lambda i: (np.full((2, 3), 100 * i + k, np.float32) for k in range(count)),
        "get_output": lambda i: (100 * i + k for k in range(count)),
        "one_read_count": count,
    }


def wrapped(n: int = 6, **arguments: Any) -> Any:
    values = arguments.pop("inputs", range(n)), arguments.pop("outputs", range(n))
    defaults = {"read_input": image, "get_output": label, "batch_size": 2, "device": "cpu"}
    return wrap_readers(*values, **{**defaults, **arguments})


def stack(samples: Iterator[Any]) -> np.ndarray:
    return np.stack(list(samples))
