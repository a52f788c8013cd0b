"""MappedFile: gathers rows of files from memory maps, and loads their pages ahead."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.memory.plan import Allocation
from pinfeed.readahead.whole_file import WholeFile
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.mapped_file import MappedFileStore
from pinfeed.stores.sharded_file import AnyShardedStore


class MappedFile(WholeFile):
    """Strategy that gathers the rows of local files from the page cache, without copying the files.

    Args:
        store: The rows.
        in_sequence: Whether consecutive batches have consecutive rows.
        counted: Stores whose files are counted elsewhere. Bytes that the store shares with them, as
            inputs and targets of one file do, are in the page cache only once.

    Raises:
        OSError: If the system has no address space for the maps, or a file has changed.
    """

    _readers_load = False
    _rows: MappedFileStore

    def __init__(
        self,
        store: LocalFileStore,
        *,
        in_sequence: bool,
        counted: Sequence[AnyShardedStore] = (),
    ) -> None:
        super().__init__(store, waits=in_sequence)
        nbytes = store.nbytes_beside(counted)
        if nbytes:
            self.items = (Allocation("rows of a file", "page cache", 1, nbytes),)
        self._rows = store.map_rows()

    def close(self) -> None:
        """Unmap the files; a gather that is running keeps its map until it ends."""
        super().close()
        self._rows.close()

    def _find_loaded(self) -> None:
        """Find out which chunks the page cache holds; the kernel may have dropped some."""
        for chunk in range(len(self._is_loaded)):
            is_cached = self._rows.is_cached(*self._bounds(chunk))
            if is_cached is not None:
                self._is_loaded[chunk] = is_cached

    def _load(self, start: int, stop: int) -> None:
        self._rows.populate(start, stop)
