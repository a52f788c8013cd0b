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
from pinfeed.readahead.strategy import DirectReads, ReadStrategy
from pinfeed.readahead.windows import WindowBatch
from pinfeed.rows.length_batches import most_in_blocks
from pinfeed.rows.orders import Rows
from pinfeed.rows.packing import Places
from pinfeed.rows.windows import Window, Windows, WrappedWindows
from pinfeed.stores.host_rows import RunGather, run_gather
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


class PartReads(NamedTuple):
    """Method of reading one part of the items of ragged rows."""

    strategy: ReadStrategy
    gather: RunGather
    """Gathers runs of the items, unless the strategy has windows for a batch."""


class RaggedReads:
    """Method of reading ragged rows: the strategies of the parts of their items, in terms of rows.

    Args:
        store: The ragged rows.
        parts: Method of reading each part.
    """

    def __init__(self, store: RaggedStore, parts: Sequence[PartReads]) -> None:
        self.store = store
        self.items: tuple[Allocation, ...] = tuple(
            itertools.chain.from_iterable(part.strategy.items for part in parts)
        )
        self._parts = parts

    @classmethod
    def direct(cls, store: RaggedStore) -> RaggedReads:
        """Return the method that gathers all items straight from their stores."""
        return cls(store, [PartReads(DirectReads(one), run_gather(one)) for one in store.parts])

    @property
    def may_open_ahead(self) -> bool:
        """Whether the next epoch may be opened early, like ``ReadStrategy.may_open_ahead``."""
        return all(part.strategy.may_open_ahead for part in self._parts)

    @contextlib.contextmanager
    def open_epoch(
        self, windows: Windows | None, start: int, stop: int
    ) -> Iterator[OpenRaggedBatch]:
        """Serve the positions [start, stop) of an epoch, like ``ReadStrategy.open_epoch``."""
        if windows is not None:
            windows = RaggedWindows(windows, self.store)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(part.strategy.open_epoch(windows, start, stop))
                for part in self._parts
            ]

            def open_ragged(position: int, n: int) -> Callable[[Rows, Places | None], RaggedParts]:
                # This starts reading the next window.
                opened = [serve(position, n) for serve in serving]
                gathers = [
                    one.gather_runs if isinstance(one, WindowBatch) else part.gather
                    for one, part in zip(opened, self._parts, strict=True)
                ]
                return functools.partial(self.store.batch_parts, gathers)

            yield open_ragged

    def close(self) -> None:
        """Free the memory of the strategies."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.strategy.close)


@dataclass(frozen=True)
class RaggedWindows(WrappedWindows):
    """Windows whose runs are items of ragged rows; windows without items are left out."""

    store: RaggedStore

    @functools.cached_property
    def window_rows(self) -> int:
        """Most items of a window: those of its longest rows or blocks, if it had them all."""
        most = self.store.row_lengths.most_elements(self.windows.window_rows)
        if self.windows.n_blocks:
            blocks = self.windows.n_blocks, self.windows.block_rows
            most = min(most, most_in_blocks(self.store.offsets, *blocks))
        return most

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        offsets = self.store.offsets
        for window in self.windows.needed(start, stop):
            found = [(offsets.item(a), offsets.item(b)) for a, b in window.runs]
            runs = [(a, b) for a, b in found if a < b]
            if runs:
                yield window._replace(runs=runs)


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
