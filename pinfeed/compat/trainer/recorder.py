"""Recorder: measures a training run; PartialEpoch: its progress, with which a run resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pinfeed.compat.trainer.history import History, Record
from pinfeed.errors import ArgumentError
from pinfeed.feeders.loader_feeder import STATE_METHODS
from pinfeed.memory.host import resident_bytes
from pinfeed.tensors import rng_state

_STACKED_LOSSES = 256
"""Number of losses that share a tensor; a separate tensor takes 512 bytes on a GPU."""


@dataclass
class PartialEpoch:
    """Progress of an epoch; all zero at its beginning.

    Attributes:
        n_batches: Number of batches that the loop has received.
        n_backward: Number of backward passes whose losses are in ``loss``.
        n_samples: Number of samples of these backward passes.
        loss: Sum of their losses, each times its number of samples.
        has_ended: Whether the loader was resumed after the last batch of the epoch, and would begin
            the next one; None if only its next batch can show this.
    """

    n_batches: int = 0
    n_backward: int = 0
    n_samples: int = 0
    loss: float = 0.0
    has_ended: bool | None = False


class Recorder:
    """Measures epochs, one after the other, without waiting for the device.

    The losses of batches stay on the device until their epoch has ended.

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
        self._unread: list[Record] = []
        """Records of batches whose losses are still on the device."""
        self._losses: list[torch.Tensor] = []
        self._stacks: list[torch.Tensor] = []
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
        """Record a backward pass, whose loss has one element."""
        self.loss = loss
        if not self.is_recording:
            return
        now = time.perf_counter()
        seconds = now - self._last_batch_s
        self._last_batch_s = now
        batch = self.done.n_backward + len(self._unread)
        self._unread.append(self._record("batch", self.epoch, math.nan, n_samples, seconds, batch))
        self._losses.append(loss.detach().double().reshape(()))
        if len(self._losses) == _STACKED_LOSSES:
            self._stack()

    def read(self) -> None:
        """Wait for the device, and add the records of the batches so far to the history."""
        self._stack()
        losses = [loss for stack in self._stacks for loss in stack.tolist()]
        records = self._unread
        self._unread = []
        self._stacks = []
        for record, loss in zip(records, losses, strict=True):
            self.history.rows.append(dataclasses.replace(record, loss=loss))
            self.done.n_backward += 1
            self.done.n_samples += record.samples
            # Not sum(), which compensates rounding and could not be continued.
            self.done.loss += loss * record.samples

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
        record = self._record("epoch", self.epoch, loss, done.n_samples, seconds)
        self.history.rows.append(record)
        self.epoch = self.n_epochs
        self.done = PartialEpoch()
        return record

    def evaluation(
        self, loss: float, n_samples: int, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Add the record of an evaluation to the history."""
        record = self._record("evaluation", self.n_epochs, loss, n_samples, seconds)
        self.history.rows.append(dataclasses.replace(record, metrics=metrics))

    def _record(
        self,
        kind: Literal["batch", "epoch", "evaluation"],
        epoch: int,
        loss: float,
        n_samples: int,
        seconds: float,
        batch: int | None = None,
    ) -> Record:
        """Return a record with the current memory use, without waiting for the device."""
        host = resident_bytes()
        parts = [host[name] for name in ("anonymous", "file", "shared")]
        known = [nbytes for nbytes in parts if nbytes is not None]
        on_gpu = self._device.type == "cuda"
        return Record(
            kind,
            epoch,
            batch,
            loss,
            n_samples,
            seconds,
            allocated_bytes=torch.cuda.memory_allocated(self._device) if on_gpu else None,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
            host_bytes=sum(known) if len(known) == len(parts) else None,
        )

    def _stack(self) -> None:
        if self._losses:
            self._stacks.append(torch.stack(self._losses))
        self._losses = []


def has_state(loader: Any) -> bool:
    """Return whether a loader can save and load its position."""
    return all(callable(getattr(loader, name, None)) for name in STATE_METHODS)


def load_position(loader: Any, state: Any, done: PartialEpoch) -> None:
    """Load a position into a loader, and note in ``done`` whether the epoch has ended.

    After the last batch of an epoch, a Feeder and a loop over ``train_rows`` resume with the next
    epoch. Other loaders resume with an epoch without batches.

    Args:
        loader: The loader.
        state: State of the loader; None if it has none.
        done: Progress of the epoch.

    Raises:
        ArgumentError: If the loader of the save had a state and this one has not, or vice versa.
    """
    if has_state(loader) != (state is not None):
        then, now = ("a", "no") if state is not None else ("no", "a")
        raise ArgumentError(
            f"the Trainer was saved with a loader that had {then} state_dict(), and "
            f"loader={loader!r} has {now} state_dict(); expected the same kind of loader"
        )
    if state is None:
        return
    loader.load_state_dict(state)
    counts_epochs = isinstance(state, Mapping) and {"epoch", "batch", "checksum"} <= set(state)
    if counts_epochs and done.n_batches and not done.has_ended:
        done.has_ended = loader.epoch != state["epoch"]
        if not done.has_ended:
            try:
                len(loader)
            except TypeError:
                done.has_ended = None


def remaining_batches(loader: Any, done: PartialEpoch) -> Iterable[Any]:
    """Return the batches that remain in an epoch."""
    if done.has_ended or (done.has_ended is None and _begins_next_epoch(loader)):
        return ()
    batches: Iterable[Any] = iter(loader)
    return batches


def _begins_next_epoch(loader: Any) -> bool:
    """Return whether the next batch of a loader that counts its epochs is in another epoch.

    Afterwards, the loader and the random generators are as before.
    """
    epoch = loader.epoch
    state = loader.state_dict()
    random = rng_state.capture()
    with contextlib.closing(iter(loader)) as batches:
        next(batches, None)
        begins_next: bool = loader.epoch != epoch
    loader.load_state_dict(state)
    rng_state.restore(random)
    return begins_next
