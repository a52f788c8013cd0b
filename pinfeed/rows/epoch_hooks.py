"""EpochHooks: reactions of a source's batches to the position of its loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pinfeed.errors import ArgumentError


class EpochHooks:
    """Reactions of a source's batches to the position of its loop; this base class has none.

    The consumer thread calls the hooks, between batches or between epochs.
    """

    kind = "a feeder"
    """Kind of feeder that a state belongs to, for error messages."""
    state_keys: Sequence[str] = ()
    """Keys that a loaded state must have besides those of every feeder."""
    goes_on = True
    """Whether a loop that is resumed at the end of an epoch continues with the next epoch."""

    @property
    def chosen_epoch(self) -> int | None:
        """Epoch that the owner of a sampler has set for the next run, or None."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Note that the user has set the feeder to ``epoch``."""

    def follow(self, epoch: int) -> None:
        """Note that the next run is ``epoch``, because a state was loaded or a run has ended."""

    def restart(self, epoch: int) -> None:
        """Note that the next run begins at the first batch of ``epoch``."""

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the entries that a state after ``batch`` batches of ``epoch`` has in addition."""
        return {}

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        """Translate a state that was loaded into a position of this process.

        Args:
            state: State of a feeder with the same fingerprint.
            n_batches: Number of batches in an epoch; infinite if it is not known.

        Returns:
            The batch of the epoch with which the next run begins, and whether the epoch is over.

        Raises:
            ArgumentError: If an epoch has no such batch.
        """
        epoch = int(state["epoch"])
        batch = int(state["batch"])
        if not 0 <= batch <= n_batches:
            raise ArgumentError(
                f"the state is at batch {batch} of epoch {epoch}, but an epoch has {n_batches} "
                "batches"
            )
        return batch, 0 < batch == n_batches
