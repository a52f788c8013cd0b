"""ReadStrategy: how the rows of one store come to where they are gathered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import HostArray
from pinfeed.memory.plan import Allocation
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows


class RowPart(HostArray, Protocol):
    """Rows of a store, while they still are where they come from."""

    def cut(self, begin: int, end: int) -> RowPart:
        """Rows [begin, end) of these."""
        ...


Serve = Callable[[int, int], Callable[[Rows], RowPart]]
"""Given a position of the epoch and a number of rows, what makes a part of these rows.

Called in the order of positions.
"""

# Rows are gathered in steps, and a loop that ends waits for one step at most: some milliseconds
# from memory, and less than a second from a disk that seeks 20,000 times a second.
_STEP_BYTES, _STEP_ROWS = 16 << 20, 1 << 13


class Gatherable(Protocol):
    """Rows that can be gathered: what a part needs of a Store."""

    @property
    def row_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def gather(self, rows: Rows, out: npt.NDArray[Any]) -> None: ...


class StoreRows:
    """The rows of one store that a batch wants."""

    __slots__ = ("dtype", "rows", "shape", "store")

    def __init__(self, store: Gatherable, rows: Rows) -> None:
        self.store = store
        self.rows = rows
        self.shape = (len(rows), *store.row_shape)
        self.dtype = store.dtype

    def cut(self, begin: int, end: int) -> StoreRows:
        """Rows [begin, end) of these."""
        return StoreRows(self.store, self.rows[begin:end])

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Gather the rows into ``out``, step by step."""
        step = max(1, min(_STEP_ROWS, _STEP_BYTES * len(out) // max(1, out.nbytes)))
        for i in range(0, len(out), step):
            self.store.gather(self.rows[i : i + step], out[i : i + step])
            yield


class ReadStrategy(Protocol):
    """How the rows of one store are read.

    Belongs to a feeder; threads of its own live as long as an epoch.
    """

    @property
    def items(self) -> tuple[Allocation, ...]:
        """Memory that it takes, at most."""
        ...

    def open_epoch(
        self, windows: Windows | None, start: int, stop: int
    ) -> AbstractContextManager[Serve]:
        """Serve the positions [start, stop) of an epoch. What runs in the background ends with the context."""
        ...

    @property
    def hint(self) -> str:
        """What to change where a loop waits for these rows, in whole sentences."""
        ...

    def close(self) -> None:
        """Free its memory."""


IN_MEMORY = "The rows are in memory: a smaller dtype leaves less to copy (uint8 or float16, converted on the device), and more cores copy faster."
"""What to change where rows that are in memory do not come fast enough."""


class DirectReads:
    """Rows are gathered from the store itself.

    Args:
        store: Has the rows.
        hint: What to change where they do not come fast enough.
    """

    items: tuple[Allocation, ...] = ()

    def __init__(self, store: Gatherable, hint: str = IN_MEMORY) -> None:
        self._store = store
        self.hint = hint

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[Serve]:
        yield lambda position, n: functools.partial(StoreRows, self._store)

    def close(self) -> None:
        """There is nothing."""
