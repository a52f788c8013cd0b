"""EpochPosition: the epoch and batch of a feeder's loop, saved to and loaded from states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pinfeed.errors import ArgumentError, logger
from pinfeed.pipeline.sources.source import Source


class EpochPosition:
    """Position of a feeder's loop, without prefetched batches. The consumer thread owns it.

    Args:
        source: Source of the batches.
        fingerprint: Plain values that a saved position must match, in addition to the source's.
    """

    def __init__(self, source: Source, fingerprint: Mapping[str, Any]) -> None:
        self._source = source
        self._fingerprint = fingerprint
        self._hooks = source.epoch_hooks
        self.epoch = 0
        """Number of the epoch."""
        self.batch = 0
        """Number of batches of the epoch that the loop has received."""
        self.checksum = 0
        """Checksum of the row indices of these batches; 0 if the source computes none."""
        self.is_at_rest = True
        """Whether the next run begins at this position.

        Otherwise the epoch is running or was left, and the next run is the following epoch.
        """
        # Epoch of a loaded state if all its batches were done; otherwise None.
        self._completed: int | None = None

    @property
    def n_batches(self) -> float:
        """Number of batches in an epoch; infinite if it is unknown."""
        try:
            return len(self._source)
        except TypeError:
            return math.inf

    @property
    def goes_on_at_end(self) -> bool:
        """Whether a run that is resumed at the end of its epoch continues with the next epoch.

        Then only the end shows that the epoch was complete when the state was saved.
        """
        return self._hooks.continues_after_end and math.isinf(self.n_batches)

    def next(self) -> tuple[int, int, int]:
        """Return epoch, batch and checksum at the beginning of the next run."""
        position = (
            (self.epoch, self.batch, self.checksum) if self.is_at_rest else (self.epoch + 1, 0, 0)
        )
        chosen = self._hooks.chosen_epoch
        return position if chosen is None or chosen == position[0] else (chosen, 0, 0)

    def begin_run(self) -> int:
        """Begin the next run; return the number of its first batch."""
        epoch, batch, checksum = self.next()
        if epoch != self.epoch + (not self.is_at_rest):
            # The owner of a sampler has chosen an epoch, which may run again from its first batch.
            self._hooks.restart(epoch)
            if self.is_at_rest:
                self._warn_if_dropped(epoch)
        self._go_to(epoch, batch, checksum)
        self.is_at_rest = False
        self._completed = None
        return batch

    def end_run(self) -> None:
        """End a run, whether its epoch is complete or not.

        The sampler is set to the next epoch now. If its epoch differs later, the user has set it.
        """
        if self._hooks.chosen_epoch is None:
            self._hooks.epoch_changed(self.next()[0])

    def complete_epoch(self) -> None:
        """Go to the first batch of the next epoch."""
        self._go_to(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next run; a loaded position in this epoch stays."""
        if not (self.is_at_rest and epoch == self.epoch):
            if self.is_at_rest:
                self._warn_if_dropped(epoch)
            self._go_to(epoch)
            self._hooks.restart(epoch)
        self._hooks.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """Return the position as plain values."""
        position = (self.epoch, self.batch, self.checksum)
        epoch, batch, checksum = self.next() if self.is_at_rest else position
        state = {
            "epoch": epoch,
            "batch": batch,
            "checksum": checksum,
            "source": {**self._source.fingerprint, **self._fingerprint},
        }
        return {**state, **self._hooks.state(epoch, batch)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Make the next run continue at a saved position.

        Raises:
            ArgumentError: If ``state`` is no state, or the state of another source. The position
                has not changed then.
        """
        epoch, batch, checksum = self.check(state)
        batch, is_complete = self._hooks.resume(state, self.n_batches)
        self._completed = epoch if is_complete else None
        if is_complete:
            self._go_to(epoch + 1)
        else:
            self._go_to(epoch, batch, checksum)
        self._hooks.epoch_changed(self.epoch)

    def check(self, state: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return epoch, batch and checksum of a state.

        Raises:
            ArgumentError: If ``state`` is no state, or the state of another source.
        """
        try:
            epoch, batch, checksum = (int(state[key]) for key in ("epoch", "batch", "checksum"))
            theirs = dict(state["source"])
            for key in self._hooks.state_keys:
                state[key]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of {self._hooks.kind} ({error!r}); expected the return value of "
                "state_dict()"
            ) from None
        ours = {**self._source.fingerprint, **self._fingerprint}
        differing = [
            f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}"
            for key in {**ours, **theirs}
            if theirs.get(key) != ours.get(key)
            and not (key in self._hooks.changeable and key in theirs)
        ]
        if differing:
            raise ArgumentError(
                f"the state is of another feeder: {'; '.join(differing)}; make the feeder with the "
                "same arguments as when the state was saved"
            )
        if min(epoch, checksum) < 0:
            raise ArgumentError(
                f"a state of epoch {epoch}, batch {batch}; an epoch has {self.n_batches} batches"
            )
        return epoch, batch, checksum

    def _go_to(self, epoch: int, batch: int = 0, checksum: int = 0) -> None:
        """Make the next run begin at a batch of ``epoch``, by default the first one."""
        self.epoch = epoch
        self.batch = batch
        self.checksum = checksum
        self.is_at_rest = True

    def _warn_if_dropped(self, epoch: int) -> None:
        """Warn if a loaded position is dropped, because the next run is another epoch."""
        if epoch == self._completed:
            logger.warning(
                "epoch %d runs again, although the loaded state was saved after its last batch",
                epoch,
            )
        elif self.batch:
            logger.warning(
                "epoch %d begins at its first batch; the loaded position, batch %d of epoch %d, is "
                "dropped",
                epoch,
                self.batch,
                self.epoch,
            )
