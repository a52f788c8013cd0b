"""RowDataset: rows of a feeder's sources by row index, without a loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from pinfeed.feeders.hints import DATASET_HINTS
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import RaggedStore, Store, TextStore
from pinfeed.stores.store import ClosedOnExit
from pinfeed.tensors.argument_types import Ids, Source, Tensors
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.validation.arguments import explain_arguments


class RowDataset(ClosedOnExit, Dataset[Any]):
    """Rows of arrays and files by index, as CPU tensors in the structure of the source.

    ``dataset[i]`` is row i. ``dataset[[3, 1, 4]]`` and ``dataset[10:20]`` are batches. The caller
    owns the tensors. A single row of a ``RaggedStore`` is a tensor of its own length, and a batch
    has the store's layout. Use it for evaluation, to look at some rows, and wherever a map-style
    ``torch.utils.data.Dataset`` is required.

    Each batch of a DataLoader is one gather, in worker processes too. A dataset of paths is pickled
    as its paths, and every process opens the files itself. Arrays are pickled as a whole if
    processes are spawned.

    Examples:
        >>> np.save("x.npy", np.zeros((1000, 8), np.float32))
        >>> dataset = pinfeed.RowDataset("x.npy")
        >>> dataset[[3, 1, 4]].shape
        torch.Size([3, 8])
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=256)

    Args:
        source: Source of rows, as for ``Feeder``.

    Raises:
        StoreError: If a source cannot be read, or sources have different numbers of rows.
    """

    @explain_arguments(DATASET_HINTS)
    def __init__(self, source: Source) -> None:
        self._source = source
        self._open()

    def __repr__(self) -> str:
        return f"<RowDataset: {self._tree}>"

    def __len__(self) -> int:
        return self._tree.n_rows

    def __getitem__(self, index: int | slice | Ids) -> Tensors:
        """Return one row for a row index, or a batch for a slice, an array or a list of them.

        Raises:
            RowIndexError: If an index is out of range, negative, or not a whole number.
        """
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        elif hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self.__getitems__([index])[0]
        return self._tree.structure(iter(self._gather(index, as_samples=False)))

    def __getitems__(self, rows: Sequence[Any]) -> list[Any]:
        """Return several rows, which share the memory of one gather; a DataLoader collates them."""
        columns = self._gather(rows, as_samples=True)
        return [
            self._tree.structure(iter([column[i] for column in columns])) for i in range(len(rows))
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._source = state["source"]
        self._open()

    def close(self) -> None:
        """Close the files that were opened from paths. A second call does nothing."""
        self._tree.close()

    def _open(self) -> None:
        """Open the source in this process."""
        self._tree = StoreTree(self._source)
        self._process = os.getpid()

    def _gather(self, rows: Any, *, as_samples: bool) -> list[Any]:
        """Return rows of every leaf of the source, on the CPU.

        Args:
            rows: Row indices, as the user gave them.
            as_samples: Whether ragged rows are a list of tensors, not a batch in their layout.
        """
        if self._process != os.getpid():
            # After a fork, the process shares the file descriptors of its parent, but not the
            # kernel's queues for asynchronous reads.
            self._open()
        wanted: Rows = check_rows(rows, len(self))
        return [_gathered(leaf, wanted, as_samples) for leaf in self._tree.leaves]


def _gathered(leaf: Store | RaggedStore | TextStore, rows: Rows, as_samples: bool) -> Any:
    """Return rows of one leaf of a source; a list of ragged ones if they are samples."""
    if isinstance(leaf, TextStore):
        return leaf.read(rows)
    if not isinstance(leaf, RaggedStore):
        out = np.empty((len(rows), *leaf.row_shape), leaf.dtype)
        leaf.gather(rows, out)
        return to_torch(out)
    if not as_samples:
        return leaf.batch(map(to_torch, leaf.read_parts(rows)))
    return leaf.samples([*map(to_torch, leaf.read_parts(rows, "offsets"))])
