"""RowCache: rows of some stores that stay on the device from batch to batch.

A row in the cache has one slot, in the memory of every store of its group: weights and optimizer
state of a table enter and leave together. While a row is in the cache, its slot has the value of
the synchronous loop, and the stores may have an older one.

Reader threads decide about each batch, in order: which rows are in the cache, which other rows
enter it after the batch, and which rows leave it (``cache_decisions.py``). The training
thread carries out these decisions in its own stream. ``lend`` copies cached rows into the batch,
and the rows that leave the cache after the batch out of it. ``put`` copies new values into the
cache, and collects the rows to write to the stores. Each is one launch for all stores.

The training thread queues all work on a cache in its current stream. So each batch sees the rows as
the earlier batches have left them, without any wait, however early the batch was gathered. One wait
is needed if the user changes the current stream between two batches:

    (10) work on the cache may not be done yet, in another stream

Evicted rows, and the rows that a flush writes, are copied first. The writer of the loop writes the
copies back like other values.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from pinfeed.devices.device import Device, RowCopy, Stream, Tensor
from pinfeed.devices.layout import aligned
from pinfeed.errors import BudgetError, ClosedError, described
from pinfeed.memory.units import human
from pinfeed.pipeline.cache_decisions import CacheDecisions, CachedRows, PositionRange
from pinfeed.pipeline.forwarding import Positions
from pinfeed.rows.orders import Rows
from pinfeed.stores.store import Store, row_nbytes

# Bytes of each write when the rows of a cache are written back. Several threads share a write.
_FLUSH_BYTES = 16 << 20

Values = Sequence[Tensor | None]
"""A tensor for each store; None for an unchanged store."""


class ChangedRows(NamedTuple):
    """Some rows of a cache that may differ from their stores."""

    rows: Rows
    values: list[Tensor | None]
    """Values of the rows for each store; None for a store that the loop has not changed."""
    staged: npt.NDArray[Any] | None = None
    """Staging memory that the device may read until the values are computed."""


class RowCache:
    """Rows of a group of stores that stay on the device.

    It is one class because all work on the memory of a cache is in one order: see the wait above.

    Args:
        name: Name of the rows, for errors.
        stores: Stores of the rows.
        capacity: Number of rows that the cache holds, at least 1.
        device: Device of the cache.

    Attributes:
        row_nbytes: Bytes of a row in all stores.
        decisions: Decisions about the rows in the cache.
        tensors: Device memory for each store, shape (capacity, *row_shape); empty between loops.
        stream: Stream in which the device works on the cache; None before its first use.
        leaving: The last batch that moved rows out of the cache, or is moving them; None if there
            is none.
        moving: Lock that is held while rows are copied, because another thread, or a signal
            handler in this thread, may close the feeder.
    """

    def __init__(self, name: str, stores: Sequence[Store], capacity: int, device: Device) -> None:
        self.name = name
        self.stores = stores
        self.capacity = capacity
        self.row_nbytes = sum(map(row_nbytes, stores))
        self.decisions = CacheDecisions(stores[0].n_rows, capacity)
        self.tensors: list[Tensor] = []
        self.stream: Stream | None = None
        self.leaving: CachedRows | None = None
        self.moving = threading.RLock()
        self._device = device
        # For each store, whether the loop has changed a row.
        self._is_changed = [False] * len(stores)
        self._is_flushed = False
        self._is_sealed = False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the cache takes."""
        return self.capacity * self.row_nbytes

    def begin(self) -> None:
        """Empty the cache for a new loop, because the stores may have changed.

        No reader thread runs when this is called.
        """
        self.decisions.begin()
        self._is_changed = [False] * len(self.stores)
        self._is_sealed = False

    def decide(self, rows: Rows) -> CachedRows:
        """Decide about the next batch, with its distinct rows (reader)."""
        return self.decisions.decide(self, rows)

    def lend(self, cached: CachedRows, gathered: list[Tensor], compute: Stream) -> list[Tensor]:
        """Return the rows of a batch for each store: gathered ones and cached ones (consumer).

        Args:
            cached: The rows of the batch.
            gathered: Values of the rows that were gathered, for each store.
            compute: Stream of the consumer thread.

        Raises:
            BudgetError: If the device has no memory for the cache, which the first batch allocates.
            ClosedError: If another thread closes the loop.
        """
        with self.moving:
            self._require_open()
            self._follow(compute)
            cached.stream = compute
            if not self.tensors:
                self.tensors = self._allocated()
            lent = self._empty(len(cached.rows))
            evicted = self._empty_together(cached.moves.n_evicted)
            into = self._cut(cached, cached.gathered_positions)
            hits = self._cut(cached, cached.hit_positions)
            slots = self._cut(cached, cached.hit_slots)
            leaving = self._cut(cached, cached.evicted_slots)
            copies = []
            for read, held, rows, left in zip(gathered, self.tensors, lent, evicted, strict=True):
                copies.append(RowCopy(read, rows, into=into))
                copies.append(RowCopy(held, rows, taken=slots, into=hits))
                # The step of this batch does not change the rows that leave after it.
                copies.append(RowCopy(held, left, taken=leaving))
            self._device.copy_rows(copies, self.stream)
            cached.gathered_values = gathered
            cached.evicted_values = evicted
            return lent

    def put(
        self, cached: CachedRows, values: Values | None, compute: Stream
    ) -> list[Tensor | None]:
        """Put the values of a batch into the cache (consumer).

        It may be called again with newer values of the same batch.

        Args:
            cached: The rows of the batch, which were lent.
            values: Values of all its rows for each store; None leaves one store, or all stores,
                unchanged.
            compute: Stream of the consumer thread.

        Returns:
            Values of ``cached.written`` for each store; None for a store that the loop has not
            changed.

        Raises:
            ClosedError: If another thread closes the loop.
        """
        with self.moving:
            self._require_open()
            self._follow(compute)
            if compute != cached.stream:
                for tensor in cached.tensors:
                    self._device.share(tensor, compute)
                cached.stream = compute
            new = values if values is not None else [None] * len(self.stores)
            self._is_changed = [
                changed or value is not None
                for changed, value in zip(self._is_changed, new, strict=True)
            ]
            self._is_flushed = False
            self.leaving = cached
            written, copies = self._written(cached, new)
            # One launch changes the cache, and the rows that leave it are in ``evicted_values``
            # already. So an error or an interrupt loses no row, before the launch or after it.
            cached.may_have_moved = True
            self._device.copy_rows([*copies, *self._held(cached, new)], self.stream)
            cached.written_values = written
            if not cached.has_moved:
                self.decisions.note_done(cached)
            return self._changed_only(written)

    def changed_rows(self, *, is_last: bool) -> Iterator[ChangedRows]:
        """Yield copies of all rows that may differ from their stores, in chunks (consumer).

        Args:
            is_last: Whether the loop is ending, after which no row may change.
        """
        if is_last:
            with self.moving:
                self._is_sealed = True
        if not any(self._is_changed) or self._is_flushed:
            return
        leaving = self.leaving
        if leaving is not None and leaving.evicted_values and leaving.moves.n_evicted:
            # The last evicted rows may not have been queued for writing.
            with self.moving:
                self._follow(self._device.current_stream())
            evicted = self._changed_only(leaving.evicted_values)
            yield ChangedRows(leaving.evicted, evicted)
        rows, slots = self.decisions.changed_rows()
        step = max(1, _FLUSH_BYTES // self.row_nbytes)
        begin = 0
        while begin < len(rows):
            chunk = slice(begin, begin + step)
            try:
                copied = self._copied(rows[chunk], slots[chunk])
            except (MemoryError, RuntimeError):
                # A loop that ends because memory is exhausted leaves little for the copies.
                if step == 1:
                    raise
                step //= 2
                continue
            begin += step
            yield copied

    def note_flushed(self) -> None:
        """Note that all changed rows were written (consumer)."""
        self.decisions.note_flushed()
        self._is_flushed = True

    def close(self) -> None:
        """Free the device memory, because the loop has ended."""
        self._is_flushed = True
        self.decisions.close()
        self.leaving = None
        self.tensors = []
        self.stream = None

    def _require_open(self) -> None:
        """Check that the loop may use the cache.

        Raises:
            ClosedError: If another thread closes the loop.
        """
        if self._is_sealed:
            raise ClosedError(
                f"another thread closed the loop, and now writes the cache of {self.name} to its "
                "stores; join the thread of the loop before closing it"
            )

    def _follow(self, compute: Stream) -> None:
        """Queue further work on the cache in ``compute``, after that in its previous stream."""
        if self.stream is not None and compute != self.stream:
            compute.wait(self.stream.record())  # work on the cache may not be done yet
            for tensor in self.tensors:
                self._device.share(tensor, compute)
        self.stream = compute

    def _copied(self, rows: Rows, slots: Positions) -> ChangedRows:
        """Return a copy of some rows of the cache."""
        device = self._device
        compute = device.current_stream()
        with self.moving:
            self._follow(compute)
            staged = device.staging(slots.nbytes).view(slots.dtype)
            staged[...] = slots
            memory = device.empty(slots.nbytes, compute)
            on_device = device.tensor(memory, slots.shape, slots.dtype)
            device.copy(staged, on_device, compute)
            return ChangedRows(rows, self.values(on_device, len(rows)), staged)

    def values(self, slots: Tensor, n: int) -> list[Tensor | None]:
        """Return a copy of the rows in some slots, for each store that the loop has changed.

        Args:
            slots: The slots, int32, on the device.
            n: Number of slots.
        """
        found = self._empty(n)
        copies = [
            RowCopy(held, rows, taken=slots) for held, rows in zip(self.tensors, found, strict=True)
        ]
        self._device.copy_rows(copies, self.stream)
        return self._changed_only(found)

    def _held(self, cached: CachedRows, new: Values) -> list[RowCopy]:
        """Return the copies of rows that are in the cache after the batch."""
        copies = []
        taken = self._cut(cached, cached.held_positions)
        slots = self._cut(cached, cached.held_slots)
        admitted = self._cut(cached, cached.admitted_slots)
        for held, read, value in zip(self.tensors, cached.gathered_values, new, strict=True):
            if value is not None:
                copies.append(RowCopy(value, held, taken, slots))
            elif not cached.has_moved:
                entering = self._device.cut(read, 0, cached.moves.n_admitted)
                copies.append(RowCopy(entering, held, into=admitted))
        return copies

    def _written(self, cached: CachedRows, new: Values) -> tuple[list[Tensor], list[RowCopy]]:
        """Return the values of the bypassed rows, then of the evicted ones, and their copies."""
        n, cut = cached.n_bypassed, self._device.cut
        if not n:
            return cached.evicted_values, []
        written = self._empty_together(n + cached.moves.n_evicted)
        bypassed = self._cut(cached, cached.bypassed_positions)
        copies = []
        for i, (value, rows) in enumerate(zip(new, written, strict=True)):
            if value is None and cached.written_values:
                # The batch was written before, and has not changed this store since.
                written[i] = cached.written_values[i]
                continue
            if value is None:
                begin = cached.moves.n_admitted
                gathered = cut(cached.gathered_values[i], begin, begin + n)
                copies.append(RowCopy(gathered, cut(rows, 0, n)))
            else:
                copies.append(RowCopy(value, cut(rows, 0, n), taken=bypassed))
            copies.append(
                RowCopy(cached.evicted_values[i], cut(rows, n, n + cached.moves.n_evicted))
            )
        return written, copies

    def _cut(self, cached: CachedRows, part: PositionRange) -> Tensor:
        """Return a range of the positions and slots of a batch, on the device."""
        return self._device.cut(cached.positions, *part)

    def _changed_only(self, values: Sequence[Tensor]) -> list[Tensor | None]:
        """Return values with None for the stores that the loop has not changed."""
        pairs = zip(values, self._is_changed, strict=True)
        return [value if changed else None for value, changed in pairs]

    def _empty(self, n: int) -> list[Tensor]:
        """Return new tensors of ``n`` rows, one for each store, each with memory of its own."""
        return [
            self._device.tensor(
                self._device.empty(n * row_nbytes(store), self.stream),
                (n, *store.row_shape),
                store.dtype,
            )
            for store in self.stores
        ]

    def _empty_together(self, n: int) -> list[Tensor]:
        """Return new tensors of ``n`` rows, one for each store, in one block of memory."""
        sizes = [aligned(n * row_nbytes(store)) for store in self.stores]
        offsets = itertools.accumulate(sizes[:-1], initial=0)
        memory = self._device.empty(sum(sizes), self.stream)
        return [
            self._device.tensor(memory, (n, *store.row_shape), store.dtype, offset)
            for store, offset in zip(self.stores, offsets, strict=True)
        ]

    def _allocated(self) -> list[Tensor]:
        """Return the memory of the cache.

        Raises:
            BudgetError: If the device does not have enough memory.
        """
        try:
            return self._empty(self.capacity)
        except (MemoryError, RuntimeError) as error:
            raise BudgetError(
                f"device_cache of {self.name} needs {human(self.nbytes)} for {self.capacity:,} "
                f"rows with their optimizer state, which {self._device.name} cannot allocate "
                f"({described(error)}); give a smaller device_cache, or smaller batches"
            ) from error
