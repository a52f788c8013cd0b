"""ComparedDraws: draws of a loop that writes rows back, with the rows that batches share."""

from __future__ import annotations

from pinfeed.pipeline.draws import Draws
from pinfeed.pipeline.mover import Writer
from pinfeed.pipeline.recent_rows import HashedGroups, RecentRows, SharedRowSearch, hash_groups
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.pipeline.turns import Turns


class ComparedDraws:
    """Finds the rows that each batch of an epoch shares with earlier batches.

    Several reader threads sort and search rows at the same time. In between, they add the batches
    to the latest ones in order.

    Args:
        draws: The batches.
        writer: Writer of the loop.
        first: Number of the first batch.
        schedule: Number of batches that are prefetched, and of reader threads.
    """

    def __init__(
        self, draws: Draws, writer: Writer, first: int, schedule: PrefetchSchedule
    ) -> None:
        self._draws = draws
        self._writer = writer
        self._now = writer.counters.now
        self._first = first
        self._turns = Turns(is_shared=schedule.n_readers > 1)
        self._recent: RecentRows | None = RecentRows(schedule.depth)

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        hashed: HashedGroups | None = None
        search: SharedRowSearch | None = None
        try:
            batch = self._draws.make(slot, turn)
            if batch is not None:
                hashed = self._hash(batch)
        finally:
            # After an error, too, this call takes its turn, because the next one waits for it.
            search = self._add(hashed, turn)
        if batch is not None and search is not None:
            batch.shared = search.find()
            now = self._now()
            slot.source_s += now - slot.made_s
            slot.made_s = now
        return batch

    def compare(self, n_ahead: int) -> None:
        self._recent = RecentRows(n_ahead)

    def close(self) -> None:
        self._recent = None
        self._draws.close()

    def _hash(self, batch: HostBatch) -> HashedGroups | None:
        """Sort the rows of a batch; return None if the batch is compared with no other."""
        if self._recent is None or not batch.groups:
            return None
        hashed = hash_groups(
            [group.rows for group in batch.groups], [group.written for group in batch.groups]
        )
        pairs = zip(batch.groups, hashed.repeated, strict=True)
        batch.groups = [group._replace(repeated=row) for group, row in pairs]
        return hashed

    def _add(self, hashed: HashedGroups | None, turn: int) -> SharedRowSearch | None:
        """Add a batch in its turn, and return the search for the rows that it shares.

        Args:
            hashed: Rows of the batch; None without a batch, which takes its turn as well.
            turn: Number of the turn.
        """
        self._turns.wait_for(turn)
        try:
            if hashed is None or self._recent is None:
                return None
            number = self._first + turn
            return self._recent.add(number, hashed, self._writer.log.pending_batches())
        finally:
            self._turns.end()
