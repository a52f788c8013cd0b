"""ReadPlan: how the rows of each store are read, and the sentences that say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.readahead.ragged import RaggedReads
from pinfeed.readahead.strategy import ReadStrategy

# Sources that are read alike have one note each if they are at most this many.
_MOST_NOTES = 4
_N_NAMED = 3


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
