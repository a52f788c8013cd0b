"""LaterCopy: reads rows in sequence in the first epoch, and copies them into memory in the second.

A program with a single loop over its rows pays for no copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.readahead.resident_file import InMemoryCopy
from pinfeed.readahead.strategy import OpenBatch, ReadStrategy
from pinfeed.rows.runs import Runs
from pinfeed.rows.windows import Windows
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.host_rows import run_gather
from pinfeed.stores.store import Array


class LaterCopy(ReadStrategy):
    """Strategy of the first epoch, and a copy of all rows for later epochs.

    Args:
        store: The rows.
        first: Reads the rows in the first epoch.
        copy: The copy, which takes no physical memory before its first epoch.
        later: Reads the rows in later epochs; by default, the copy, which loads them.
    """

    def __init__(
        self,
        store: FileStore,
        first: ReadStrategy,
        copy: InMemoryCopy,
        later: ReadStrategy | None = None,
    ) -> None:
        self._store = store
        self._first = first
        self._copy = copy
        self._later = later or copy
        self._current = first
        self._is_first = True
        self.items = first.items + self._later.items

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        strategy = self._first if self._is_first else self._later
        self._is_first = False
        with strategy.open_epoch(windows, start, stop) as open_batch:
            # The last batches of an epoch may be read after it has ended.
            self._current = strategy
            yield open_batch

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments."""
        run_gather(self._store if self._current is self._first else self._copy)(runs, out)

    def memory_rows(self) -> MemoryRows | None:
        return self._copy.memory_rows()

    def for_others(self) -> ReadStrategy:
        first = self._first.for_others() or self._first
        return LaterCopy(self._store, first, self._copy, self._copy.for_others())

    @property
    def may_be_in_memory(self) -> bool:
        return self._copy.may_be_in_memory

    @property
    def may_open_ahead(self) -> bool:
        # The second epoch loads the copy, even if the loop reads only the first one.
        return self._current is self._later

    def close(self) -> None:
        self._first.close()
        self._later.close()
