"""Recorder: measures a training run without waiting for the device."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TypedDict

import torch

from pinfeed.memory.host import resident_bytes
from pinfeed.training.trainer.history import History
from pinfeed.training.trainer.record import Record

_STACKED_LOSSES = 256
"""Number of losses that share a tensor; a separate tensor takes 512 bytes on a GPU."""


class MemoryUse(TypedDict):
    """Memory in bytes, by the names of a Record."""

    allocated_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None


def memory_use(device: torch.device) -> MemoryUse:
    """Return the current memory use, without waiting for the device."""
    host = resident_bytes()
    parts = [host[name] for name in ("anonymous", "file", "shared")]
    known = [nbytes for nbytes in parts if nbytes is not None]
    on_gpu = device.type == "cuda"
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device) if on_gpu else None,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "host_bytes": sum(known) if len(known) == len(parts) else None,
    }


class Recorder:
    """Measures epochs, one after the other.

    Args:
        device: Device of the model.

    Attributes:
        history: History that receives the records of an epoch when the epoch ends.
        n_epochs: Number of epochs that have begun.
        is_recording: Whether an epoch is running.
        loss: Loss of the last backward pass of the current batch; None before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending = PendingRecords()
        self._records: list[Record] = []
        self._epoch_began_s = 0.0
        self._last_batch_s = 0.0
        self.history = History()
        self.n_epochs = 0
        self.is_recording = False
        self.loss: torch.Tensor | None = None

    def begin(self) -> int:
        """Begin an epoch and return its number."""
        now = time.perf_counter()
        self._epoch_began_s = now
        self._last_batch_s = now
        self.is_recording = True
        self.n_epochs += 1
        return self.n_epochs - 1

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """Record a backward pass."""
        self.loss = loss
        if self.is_recording:
            now = time.perf_counter()
            seconds = now - self._last_batch_s
            self._last_batch_s = now
            record = Record(
                "batch",
                self.n_epochs - 1,
                len(self._pending),
                math.nan,
                n_samples,
                seconds,
                **memory_use(self._device),
            )
            self._pending.add(record, loss)

    def end(self) -> None:
        """End the epoch, also after an error, and add the records of its batches to the history."""
        self.is_recording = False
        self.loss = None
        self._records = self._pending.read()
        self.history.rows += self._records

    def summary(self) -> Record:
        """Return the record of the epoch that has ended, and add it to the history."""
        n = sum(record.samples for record in self._records)
        loss = math.nan
        if n:
            loss = sum(record.loss * record.samples for record in self._records) / n
        seconds = time.perf_counter() - self._epoch_began_s
        epoch = self.n_epochs - 1
        return self._add_to_history(
            Record("epoch", epoch, None, loss, n, seconds, **memory_use(self._device))
        )

    def evaluation(
        self, loss: float, n_samples: int, seconds: float, metrics: Mapping[str, float]
    ) -> Record:
        """Return the record of an evaluation, and add it to the history."""
        return self._add_to_history(
            Record(
                "evaluation",
                self.n_epochs,
                None,
                loss,
                n_samples,
                seconds,
                **memory_use(self._device),
                metrics=metrics,
            )
        )

    def _add_to_history(self, record: Record) -> Record:
        self.history.rows.append(record)
        return record


class PendingRecords:
    """Records of batches whose losses are still on the device.

    The losses are read when the epoch has ended, so that no batch waits for the device.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._losses: list[torch.Tensor] = []
        self._stacks: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, loss: torch.Tensor) -> None:
        """Add a batch, whose loss has one element."""
        self._records.append(record)
        self._losses.append(loss.detach().double().reshape(()))
        if len(self._losses) == _STACKED_LOSSES:
            self._stack()

    def read(self) -> list[Record]:
        """Wait for the device, return all records with their losses, and forget them."""
        self._stack()
        losses = [loss for stack in self._stacks for loss in stack.tolist()]
        pairs = zip(self._records, losses, strict=True)
        records = [dataclasses.replace(record, loss=loss) for record, loss in pairs]
        self._records = []
        self._stacks = []
        return records

    def _stack(self) -> None:
        if self._losses:
            self._stacks.append(torch.stack(self._losses))
        self._losses = []
