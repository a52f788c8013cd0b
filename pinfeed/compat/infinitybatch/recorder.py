"""Recorder: the losses of a training run as numbers, and its history."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from pinfeed.compat.infinitybatch.history import History, Record

_MOST_UNREAD = 256
"""Number of losses that stay on the device at most; each takes 512 bytes on a GPU."""


class Recorder:
    """Records losses, epochs and evaluations.

    Reading a loss waits for its device. The losses of batches are therefore read in groups.

    Attributes:
        history: The history.
        losses: Loss and number of samples of each batch, as ``losses[epoch][batch]``, since the
            last ``clear``.
        n_epochs: Number of epochs that have begun.
    """

    def __init__(self) -> None:
        self.history = History()
        self.losses: list[list[tuple[float, int]]] = []
        self.n_epochs = 0
        self._unread: list[tuple[torch.Tensor, int, float]] = []
        """Losses on the device, with the samples and seconds of their batches."""
        self._epoch_began_s = 0.0
        self._last_loss_s = 0.0

    def begin_epoch(self) -> None:
        """Begin an epoch."""
        self.read()
        self.losses.append([])
        self.n_epochs += 1
        self._epoch_began_s = self._last_loss_s = time.perf_counter()

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """Record the loss of a batch, which has one element."""
        now = time.perf_counter()
        self._unread.append((loss.detach().reshape(()), n_samples, now - self._last_loss_s))
        self._last_loss_s = now
        if len(self._unread) == _MOST_UNREAD:
            self.read()

    def read(self) -> None:
        """Wait for the device, and record the losses so far as numbers."""
        unread = self._unread
        self._unread = []
        values = torch.stack([loss.double() for loss, _, _ in unread]).tolist() if unread else []
        for value, (_, n, seconds) in zip(values, unread, strict=True):
            epoch = self.losses[-1]
            record = Record("batch", self.n_epochs - 1, len(epoch), value, n, seconds)
            self.history.rows.append(record)
            epoch.append((value, n))

    def end_epoch(self) -> Record:
        """Add the record of the epoch to the history, and return it."""
        self.read()
        epoch = self.losses[-1] if self.losses else []
        n = sum(n for _, n in epoch)
        mean = sum(loss * n for loss, n in epoch) / n if n else math.nan
        seconds = time.perf_counter() - self._epoch_began_s
        record = Record("epoch", self.n_epochs - 1, None, mean, n, seconds)
        self.history.rows.append(record)
        return record

    def add_evaluation(
        self, loss: float, n_samples: int, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Add the record of an evaluation to the history."""
        self.read()
        record = Record("evaluation", self.n_epochs, None, loss, n_samples, seconds, metrics)
        self.history.rows.append(record)

    def clear(self) -> None:
        """Clear ``losses``; the history stays."""
        self.read()
        self.losses.clear()
