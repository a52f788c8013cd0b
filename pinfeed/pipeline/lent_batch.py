"""LentBatch: a batch on the device that the loop has received; WritableBatch: one to write back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pinfeed.devices.device import Tensor
from pinfeed.errors import WriteBackError
from pinfeed.pipeline.sources.source import BatchValues, HostBatch, RowGroup
from pinfeed.pipeline.write_queue import LoopWrites


class LentBatch:
    """A batch on the device.

    ``take`` hands its tensors over once; from then on only the user owns them.

    Args:
        host_batch: Contents of the slot, which may be several batches.
        tensors: Tensors of this batch.
        i: Position of this batch in the slot.
        number: Number of this batch in its epoch.
    """

    def __init__(self, host_batch: HostBatch, tensors: list[Tensor], i: int, number: int) -> None:
        self.number = number
        self.n_rows, self.checksum = host_batch.batches[i]
        self.state = host_batch.state
        """State of the loader after the batch, if the loader has a state."""
        self._slot_batches = host_batch.batches
        self._slot_groups = host_batch.groups
        self._i = i
        self._host_batch = host_batch
        self._tensors = tensors

    def take(self) -> Any:
        """Return the batch in the user's structure."""
        tensors = self._tensors
        host_batch = self._host_batch
        # The HostBatch keeps the batch as it was on the host.
        del self._tensors, self._host_batch
        if host_batch.complete is None:
            return host_batch.rebuild(iter(tensors))
        return host_batch.complete(host_batch.data(tensors), tensors)

    @functools.cached_property
    def groups(self) -> list[RowGroup]:
        """Rows of the batch, and their stores."""
        if len(self._slot_batches) == 1:
            return self._slot_groups
        begin = sum(n_rows for n_rows, _ in self._slot_batches[: self._i])
        return [group.cut(begin, begin + self.n_rows) for group in self._slot_groups]


class WritableBatch(LentBatch):
    """A batch of a loop that writes rows back, or has caches, until the next one is requested.

    Args:
        writes: Write-backs of the loop.
        host_batch: Contents of the slot.
        tensors: Tensors of this batch.
        i: Position of this batch in the slot.
        number: Number of this batch in its epoch.
    """

    def __init__(
        self, writes: LoopWrites, host_batch: HostBatch, tensors: list[Tensor], i: int, number: int
    ) -> None:
        super().__init__(host_batch, tensors, i, number)
        self._writes = writes
        self.is_over = False
        """Whether the loop has requested the next batch or has ended."""
        self._is_written = False

    def finish(self) -> None:
        """End the batch, because the loop requests the next one.

        Rows move into and out of their caches, if no write of the batch has moved them.

        Raises:
            ClosedError: If the loop does not run, in this process.
            Exception: If a write-back failed; its error.
        """
        self.is_over = True
        self._writes.require_running()
        cached = [group.cached for group in self._slot_groups if group.cached is not None]
        if cached and not self._is_written:
            self.write([None] * len(self.groups), copied=False, check=False)
        for rows in cached:
            rows.release()
        self._writes.check()

    def require_writable(self) -> None:
        """Check that the batch can be written back now.

        Raises:
            WriteBackError: If the loop has requested the next batch or has ended, or if the batch
                was written back before.
        """
        if self.is_over:
            raise WriteBackError(
                "write_back after the loop requested the next batch or ended; call it in the "
                "training step of its batch"
            )
        if self._is_written:
            raise WriteBackError(
                "write_back was called twice for this batch; give all values in one call, with "
                "None for a store without changes"
            )

    def write(
        self,
        values: Sequence[Sequence[Tensor | None] | None],
        *,
        copied: bool = True,
        check: bool = True,
    ) -> None:
        """Queue values, which the caller has checked, to be written back.

        Args:
            values: For each group of the batch's rows one tensor per store. None leaves a store, or
                a whole group, unchanged.
            copied: Whether to copy the values. With False, the tensors themselves are kept, and
                must not change any more.
            check: Whether to raise the error of an earlier write-back. With False, the end of the
                loop raises it.
        """
        batch = BatchValues(self.number, self.groups, values)
        self._writes.write(batch, copied=copied, check=check)
        self._is_written = True
