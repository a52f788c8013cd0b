"""What a training run measures while it goes on."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TypedDict

import torch

from pinfeed.memory.host import resident_bytes
from pinfeed.training.trainer.history import History, Record

# Losses that become one tensor on the device: a tensor of its own takes 512 bytes there.
_TOGETHER = 256


class MemoryUse(TypedDict):
    """Bytes, as a Row has them."""

    allocated_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None


def taken(device: torch.device) -> MemoryUse:
    """Memory as it is. Does not wait for the device."""
    host = resident_bytes()
    kinds = [
        nbytes for name in ("anonymous", "file", "shared") if (nbytes := host[name]) is not None
    ]
    on_gpu = device.type == "cuda"
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device) if on_gpu else None,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "host_bytes": sum(kinds) if len(kinds) == 3 else None,
    }


class Recorder:
    """Measures epochs, one after the other.

    Args:
        device: Of the model.

    Attributes:
        history: Where the numbers go when an epoch has ended.
        n_epochs: Epochs that were begun.
        is_recording: Whether one is under way.
        loss: Of the last backward pass of the batch that is under way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending = PendingRecord()
        self._rows = list[Record]()
        self._begin = self._since = 0.0
        self.history = History()
        self.n_epochs = 0
        self.is_recording = False
        self.loss: torch.Tensor | None = None

    def begin(self) -> int:
        """An epoch begins; its number."""
        self._begin = self._since = time.perf_counter()
        self.is_recording = True
        self.n_epochs = self.n_epochs + 1
        return self.n_epochs - 1

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """A backward pass was done."""
        self.loss = loss
        if self.is_recording:
            now = time.perf_counter()
            seconds = now - self._since
            self._since = now
            row = Record(
                "batch",
                self.n_epochs - 1,
                len(self._pending),
                math.nan,
                n_samples,
                seconds,
                **taken(self._device),
            )
            self._pending.add(row, loss)

    def end(self) -> None:
        """No more batches of this epoch, for whatever reason."""
        self.is_recording = False
        self.loss = None
        self._rows = self._pending.read()
        self.history.rows += self._rows

    def summary(self) -> Record:
        """The epoch that has ended, as a whole; it goes into the history."""
        n = sum(row.samples for row in self._rows)
        loss = sum(row.loss * row.samples for row in self._rows) / n if n else math.nan
        return self._kept(
            Record(
                "epoch",
                self.n_epochs - 1,
                None,
                loss,
                n,
                time.perf_counter() - self._begin,
                **taken(self._device),
            )
        )

    def evaluation(
        self, loss: float, n_samples: int, seconds: float, metrics: Mapping[str, float]
    ) -> Record:
        """An evaluation was done; it goes into the history."""
        return self._kept(
            Record(
                "evaluation",
                self.n_epochs,
                None,
                loss,
                n_samples,
                seconds,
                **taken(self._device),
                metrics=metrics,
            )
        )

    def _kept(self, row: Record) -> Record:
        self.history.rows.append(row)
        return row


class PendingRecord:
    """Rows of batches whose losses are still on the device: they are read when the epoch has ended, so that no batch waits for that."""

    def __init__(self) -> None:
        self._rows: list[Record] = []
        self._losses: list[torch.Tensor] = []
        self._groups: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Record, loss: torch.Tensor) -> None:
        """A batch, whose loss is a tensor of shape ()."""
        self._rows.append(row)
        self._losses.append(loss.detach().double().reshape(()))
        if len(self._losses) == _TOGETHER:
            self._gather()

    def read(self) -> list[Record]:
        """All of them, with their losses. Waits for the device."""
        self._gather()
        losses = [loss for group in self._groups for loss in group.tolist()]
        rows = [
            dataclasses.replace(row, loss=loss)
            for row, loss in zip(self._rows, losses, strict=True)
        ]
        self._rows = []
        self._groups = []
        return rows

    def _gather(self) -> None:
        if self._losses:
            self._groups.append(torch.stack(self._losses))
        self._losses = []
