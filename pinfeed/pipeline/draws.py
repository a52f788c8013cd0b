"""Draws: the batches of an epoch, drawn from their source one at a time, in order.

A source is a generator, which one thread at a time may iterate over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any, Protocol

from pinfeed.pipeline.mover import Mover
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.source import BatchThunk, HostBatch
from pinfeed.pipeline.turns import Turns

Thunks = Generator[BatchThunk, None, None]


class BatchDraws(Protocol):
    """Batches of an epoch: ``Draws``, or draws that do more for each batch."""

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        """Return the next batch, or None after the last one.

        Args:
            slot: Slot that notes the times.
            turn: Number of this call. Calls begin in the order of turns, but several threads may
                reach this function in any order.
        """

    def compare(self, n_ahead: int) -> None:
        """Compare the rows of later batches only with each other, if rows are compared at all.

        The consumer thread calls this when no slot is being filled and all write-backs are
        completed.

        Args:
            n_ahead: Number of batches that are prefetched from now on.
        """

    def close(self) -> None:
        """Close the source now, not when an error's traceback is freed."""


class Draws:
    """Batches of an epoch, for one thread.

    Args:
        mover: Mover that fills the slots.
        thunks: The batches; closed by ``close``.
    """

    def __init__(self, mover: Mover, thunks: Thunks) -> None:
        self._mover = mover
        self._now = mover.counters.now
        self._thunks = thunks

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        start = self._now()
        if self._mover.is_stopping:
            raise Cancelled
        thunk = next(self._thunks, None)
        if thunk is None:
            return None
        batch = thunk()
        slot.made_s = made_s = self._now()
        slot.source_s = made_s - start
        return batch

    def compare(self, n_ahead: int) -> None:
        """Do nothing, because the loop writes no rows that recur."""

    def close(self) -> None:
        close_unless_running(self._thunks)


def close_unless_running(generator: Generator[Any, None, None]) -> None:
    """Close the generator of a source.

    If an interrupt has cut off the wait for the reader threads, one may still run the generator.
    """
    if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:
        generator.close()


def _no_time() -> float:
    return 0.0


class SharedDraws(Draws):
    """Batches of an epoch, for several threads, which take turns, or with ``host_transform``.

    Args:
        mover: Mover that fills the slots.
        thunks: The batches; closed by ``close``.
        n_readers: Number of threads.
        take_host_s: Returns the seconds of the calls of ``host_transform`` that the source has made
            since the last call of this function.
    """

    def __init__(
        self,
        mover: Mover,
        thunks: Thunks,
        n_readers: int,
        take_host_s: Callable[[], float] = _no_time,
    ) -> None:
        super().__init__(mover, thunks)
        self._turns = Turns(is_shared=n_readers > 1)
        self._take_host_s = take_host_s

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        self._turns.wait_for(turn)
        start = self._now()
        try:
            self._mover.check_stop()
            thunk = next(self._thunks, None)
        finally:
            slot.host_transform_s = self._take_host_s()
            self._turns.end()
        if thunk is None:
            return None
        # The other threads need not wait for this work.
        batch = thunk()
        slot.made_s = self._now()
        slot.source_s = slot.made_s - start - slot.host_transform_s
        return batch
