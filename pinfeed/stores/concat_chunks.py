"""ConcatChunks: rows of several chunked stores, one after the other, with the chunks of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pinfeed.rows.runs import cut_run
from pinfeed.stores.chunked import ChunkedStore, ChunkLayout
from pinfeed.stores.store import Array, Store


class ConcatChunks(ChunkedStore):
    """Rows of several chunked stores, one after the other; read-only.

    Args:
        parts: Stores with rows of one shape and dtype, at least one; they must stay open.
        owned: The parts that this store closes.
    """

    def __init__(self, parts: Sequence[ChunkedStore], owned: Sequence[Store] = ()) -> None:
        self.parts = tuple(parts)
        self._owned = tuple(owned)
        self._ends = np.cumsum([part.n_rows for part in parts])
        begins = self._ends - [part.n_rows for part in parts]
        bounds = [part.bounds[:-1] + begin for part, begin in zip(parts, begins, strict=True)]
        self._decoding_chunks = max(part._decoding_chunks for part in parts)
        self._max_decodes = min(part._max_decodes for part in parts)
        self._run_bytes = min(self._run_bytes, *(part._run_bytes for part in parts))
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        layout = ChunkLayout(
            f"{parts[0].label}{more}",
            parts[0].dtype,
            parts[0].row_shape,
            np.append(np.concatenate(bounds), self._ends[-1]),
            paths=tuple(path for part in parts for path in part.paths),
        )
        super().__init__(layout)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # No caller has the parts that were unpickled.
        self._owned = self.parts

    @property
    def version(self) -> object:
        return [part.version for part in self.parts]

    @property
    def piece_rows(self) -> int:
        found = {part.piece_rows for part in self.parts}
        return found.pop() if len(found) == 1 else self.chunk_rows

    def close(self) -> None:
        """Free the chunks, and close the stores that were opened from paths."""
        super().close()
        for part in self._owned:
            part.close()

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        done = 0
        for number, first, n in cut_run(start, stop, self._ends):
            self.parts[number].read_chunks(first, first + n, out[done : done + n])
            done += n
