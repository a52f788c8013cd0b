"""RowBatches: the row indices of an epoch, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Places
from pinfeed.rows.windows import Windows


class RowIndices(NamedTuple):
    """Row indices of one batch, or of several consecutive batches that are gathered together."""

    n_rows: int
    """Number of rows in all of the batches."""
    batches: Sequence[tuple[int, int]]
    """For each batch the number of rows, and a checksum of the epoch's row indices up to its end.

    The checksum is 0 if a resumed epoch needs none.
    """
    rows: Callable[[], Rows]
    """Computes the row indices, shape (n_rows,). Any thread may call it."""
    places: Places | None = None
    """Places of the rows of packed batches in their sequences; None for whole rows."""
    n_positions: int | None = None
    """Positions of the order that the batches of all ranks take; None for one for each row."""


class EpochHooks:
    """Reactions of a source's batches to the position of its loop; this base class has none.

    The consumer thread calls the hooks, between batches or between epochs.
    """

    kind = "a feeder"
    """Kind of feeder that a state belongs to, for error messages."""
    state_keys: Sequence[str] = ()
    """Keys that a loaded state must have besides those of every feeder."""
    changeable: Sequence[str] = ()
    """Keys of the fingerprint whose values may differ from those of a loaded state."""
    continues_after_end = True
    """Whether a loop that is resumed at the end of an epoch continues with the next epoch."""

    @property
    def chosen_epoch(self) -> int | None:
        """Epoch that the owner of a sampler has set for the next run, or None."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Note that the user has set the feeder to ``epoch``."""

    def epoch_changed(self, epoch: int) -> None:
        """Note that the next run is ``epoch``, because a state was loaded or a run has ended."""

    def restart(self, epoch: int) -> None:
        """Note that the next run begins at the first batch of ``epoch``."""

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the entries that a state after ``batch`` batches of ``epoch`` has in addition."""
        return {}

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        """Translate a state that was loaded into a position of this process.

        Args:
            state: State of a feeder with the same fingerprint, ``changeable`` keys excepted.
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


class RowBatches(EpochHooks, ABC):
    """The batches of every epoch, as row indices."""

    @property
    def is_distinct(self) -> bool:
        """Whether the batches are known to have each row at most once per epoch."""
        return False

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly if a saved position stands for the same batch."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: If the number is not known.
        """

    def n_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch, which other ranks may have begun.

        Raises:
            TypeError: If the number is not known.
        """
        return len(self)

    @abstractmethod
    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        """Yield the batches of an epoch in order; the row indices are computed later.

        Args:
            number: Number of the epoch.
            start: Number of the first batch to yield.
            checksum: Checksum that a state has for the batches before ``start``.
            batches_per_slot: Maximum number of batches per yielded item.
        """

    @abstractmethod
    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        """Return the windows of an epoch, or None, and the range of positions that it reads.

        Args:
            number: Number of the epoch.
            start: Number of the first batch.

        Returns:
            The windows, the first position, and the position after the last one.
        """
