"""Batch: one batch of rows that can be written back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, Generic

import numpy as np

from pinfeed.devices.device import Device
from pinfeed.errors import WriteBackError, logger
from pinfeed.feeders.base_feeder import T_co
from pinfeed.pipeline.lent_batch import LentBatch, WritableBatch
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.store import Store
from pinfeed.tensors.argument_types import Tensors


class Batch(Generic[T_co]):
    """One batch of rows, with its row indices, that can be written back to its sources.

    ``Feeder.batches()`` yields it.

    Examples:
        >>> table = np.ones((1000, 8), np.float32)
        >>> with pinfeed.Feeder(table, batch_size=256) as feeder:
        ...     for batch in feeder.batches():
        ...         batch.write_back(batch.data * 0.5)
        >>> print(table[0, 0])
        0.5

    Attributes:
        rows: Row indices of the batch, shape (n,), int64.
        data: Tensors on the device, in the structure of the source, each of shape (n, *row_shape).
            Ragged rows have the layout of their ``RaggedStore``. With a ``host_transform`` or a
            ``device_transform``, it is the result of that function. The caller owns the tensors,
            and may keep and change them.
    """

    __slots__ = ("_device", "_is_source", "_lent", "_stores", "data", "rows")

    def __init__(
        self, lent: LentBatch, data: T_co, stores: StoreTree, device: Device, *, is_source: bool
    ) -> None:
        self._lent = lent
        self._stores = stores
        self._device = device
        # Whether the data are rows of the source, and not results of a transform.
        self._is_source = is_source
        self.rows: Rows = lent.groups[0].rows
        self.data = data

    def __repr__(self) -> str:
        return f"<Batch of {len(self.rows):,} rows>"

    def write_back(self, values: Tensors) -> None:
        """Write ``values`` to the rows of this batch in the background.

        Later batches contain the new rows, even if they were prefetched before. All writes are in
        the stores when the loop has ended. In a worker process of a DataLoader, an array changes
        in that process alone, and pinfeed warns once. Files and shared memory change for all
        processes.

        Args:
            values: Tensors on the device in the structure of the source, each of shape
                (n, *row_shape) and of its store's dtype. None in place of a tensor leaves that
                store unchanged. Give None for ragged rows, which are read-only. The tensors are
                copied, so they may change after the call, and may be ``data`` itself.

        Raises:
            WriteBackError: If the structure, shape, dtype or device of ``values`` is wrong, a store
                is read-only, or a row appears twice in the batch. It is also raised if the batch
                was written before, the loop has requested the next batch, or the feeder has a
                transform. No row has changed then.
        """
        if not self._is_source:
            raise WriteBackError(
                "write_back() of a batch that host_transform or device_transform has made; "
                "expected a loop without these functions, because a prefetched batch is "
                "transformed before later changes of its rows are known; change the batch in the "
                "training step instead"
            )
        lent = self._lent
        if isinstance(lent, WritableBatch):
            lent.require_writable()
        checked = self._stores.write_check.check(values, len(self.rows), self._device)
        pairs = zip(self._stores.stores, checked, strict=True)
        _warn_in_worker_process(store for store, value in pairs if value is not None)
        # Otherwise no store is writable, and so no value was given.
        if isinstance(lent, WritableBatch):
            lent.write([checked])


def _warn_in_worker_process(stores: Iterable[Store]) -> None:
    """Warn once if a worker process of a DataLoader writes to its own copy of an array.

    Called by the worker process.
    """
    # A worker process has imported torch.utils.data already.
    data = sys.modules.get("torch.utils.data")
    if data is None or data.get_worker_info() is None:
        return
    if any(isinstance(store, ArrayStore) and _is_private(store.array) for store in stores):
        _warn_of_private_copy()


@functools.cache
def _warn_of_private_copy() -> None:
    logger.warning(
        "write_back in a worker process of a DataLoader changes that process's copy of an array, "
        "and the array of the main process stays unchanged; loop over the feeder in the main "
        "process, or give a file (NpyStore(path, mode='r+')) or a tensor after share_memory_()"
    )


def _is_private(array: Any) -> bool:
    """Return whether an array is memory of one process, neither a mapped file nor shared memory."""
    owner = array
    while isinstance(getattr(owner, "base", None), np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    if isinstance(owner, np.memmap):
        return False
    if owner.base is None:
        return True
    is_shared = getattr(owner.base, "is_shared", None)
    return callable(is_shared) and not is_shared()
