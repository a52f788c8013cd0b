"""Mover and Writer: what a loop needs to move batches to a device, and values back to their stores.

``Transfer`` is both, for a device with streams. ``HostTransfer`` and ``HostWrites`` are one each,
for a device that uses host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Tensor
from pinfeed.pipeline.forwarding import WriteLog
from pinfeed.pipeline.pending_write import HeldValues, PendingWrite
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import HostBatch, RowGroup
from pinfeed.profiling.counters import Counters

RunAll = Callable[[Sequence[Callable[[], object]]], None]
"""Makes several calls, maybe in several threads, and returns when all have ended."""


def run_in_turn(calls: Sequence[Callable[[], object]]) -> None:
    """Make calls one after the other."""
    for call in calls:
        call()


class Mover(Protocol):
    """Moves the batches of one loop at a time to a device, in slots."""

    @property
    def device(self) -> Any:
        """The device."""

    @property
    def counters(self) -> Counters:
        """Counters of the loop."""

    @property
    def is_stopping(self) -> bool:
        """Whether the loop has ended, so that no further batch need be filled."""

    def begin(self, n_slots: int, batches_per_slot: int, gather_all: RunAll = ...) -> Sequence[Any]:
        """Begin a loop, and return its slots."""

    def fill(self, slot: Any, batch: HostBatch, number: int) -> Slot:
        """Gather a batch into a slot (reader; one thread per slot)."""

    def transform(self, slot: Any, function: Callable[[Any], Any]) -> None:
        """Call ``device_transform`` on the batch of a full slot (transform thread)."""

    def lend(self, slot: Any) -> deque[list[Tensor]]:
        """Return the tensors of each of the batches in a slot (consumer)."""

    def copy_to_host(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Wait for the device, and return the values of a lent tensor (consumer)."""

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""

    def check_stop(self) -> None:
        """Raise Cancelled if ``is_stopping``."""

    def settle(self) -> None:
        """Wait until the timestamps of the loop's last request are known."""

    def quiesce(self) -> None:
        """Wait for queued copies and release their memory (consumer)."""

    def close(self) -> None:
        """Free the slots."""


class Writer(Protocol):
    """Takes values of one loop at a time that are to be written back to their stores."""

    @property
    def device(self) -> Any:
        """The device."""

    @property
    def counters(self) -> Counters:
        """Counters of the loop."""

    @property
    def log(self) -> WriteLog[HeldValues]:
        """Writes that some gathered batch may not have seen."""

    def hold(
        self,
        groups: Sequence[RowGroup],
        values: Sequence[Sequence[Tensor | None] | None],
        batch: int,
        *,
        copied: bool,
    ) -> PendingWrite:
        """Take values (consumer)."""

    def write_to_stores(self, pending: PendingWrite) -> None:
        """Write values to their stores (a writer, or the consumer at depth 0)."""

    @property
    def has_caches(self) -> bool:
        """Whether the running loop has lent rows of a cache."""

    def changed_rows(self, *, is_last: bool) -> Iterator[PendingWrite]:
        """Yield writes of all rows in caches that may differ from their stores (consumer)."""

    def note_flushed(self) -> None:
        """Note that the rows of ``changed_rows`` were written (consumer)."""
