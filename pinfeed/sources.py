"""Sources: what fills a slot. Their epochs run in the reader's thread."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from .batches import RowBatches
from .devices.base import Part
from .rows import Rows
from .stores.base import Store
from .tree import Rebuild

# Rows are gathered in steps, and a loop that ends waits for one step at most: some milliseconds from memory, and less than a second
# from a disk that seeks 20,000 times a second.
_STEP_BYTES, _STEP_ROWS = 16 << 20, 1 << 13


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


class StoreRows:
    """The rows of one store that a batch wants."""

    __slots__ = ("dtype", "rows", "shape", "store")

    def __init__(self, store: Store, rows: Rows) -> None:
        self.store, self.rows = store, rows
        self.shape, self.dtype = (len(rows), *store.row_shape), store.dtype

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Gather the rows into ``out``, step by step."""
        step = max(1, min(_STEP_ROWS, _STEP_BYTES * len(out) // max(1, out.nbytes)))
        for i in range(0, len(out), step):
            self.store.gather(self.rows[i : i + step], out[i : i + step])
            yield


@dataclass(frozen=True)
class RowSource:
    """Rows of stores of equal length, in the order that ``batches`` says."""

    stores: Sequence[Store]
    rebuild: Rebuild
    batches: RowBatches

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.batches.fingerprint

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int, checksum: int) -> Generator[Load, None, None]:
        for rows, total in self.batches.epoch(number, start, checksum):
            yield Load([StoreRows(store, rows) for store in self.stores], self.rebuild, len(rows), rows, total)


def part_nbytes(part: Part) -> int:
    """Bytes of a part."""
    return math.prod(part.shape) * part.dtype.itemsize
