"""Sources: what fills a slot. Their epochs run in the readers' threads, one at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .access import Access
from .batches import RowBatches
from .devices.base import Part
from .rows import Rows
from .tree import Rebuild


@dataclass
class Load:
    """One batch that is to be brought to the device."""

    parts: Sequence[Part]
    rebuild: Rebuild
    """Makes the batch, in the structure that the user knows, from the tensors of the parts."""
    n_rows: int
    """Samples in the batch, for the statistics."""
    rows: Rows | None = None
    """Row numbers, if the parts are rows of stores."""
    checksum: int = 0
    """Of all row numbers of the epoch so far, where a resumed epoch needs one."""


class Source(Protocol):
    """Batches, epoch by epoch."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What must be the same for a saved position to mean the same batch; plain values."""
        ...

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is not known."""
        ...

    def epoch(self, number: int, start: int, checksum: int) -> Generator[Load, None, None]:
        """The batches of epoch ``number`` from batch ``start`` on."""
        ...


@dataclass(frozen=True)
class RowSource:
    """Rows of equally many in each store, in the order that ``batches`` says."""

    accesses: Sequence[Access]
    rebuild: Rebuild
    batches: RowBatches

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.batches.fingerprint

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int, checksum: int) -> Generator[Load, None, None]:
        windows, position, stop = self.batches.windows(number, start)
        with contextlib.ExitStack() as stack:
            parts = [stack.enter_context(access.serve(windows, position, stop)) for access in self.accesses]
            for rows, total in self.batches.epoch(number, start, checksum):
                yield Load([part(rows, position) for part in parts], self.rebuild, len(rows), rows, total)
                position += len(rows)


def part_nbytes(part: Part) -> int:
    """Bytes of a part."""
    return math.prod(part.shape) * part.dtype.itemsize
