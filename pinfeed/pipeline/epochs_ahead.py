"""EpochsAhead: the epochs of a continuous loop, which reads the next one before an epoch ends.

The draws and the threads of the loop stay, and the calls that fill slots are numbered on. In the
turn after an epoch's last slot, the source ends the epoch and opens the next one. Thus one epoch of
the source is open at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from pinfeed.pipeline.draws import Thunks
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import Source


class EpochsAhead:
    """Epochs of a loop that reads the first batches of the next epoch before it ends one.

    Args:
        source: Source of the batches.
        first: Epoch, first batch, and checksum of the batches before it.
        schedule: Schedule of the loop.
    """

    def __init__(
        self, source: Source, first: tuple[int, int, int], schedule: PrefetchSchedule
    ) -> None:
        self._source = source
        self._batches_per_slot = schedule.batches_per_slot
        self.fill_epoch: Callable[[int, int, int], None] = lambda epoch, turn, n_ahead: None
        """Makes later calls fill slots with another epoch, given its number, the number of its
        first call, and the number of epochs until then (consumer)."""
        self._first = first
        # The epoch that the loop receives, and the one that the next call of a reader fills.
        self._received = self._filled = first[0]
        # Slots that the loop has not received yet, of its epoch and of each later one.
        self._n_first = self._n_slots(*first[:2])
        self._n_left = deque([self._n_first])
        # Later epochs that the readers have not opened yet.
        self._to_open: deque[int] = deque()
        # Version of the rows when a reader opened a later epoch.
        self._versions: dict[int, object] = {}

    def thunks(self) -> Thunks:
        """Yield the batches of all epochs, which readers take in the order of their turns."""
        yield from self._source.epoch(*self._first, self._batches_per_slot)
        while self._to_open:
            epoch = self._to_open.popleft()
            self._versions[epoch] = self._source.rows_version()
            yield from self._source.epoch(epoch, 0, 0, self._batches_per_slot)

    def turns(self) -> Iterator[int]:
        """Yield the number of each call that fills a slot, and begin epochs (consumer)."""
        turn = 0
        n_slots = self._n_first
        while n_slots:
            yield from range(turn, turn + n_slots)
            turn += n_slots
            n_slots = self._fill_next(turn)
        # These calls find that the epoch has ended.
        yield from itertools.count(turn)

    def next_slot(self, next_slot: Callable[[], Slot | None]) -> Slot | None:
        """Return the next slot of the epoch, or None after its last one (consumer)."""
        if not self._n_left[0]:
            return None
        self._n_left[0] -= 1
        return next_slot()

    @property
    def has_read_ahead(self) -> bool:
        """Whether the epoch has ended, and readers fill slots with a later one."""
        return len(self._n_left) > 1 and not self._n_left[0]

    def is_next(self, epoch: int) -> bool:
        """Return whether an epoch is the next one, and its rows have not changed (consumer).

        Args:
            epoch: Number of the epoch.
        """
        if epoch != self._received + 1:
            return False
        # A reader may have opened the previous epoch late, after this function was called for it.
        self._versions.pop(self._received, None)
        # No rows were read yet if no reader has opened the epoch.
        version = self._versions.pop(epoch, None)
        return version is None or version == self._source.rows_version()

    def begin_next(self) -> None:
        """Note that the loop receives the next epoch from now on (consumer)."""
        self._received += 1
        self._n_left.popleft()

    def _fill_next(self, turn: int) -> int:
        """Let later calls fill slots with the next epoch; return its number of slots.

        Args:
            turn: Number of the first of these calls.

        Returns:
            0 if the loop must not continue.
        """
        n_slots = self._n_slots(self._filled + 1, 0)
        if not (n_slots and self._source.may_open_ahead):
            return 0
        self._filled += 1
        self._n_left.append(n_slots)
        self._to_open.append(self._filled)
        self.fill_epoch(self._filled, turn, self._filled - self._received)
        return n_slots

    def _n_slots(self, epoch: int, batch: int) -> int:
        return -(-(self._source.n_batches(epoch) - batch) // self._batches_per_slot)
