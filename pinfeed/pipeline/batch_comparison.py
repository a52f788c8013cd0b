"""BatchComparison: finds the rows that each batch of an epoch shares with earlier batches."""

from __future__ import annotations

from pinfeed.pipeline.recent_rows import HashedGroups, RecentRows, SharedRowSearch, hash_groups
from pinfeed.pipeline.sources.base import HostBatch
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.turns import Turns


class BatchComparison:
    """Finds the rows that each batch of an epoch shares with earlier batches.

    Several reader threads sort and search rows at the same time. In between, they add the batches
    to the latest ones in order.

    Args:
        transfer: Transfer that writes batches.
        n_ahead: Number of batches that are prefetched.
        is_shared: Whether several threads compare batches.
    """

    def __init__(self, transfer: Transfer, n_ahead: int, *, is_shared: bool) -> None:
        self._transfer = transfer
        self._turns = Turns(is_shared=is_shared)
        self._recent: RecentRows | None = RecentRows(n_ahead)

    def restart(self, n_ahead: int) -> None:
        """Compare later batches only with each other.

        Args:
            n_ahead: Number of batches that are prefetched from now on.
        """
        self._recent = RecentRows(n_ahead)

    def close(self) -> None:
        """Free the rows of the batches."""
        self._recent = None

    def hash(self, batch: HostBatch) -> HashedGroups | None:
        """Sort the rows of a batch; return None if the batch is compared with no other."""
        if self._recent is None or not batch.groups:
            return None
        hashed = hash_groups(
            [group.rows for group in batch.groups], [group.written for group in batch.groups]
        )
        pairs = zip(batch.groups, hashed.repeated, strict=True)
        batch.groups = [group._replace(repeated=row) for group, row in pairs]
        return hashed

    def add(self, hashed: HashedGroups | None, turn: int, number: int) -> SharedRowSearch | None:
        """Add a batch in its turn, and return the search for the rows that it shares.

        Args:
            hashed: Rows of the batch; None without a batch, which takes its turn as well.
            turn: Number of the turn.
            number: Number of the batch.
        """
        self._turns.wait_for(turn)
        try:
            if hashed is None or self._recent is None:
                return None
            return self._recent.add(number, hashed, self._transfer.log.pending_batches())
        finally:
            self._turns.end()
