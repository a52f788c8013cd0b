"""TextRowSource: batches of rows of stores, with rows of text next to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.readahead.strategy import UnreadRows
from pinfeed.rows.order_batches import RowIndices
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Places
from pinfeed.stores.ragged import RaggedParts
from pinfeed.stores.text import TextStore


@dataclass(frozen=True)
class TextRowSource(RowSource):
    """Batches of rows that also have texts; ``rebuild`` takes their lists after all tensors.

    A reader thread makes the lists when it makes the batch, so they pass no device.
    """

    texts: Sequence[TextStore] = ()

    @property
    def may_be_in_memory(self) -> bool:
        return False

    def memory_rows(self) -> list[MemoryRows] | None:
        return None

    def _host_batch(
        self,
        indices: RowIndices,
        parts: Sequence[Callable[[Rows], UnreadRows]],
        ragged: Sequence[Callable[[Rows, Places | None], RaggedParts]] = (),
    ) -> HostBatch:
        batch = super()._host_batch(indices, parts, ragged)
        texts = [text.read(batch.groups[0].rows) for text in self.texts]
        batch.rebuild = lambda tensors: self.rebuild(itertools.chain(tensors, texts))
        return batch


def row_source(source: RowSource, texts: Sequence[TextStore]) -> RowSource:
    """Return a source of the same batches with rows of text, if there are any."""
    return TextRowSource(**vars(source), texts=texts) if texts else source
