"""Data sets, devices and helpers of the tests of wrap_loader."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
)

from pinfeed.devices.cpu import HostDevice

DEPTHS = [0, 1, 2, 5]
N, SIZE = 14, 4
STARTS = [0, 4, 8, 12]
"""First sample of each batch."""


@pytest.fixture(autouse=True)
def queues_closed() -> Iterator[None]:
    """Wait until torch's queues are closed, which their threads do some time after a loop."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=10)


class CopyingDevice(HostDevice):
    """Host device that copies a loader's tensors as a GPU does, from staging or directly."""

    unified = False

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self._direct = direct

    def adopts(self, part: Any) -> bool:
        value = getattr(part, "host_value", None)
        return value is not None and not (
            type(value) is torch.Tensor
            and value.layout is torch.strided
            and not value.is_nested
            and not value.requires_grad
        )

    def reaches(self, source: Any) -> bool:
        return self._direct and getattr(source, "host_value", None) is not None


DEVICES: dict[str, Callable[[], Any]] = {
    "cpu": lambda: "cpu",
    "staged": lambda: CopyingDevice(direct=False),
    "direct": lambda: CopyingDevice(direct=True),
}


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any


class Numbers(Dataset[Any]):
    """Data set of 0.0 … 13.0; ``make`` makes the sample of each number."""

    def __init__(self, make: Callable[[float], Any] = torch.tensor) -> None:
        self.make = make

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.make(float(i))


class Stream(IterableDataset[Any]):
    """The same, split among the workers."""

    def __init__(
        self, make: Callable[[float], Any] = torch.tensor, *, length: int | None = None
    ) -> None:
        self.make = make
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for i in range(N) if info is None else range(info.id, N, info.num_workers):
            yield self.make(float(i))


def same(a: Any, b: Any) -> bool:
    """Return whether two batches are of the same structure and equal, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Sample):
        return same([a.image, a.label], [b.image, b.label])
    return bool(a == b)


def all_same(batches: Iterable[Any], others: Iterable[Any]) -> bool:
    return same(list(batches), list(others))


def starts(batches: Iterable[Any]) -> list[int]:
    """Return the first sample of each batch of Numbers."""
    return [int(batch[0]) for batch in batches]
