"""RaggedReads: a method of reading ragged rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pinfeed.memory.plan import Allocation
from pinfeed.readahead.strategy import ReadStrategy
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.host_rows import Gatherable, run_gather
from pinfeed.stores.ragged import RaggedParts, RaggedStore

OpenRaggedBatch = Callable[[int, int], Callable[[Rows], RaggedParts]]
"""Takes the position of a batch and its number of rows, as ``OpenBatch``; returns its parts."""


class RaggedReads:
    """Method of reading ragged rows: the strategy of their items, in terms of rows.

    Args:
        store: The ragged rows.
        strategy: Strategy of the items.
        source: Rows of the strategy from which runs are gathered.
    """

    def __init__(self, store: RaggedStore, strategy: ReadStrategy, source: Gatherable) -> None:
        self.store = store
        self.items: tuple[Allocation, ...] = strategy.items
        self._strategy = strategy
        self._gather = run_gather(source)

    @property
    def hint(self) -> str:
        """Advice, in whole sentences, for a loop that waits for these rows."""
        return self._strategy.hint

    @contextlib.contextmanager
    def open_epoch(
        self, windows: Windows | None, start: int, stop: int
    ) -> Iterator[OpenRaggedBatch]:
        """Serve the positions [start, stop) of an epoch, like ``ReadStrategy.open_epoch``."""
        if windows is not None:
            windows = _ItemWindows(
                windows.order, windows.n_rows, windows.epoch, windows.pieces, self.store.offsets
            )
        with self._strategy.open_epoch(windows, start, stop) as open_batch:

            def open_ragged(position: int, n: int) -> Callable[[Rows], RaggedParts]:
                # This starts reading the next window.
                open_batch(position, n)
                return functools.partial(self.store.parts, gather=self._gather)

            yield open_ragged

    def close(self) -> None:
        """Free the memory of the strategy."""
        self._strategy.close()


@dataclass(frozen=True)
class _ItemWindows(Windows):
    """Windows whose runs are items of ragged rows."""

    offsets: Rows

    def runs(self, number: int) -> list[tuple[int, int]]:
        """Return the items of a window, as runs [start, stop) in ascending order."""
        found = [
            (self.offsets.item(start), self.offsets.item(stop))
            for start, stop in super().runs(number)
        ]
        return [(start, stop) for start, stop in found if start < stop]
