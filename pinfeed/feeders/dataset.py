"""RowDataset: the rows of a feeder's sources by number, without a loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from pinfeed.memory.limits import safe_repr
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.validation.arguments import explain_arguments

_OF_LOADER = (
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
)
_MORE_OF_LOADER = (
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
HINTS = {
    name: f"a RowDataset has rows and no batches; give it to DataLoader(RowDataset(source), {name}=...), or use Feeder(source, ...)"
    for name in (*_OF_LOADER, *_MORE_OF_LOADER, "in_order")
} | {
    "transform": "apply it to what the dataset gives, in the collate_fn of the DataLoader or in the loop"
}
"""Advice, by the names that DataLoader has for it."""


class RowDataset(Dataset[Any]):
    """``dataset[i]`` is row i of what a Feeder would be given: CPU tensors, in the structure of the source, yours to keep.

    For evaluation, for a look at some rows, and wherever a map-style ``torch.utils.data.Dataset``
    is wanted. ``dataset[[3, 1, 4]]`` and ``dataset[10:20]`` are batches. A DataLoader's batch is
    one gather, in its worker processes too: a dataset of paths is pickled as its paths, and every
    process opens the files for itself; arrays are pickled whole where processes are spawned.

    Args:
        source: As ``Feeder`` takes it.

    Raises:
        StoreError: A source that cannot be served, or sources of unequal length.
    """

    @explain_arguments(HINTS)
    def __init__(self, source: Any) -> None:
        self._source = source
        self._open()

    @safe_repr
    def __repr__(self) -> str:
        return f"<RowDataset: {self._tree}>"

    def __enter__(self) -> RowDataset:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._tree.n_rows

    def __getitem__(self, index: Any) -> Any:
        """A row for a number; for a slice, or for several numbers in an array or a list, a batch of them.

        Raises:
            RowIndexError: Numbers that are out of range, negative, or none.
        """
        if isinstance(index, slice):
            return self._batch(range(*index.indices(len(self))))
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self.__getitems__([index])[0]
        return self._batch(index)

    def __getitems__(self, rows: Sequence[Any]) -> list[Any]:
        """Several rows, which share the memory of one gather: what a DataLoader asks for, and collates."""
        tensors = self._gather(rows)
        return [
            self._tree.rebuild(iter([tensor[i] for tensor in tensors])) for i in range(len(rows))
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._source = state["source"]
        self._open()

    def close(self) -> None:
        """Close files that were opened from paths. Idempotent."""
        self._tree.close()

    def _open(self) -> None:
        self._tree = StoreTree(self._source)
        self._process = os.getpid()

    def _batch(self, rows: Any) -> Any:
        return self._tree.rebuild(iter(self._gather(rows)))

    def _gather(self, rows: Any) -> list[Any]:
        if self._process != os.getpid():
            # A fork has the descriptors, and not the kernel's queues, of the process that opened
            # the files.
            self._open()
        wanted: Rows = check_rows(rows, len(self))
        tensors = []
        for store in self._tree.stores:
            out = np.empty((len(wanted), *store.row_shape), store.dtype)
            store.gather(wanted, out)
            tensors.append(to_torch(out))
        return tensors
