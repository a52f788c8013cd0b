"""RaggedSizes: bytes of the batches of a ragged store, at most and as reserved in advance."""

from __future__ import annotations

from typing import Any

from pinfeed.rows.orders import most_copies
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.stores.ragged import RaggedStore


class RaggedSizes:
    """Bytes of the two arrays of a batch of ragged rows, as a function of its number of rows.

    With limits, or with batches that are bounded by elements, every batch reserves memory for the
    largest batch. Without either, one very long row would multiply the memory of all batches.
    Batches then reserve memory for a usual batch, which grows if a larger batch occurs.

    Args:
        store: The ragged rows.
        rows: An order, or any other iterable of row indices or batches.
        is_limited: Whether there are memory limits.
    """

    def __init__(self, store: RaggedStore, rows: Any, *, is_limited: bool) -> None:
        self._store = store
        self._max_elements = None
        self._copies = most_copies(rows)
        if isinstance(rows, ElementBatches):
            is_padded = store.layout == "padded"
            self._max_elements = rows.most_elements(store.lengths, padded=is_padded)
            self._copies = most_copies(rows.order)
        self._is_exact = is_limited or self._max_elements is not None

    def most(self, n_rows: int) -> tuple[int, int]:
        """Return the most bytes that the memory of each array of a batch may have."""
        found = self._most(n_rows)
        if self._is_exact:
            return found
        # Memory that grows is rounded up by at most a sixteenth.
        items, bounds = found
        return items + -(-items // 16), bounds + -(-bounds // 16)

    def reserved(self, n_rows: int) -> tuple[int, int]:
        """Return the bytes of each array that every batch reserves in advance."""
        items, bounds = self._most(n_rows)
        if not self._is_exact:
            items = min(items, self._store.usual_nbytes(n_rows))
        return items, bounds

    def _most(self, n_rows: int) -> tuple[int, int]:
        return self._store.batch_nbytes(
            n_rows, copies=self._copies, max_elements=self._max_elements
        )
