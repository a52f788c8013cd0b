"""ReadPlan: how the rows of each store are read, and the sentences that say so."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.readahead.strategy import ReadStrategy
from pinfeed.rows.orders import Rows
from pinfeed.rows.packing import Places
from pinfeed.rows.windows import Window, Windows, WrappedWindows
from pinfeed.stores.host_rows import Gatherable, run_gather
from pinfeed.stores.ragged import RaggedParts, RaggedStore

# Sources that are read alike have one note each if they are at most this many.
_MOST_NOTES = 4
_N_NAMED = 3

OpenRaggedBatch = Callable[[int, int], Callable[[Rows, Places | None], RaggedParts]]
"""Takes the position of a batch and its number of rows, as ``OpenBatch``; returns its parts."""


@dataclass(frozen=True)
class ReadPlan:
    """Read strategies of all stores."""

    strategies: Sequence[ReadStrategy]
    notes: tuple[str, ...]
    """Sentences with the strategy for each file, and the reason for it; see ``notes_of``."""
    ragged: Sequence[RaggedReads] = ()
    """Method of reading the rows of each ragged store."""
    resident: tuple[Allocation, ...] = ()
    """Memory of the stores in addition to their rows, if it is not counted elsewhere."""

    @property
    def items(self) -> tuple[Allocation, ...]:
        """Most memory that the strategies use."""
        found = [one.items for one in self.strategies] + [one.items for one in self.ragged]
        return self.resident + tuple(itertools.chain.from_iterable(found))

    @property
    def closes(self) -> list[Callable[[], None]]:
        """Functions that free the memory of each strategy."""
        return [one.close for one in self.strategies] + [one.close for one in self.ragged]


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
            windows = _ItemWindows(windows, self.store.offsets)
        with self._strategy.open_epoch(windows, start, stop) as open_batch:

            def open_ragged(position: int, n: int) -> Callable[[Rows, Places | None], RaggedParts]:
                # This starts reading the next window.
                open_batch(position, n)
                return functools.partial(self.store.batch_parts, self._gather)

            yield open_ragged

    def close(self) -> None:
        """Free the memory of the strategy."""
        self._strategy.close()


@dataclass(frozen=True)
class _ItemWindows(WrappedWindows):
    """Windows whose runs are items of ragged rows."""

    offsets: Rows

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        for window in self.windows.needed(start, stop):
            found = [(self.offsets.item(a), self.offsets.item(b)) for a, b in window.runs]
            yield window._replace(runs=[(a, b) for a, b in found if a < b])


class ReadNote(NamedTuple):
    """Reason for the way in which the rows of a source are read."""

    label: str
    nbytes: int
    reason: str


def notes_of(reads: Iterable[ReadNote]) -> tuple[str, ...]:
    """Return a note for each source, and one note for many sources that are read alike."""
    alike: dict[str, list[ReadNote]] = {}
    for read in reads:
        alike.setdefault(read.reason, []).append(read)
    return tuple(
        f"{sources}: {reason}" for reason, group in alike.items() for sources in _sources(group)
    )


def _sources(group: Sequence[ReadNote]) -> list[str]:
    """Return the names and sizes of the sources of each note."""
    if len(group) <= _MOST_NOTES:
        return [f"{label}, {human(nbytes)}" for label, nbytes, _ in group]
    named = ", ".join(read.label for read in group[:_N_NAMED])
    sizes = {read.nbytes for read in group}
    size = "up to " * (len(sizes) > 1) + human(max(sizes))
    return [f"{named} and {len(group) - _N_NAMED} more, {size} each"]
