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
from pinfeed.training.trainer.partial_epoch import PartialEpoch
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
        epoch: Number of the epoch that runs or was left before its end, otherwise of the next one.
        done: Progress of this epoch; ``read`` adds the losses.
        is_recording: Whether an epoch is running.
        loss: Loss of the last backward pass of the current batch; None before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending = PendingRecords()
        self._epoch_began_s = 0.0
        self._last_batch_s = 0.0
        self._is_resumed = False
        self.history = History()
        self.n_epochs = 0
        self.epoch = 0
        self.done = PartialEpoch()
        self.is_recording = False
        self.loss: torch.Tensor | None = None

    def begin(self) -> int:
        """Begin an epoch and return its number."""
        now = time.perf_counter()
        self._epoch_began_s = now
        self._last_batch_s = now
        self.is_recording = True
        if not self._is_resumed:
            self.done = PartialEpoch()
        self._is_resumed = False
        self.epoch = self.n_epochs
        self.n_epochs += 1
        return self.epoch

    def resume(self, epoch: int, done: PartialEpoch) -> None:
        """Make the next epoch continue with what is done of it."""
        self._is_resumed = True
        self.n_epochs = epoch
        self.epoch = epoch
        self.done = done

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """Record a backward pass."""
        self.loss = loss
        if self.is_recording:
            now = time.perf_counter()
            seconds = now - self._last_batch_s
            self._last_batch_s = now
            record = Record(
                "batch",
                self.epoch,
                self.done.n_backward + len(self._pending),
                math.nan,
                n_samples,
                seconds,
                **memory_use(self._device),
            )
            self._pending.add(record, loss)

    def read(self) -> None:
        """Wait for the device, and add the records of the batches so far to the history."""
        records = self._pending.read()
        self.history.rows += records
        self.done.n_backward += len(records)
        for record in records:
            self.done.n_samples += record.samples
            # Not sum(), which compensates rounding and could not be continued.
            self.done.loss += record.loss * record.samples

    def end(self) -> None:
        """End the epoch, also after an error, and add the records of its batches to the history."""
        self.is_recording = False
        self.loss = None
        self.read()

    def summary(self) -> Record:
        """Return the record of the epoch that has ended, and add it to the history."""
        done = self.done
        loss = done.loss / done.n_samples if done.n_samples else math.nan
        seconds = time.perf_counter() - self._epoch_began_s
        record = Record(
            "epoch", self.epoch, None, loss, done.n_samples, seconds, **memory_use(self._device)
        )
        self.epoch = self.n_epochs
        self.done = PartialEpoch()
        return self._add_to_history(record)

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
