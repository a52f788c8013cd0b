"""RowCache: rows of some stores that stay on the device from batch to batch.

A row in the cache has one slot, in the memory of every store of its group: weights and optimizer
state of a table enter and leave together. While a row is in the cache, its slot has the value of
the synchronous loop, and the stores may have an older one.

Reader threads decide, in the order of batches, which rows of a batch are in the cache, which of the
others enter it after the batch, and which rows leave it for them (``decisions.py``). The training
thread carries that out in its own stream: ``lend`` copies cached rows into the batch, and ``put``
copies new values into the cache and collects the rows that are to be written to the stores. So a
cached row is up to date without any wait, however far ahead the batch was gathered.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from pinfeed.devices.base import Device, Stream, Tensor
from pinfeed.errors import BudgetError, ClosedError, described
from pinfeed.memory.units import human
from pinfeed.pipeline.row_cache.decisions import CacheDecisions, CachedRows
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Store, row_nbytes

Span = tuple[int, int]


class RowCache:
    """Rows of a group of stores that stay on the device.

    Args:
        name: Name of the rows, for errors.
        stores: Stores of the rows.
        capacity: Number of rows that the cache holds, at least 1.

    Attributes:
        row_nbytes: Bytes of a row in all stores.
        decisions: Decisions which rows are in the cache.
        stream: Stream in which the device has used the cache last; None before its first use.
    """

    def __init__(self, name: str, stores: Sequence[Store], capacity: int) -> None:
        self.name = name
        self.stores = stores
        self.capacity = capacity
        self.row_nbytes = sum(map(row_nbytes, stores))
        self.stream: Stream | None = None
        self.decisions = CacheDecisions(stores[0].n_rows, capacity)
        self._tensors: list[Tensor] = []
        # For each store, whether the loop has changed a row.
        self._is_changed = [False] * len(stores)
        # Held while rows enter and leave, because another thread may close the feeder.
        self.moving = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the cache takes."""
        return self.capacity * self.row_nbytes

    def begin(self) -> None:
        """Empty the cache, because a loop begins and the stores may have changed since the last.

        No reader thread runs when this is called.
        """
        self.decisions.begin()
        self._is_changed = [False] * len(self.stores)

    def plan(self, rows: Rows) -> CachedRows:
        """Decide about the oldest batch that was announced (reader; in the order of batches)."""
        return self.decisions.decide(self, rows)

    def lend(
        self, cached: CachedRows, gathered: list[Tensor], device: Device, compute: Stream
    ) -> list[Tensor]:
        """Return the rows of a batch for each store: gathered ones and cached ones (consumer).

        Args:
            cached: The rows of the batch.
            gathered: Values of the rows that were gathered, for each store.
            device: Device of the cache.
            compute: Stream of the copies.
        """
        if not self._tensors:
            self._tensors = self._allocated(device, compute)
        cached.gathered_values = gathered
        lent = self._empty(len(cached.rows), device, compute)
        if n := cached.n_gathered:
            into = self._cut(cached, (0, n), device)
            device.copy_rows(list(zip(gathered, lent, strict=True)), None, into, compute)
        if n_hits := len(cached.moves.hits):
            pairs = list(zip(self._tensors, lent, strict=True))
            begin = len(cached.rows) + len(cached.moves.admitted)
            slots = self._cut(cached, (begin, begin + n_hits), device)
            into = self._cut(cached, (n, n + n_hits), device)
            device.copy_rows(pairs, slots, into, compute)
        return lent

    def put(
        self,
        cached: CachedRows,
        values: Sequence[Tensor | None] | None,
        device: Device,
        compute: Stream,
    ) -> list[Tensor | None]:
        """Put the values of a batch into the cache (consumer).

        It may be called again with newer values of the same batch.

        Args:
            cached: The rows of the batch, which were lent.
            values: Values of all its rows for each store; None leaves a store, or all, unchanged.
            device: Device of the cache.
            compute: Stream of the copies.

        Returns:
            For each store the values of the rows that are written to it, or None if the loop has
            not changed that store.

        Raises:
            ClosedError: If another thread has closed the loop.
        """
        if not self._tensors:
            raise ClosedError(f"the loop has ended, and the cache of {self.name} with it")
        new = values if values is not None else [None] * len(self.stores)
        self._is_changed = [
            changed or value is not None
            for changed, value in zip(self._is_changed, new, strict=True)
        ]
        if not cached.is_put:
            self._exchange(cached, new, device, compute)
        n = len(cached.rows)
        pairs = [
            (value, tensor)
            for value, tensor in zip(new, self._tensors, strict=True)
            if value is not None
        ]
        if pairs and n > cached.n_bypassed:
            taken = self._cut(cached, (cached.n_bypassed, n), device)
            slots = self._cut(cached, (n, 2 * n - cached.n_bypassed), device)
            device.copy_rows(pairs, taken, slots, compute)
        return self._written(cached, new, device, compute)

    def values(self, slots: Tensor, n: int, device: Device, compute: Stream) -> list[Tensor | None]:
        """Return a copy of the rows in some slots, for each store that the loop has changed.

        Args:
            slots: The slots, int32, on the device.
            n: Number of slots.
            device: Device of the cache.
            compute: Stream of the copies.
        """
        copies = self._empty(n, device, compute)
        device.copy_rows(list(zip(self._tensors, copies, strict=True)), slots, None, compute)
        return self._changed_only(copies)

    @property
    def has_changed(self) -> bool:
        """Whether the loop has changed rows."""
        return any(self._is_changed)

    @property
    def tensors(self) -> list[Tensor]:
        """Device memory of the cache, for each store."""
        return self._tensors

    def close(self) -> None:
        """Free the device memory, because the loop has ended."""
        self._tensors = []
        self.stream = None

    def _exchange(
        self,
        cached: CachedRows,
        new: Sequence[Tensor | None],
        device: Device,
        compute: Stream,
    ) -> None:
        """Copy the rows that leave the cache, and give their slots to those that enter it."""
        n = len(cached.rows)
        if n_evicted := cached.n_evicted:
            cached.evicted_values = self._empty(n_evicted, device, compute)
            begin = 2 * n - cached.n_bypassed
            slots = self._cut(cached, (begin, begin + n_evicted), device)
            pairs = list(zip(self._tensors, cached.evicted_values, strict=True))
            device.copy_rows(pairs, slots, None, compute)
        admitted = (cached.n_bypassed, cached.n_gathered)
        unchanged = [
            (device.cut(gathered, *admitted), tensor)
            for gathered, tensor, value in zip(
                cached.gathered_values, self._tensors, new, strict=True
            )
            if value is None
        ]
        if unchanged and (n_admitted := len(cached.moves.admitted)):
            slots = self._cut(cached, (n, n + n_admitted), device)
            device.copy_rows(unchanged, None, slots, compute)
        cached.is_put = True
        self.decisions.note_done()

    def _written(
        self,
        cached: CachedRows,
        new: Sequence[Tensor | None],
        device: Device,
        compute: Stream,
    ) -> list[Tensor | None]:
        """Return the values of the bypassed and evicted rows, for each store that has changed."""
        n = cached.n_bypassed
        if not n:
            return self._changed_only(cached.evicted_values or self._empty(0, device, compute))
        written = self._empty(n + cached.n_evicted, device, compute)
        heads = [device.cut(tensor, 0, n) for tensor in written]
        pairs = [(value, head) for value, head in zip(new, heads, strict=True) if value is not None]
        if pairs:
            device.copy_rows(pairs, self._cut(cached, (0, n), device), None, compute)
        for value, gathered, head in zip(new, cached.gathered_values, heads, strict=True):
            if value is None:
                device.copy(device.cut(gathered, 0, n), head, compute)
        for tensor, evicted in zip(written, cached.evicted_values, strict=False):
            device.copy(evicted, device.cut(tensor, n, n + cached.n_evicted), compute)
        return self._changed_only(written)

    def _changed_only(self, values: list[Tensor]) -> list[Tensor | None]:
        """Return values with None for the stores that the loop has not changed."""
        return [
            value if changed else None
            for value, changed in zip(values, self._is_changed, strict=True)
        ]

    def _cut(self, cached: CachedRows, span: Span, device: Device) -> Tensor:
        """Return a part of the positions of a batch on the device."""
        return device.cut(cached.positions, *span)

    def _empty(self, n: int, device: Device, compute: Stream) -> list[Tensor]:
        """Return new tensors of ``n`` rows, one for each store."""
        tensors = []
        for store in self.stores:
            shape = (n, *store.row_shape)
            nbytes = math.prod(shape) * store.dtype.itemsize
            tensors.append(device.tensor(device.empty(nbytes, compute), shape, store.dtype))
        return tensors

    def _allocated(self, device: Device, compute: Stream) -> list[Tensor]:
        """Return the memory of the cache.

        Raises:
            BudgetError: If the device has not enough memory.
        """
        try:
            return self._empty(self.capacity, device, compute)
        except (MemoryError, RuntimeError) as error:
            raise BudgetError(
                f"device_cache of {self.name}: {device.name} has no memory for {self.capacity:,} "
                f"rows with their optimizer state, {human(self.nbytes)} ({described(error)}); "
                "give a smaller device_cache, or smaller batches"
            ) from error
