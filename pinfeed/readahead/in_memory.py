"""InMemoryCopy: a copy of all rows of a file, loaded during the first epoch."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.memory.pages import block_nbytes, huge
from pinfeed.memory.plan import Allocation
from pinfeed.readahead.base import Choice, FreeMemory
from pinfeed.readahead.whole_file import WholeFile
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import FileStore
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.remote import RemoteStore


class InMemoryCopy(WholeFile):
    """Strategy that keeps a copy of all rows of a read-only store in memory.

    A file that was written after the load is loaded again before the next epoch.

    Args:
        store: The rows.

    Raises:
        MemoryError: If the system does not have enough memory.
    """

    def __init__(self, store: FileStore) -> None:
        # Decoding a row decodes its whole chunk, and a request for a row takes as long as one for
        # many rows, so readers wait until the chunk is loaded instead.
        super().__init__(store, waits=isinstance(store, (ChunkedStore, RemoteStore)))
        self.items = (copy_allocation(store),)
        nbytes = store.n_rows * store.row_nbytes
        array: npt.NDArray[Any] = (
            huge(nbytes)[:nbytes].view(store.dtype).reshape(store.n_rows, *store.row_shape)
        )
        self._array = array
        self._rows = ArrayStore(array)
        self._version: object = None

    def close(self) -> None:
        """Free the memory; a gather that is running keeps it until it ends."""
        super().close()
        del self._array, self._rows

    def _find_loaded(self) -> None:
        """Forget the loaded rows if the file has changed."""
        version = self._store.version
        if version != self._version:
            self._version = version
            self._is_loaded[:] = False

    def _load(self, start: int, stop: int) -> None:
        self._store.gather(np.arange(start, stop), self._array[start:stop])


def copied(store: FileStore, share: float, free: FreeMemory, verb: str) -> Choice | None:
    """Return a copy of all rows, and the reason for it; None if it is not worth it or does not fit.

    Args:
        store: The rows, which are read-only.
        share: Share of the rows that an epoch reads.
        free: Memory that may be used.
        verb: Past participle of the verb for the reason, such as ``"loaded"``.
    """
    if share <= 0.5 or copy_allocation(store).total > free.memory:
        return None
    # The system may refuse memory that it reports as free.
    with contextlib.suppress(MemoryError):
        reason = f"{verb} into RAM during the first epoch (it fits in {free.origin})"
        return InMemoryCopy(store), reason
    return None


def copy_allocation(store: FileStore) -> Allocation:
    """Return the memory of a copy of all rows."""
    return Allocation("rows of a file", "host", 1, block_nbytes(store.n_rows * store.row_nbytes))
