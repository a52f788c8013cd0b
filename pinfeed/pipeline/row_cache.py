"""RowCache: rows of some stores that stay on the device until the loop ends.

A row in the cache has one slot, in the memory of every store of its group: weights and optimizer
state of a table enter together. While a row is in the cache, its slot has the value of the
synchronous loop, and the stores may have an older one.

Reader threads decide about each batch, in order, which rows enter the cache (``cache_policy.py``).

The training thread carries out these decisions in its own stream. ``lend`` copies cached rows into
the batch. ``put`` copies new values into the cache, and collects the rows to write to the stores.
Each is one launch for all stores.

The training thread queues all work on a cache in its current stream. So each batch sees the rows as
the earlier batches have left them, without any wait, however early the batch was gathered. One wait
is needed if the user changes the current stream between two batches:

    (10) work on the cache may not be done yet, in another stream

The rows that a flush writes are copied first. The copies are written back like other values. The
device copies the slots of these rows from staging memory, which is freed when that is done. Only
after an interrupt does the end of the loop have to wait for it:

    (16) the device may still read staging memory that is about to be freed
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pinfeed.devices.batch_copies import share_each
from pinfeed.devices.device import Device, RowCopy, Stream, Tensor, TensorRange
from pinfeed.errors import BudgetError, ClosedError, described
from pinfeed.memory.units import human
from pinfeed.pipeline.cache_policy import CacheMoves, CachePolicy
from pinfeed.rows.orders import Positions, Rows
from pinfeed.stores.store import Store, row_nbytes

# Bytes of each write when the rows of a cache are written back. Several threads share a write.
_FLUSH_BYTES = 16 << 20

Values = Sequence[Tensor | None]
"""A tensor for each store; None for an unchanged store."""


@dataclass(eq=False)
class CachedRows:
    """The rows of a group in one batch: those in the cache, those that enter it, and the others."""

    cache: RowCache
    rows: Rows
    """All rows of the batch, ascending, each once."""
    moves: CacheMoves
    part: int = -1
    """Index of the part of the batch that has the positions on the device."""
    positions: Tensor | None = None
    """``moves.positions`` on the device, while the batch is lent."""
    gathered_values: list[Tensor] = field(default_factory=list)
    """Values of the gathered rows for each store, as they were lent."""
    n_read: int = 0
    """Number of rows that were read from the stores; the others were in flight, or in the cache."""
    stream: Stream | None = None
    """Stream that used these values last."""
    has_moved: bool = False
    """Whether the rows have entered the cache."""

    @property
    def written(self) -> Rows:
        """Indices of the rows that the batch writes to the stores."""
        return self.moves.gathered[self.moves.n_admitted :]

    def bypassed(self, gathered: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of tensors of gathered rows whose rows do not enter the cache."""
        cut, moves = self.cache.device.cut, self.moves
        return [cut(one, moves.n_admitted, len(moves.gathered)) for one in gathered]

    def cut(self, begin: int, end: int) -> TensorRange:
        """Return a range of the positions and slots, on the device."""
        return TensorRange(self.positions, begin, end - begin)

    def release(self) -> None:
        """Free the device memory of the rows, because their batch is over."""
        self.positions = None
        self.gathered_values = []


class ChangedRows(NamedTuple):
    """Some rows of a cache that may differ from their stores."""

    rows: Rows
    values: Values
    """Values of the rows for each store; None for a store that the loop has not changed."""


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
        policy: Decides which rows enter the cache.
        tensors: Device memory for each store, shape (capacity, *row_shape); empty between loops.
        stream: Stream in which the device works on the cache; None before its first use.
        moving: Lock that is held while rows are copied, because another thread, or a signal
            handler in this thread, may close the feeder.
    """

    def __init__(self, name: str, stores: Sequence[Store], capacity: int, device: Device) -> None:
        self.name = name
        self.stores = stores
        self.capacity = capacity
        self.device = device
        self.row_nbytes = sum(map(row_nbytes, stores))
        self.policy = CachePolicy(stores[0].n_rows, capacity)
        self.tensors: list[Tensor] = []
        self.stream: Stream | None = None
        self.moving = threading.RLock()
        # Page-locked memory of slots, each with the event after its copy to the device.
        self._staged: deque[list[Any]] = deque()
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
        self.policy.begin()
        self._is_changed = [False] * len(self.stores)
        self._is_sealed = False

    def decide(self, rows: Rows) -> CachedRows:
        """Decide about the next batch, with its distinct rows (reader)."""
        return CachedRows(self, rows, self.policy.decide(rows))

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
        moves = cached.moves
        with self._open():
            self._follow(compute)
            cached.stream = compute
            if not self.tensors:
                self.tensors = self._allocated()
            lent = self._empty(moves.n)
            hits, others = cached.cut(0, moves.n_hits), cached.cut(moves.n_hits, moves.n)
            slots = cached.cut(moves.n, moves.n + moves.n_hits)
            copies = []
            for read, held, rows in zip(gathered, self.tensors, lent, strict=True):
                copies.append(RowCopy(read, rows, into=others))
                copies.append(RowCopy(held, rows, taken=slots, into=hits))
            self.device.copy_rows(copies, self.stream)
            cached.gathered_values = gathered
            return lent

    def put(self, cached: CachedRows, values: Values | None, compute: Stream) -> Values:
        """Put the values of a batch into the cache (consumer).

        It may be called again with newer values of the same batch.

        Args:
            cached: The rows of the batch, which were lent.
            values: Values of all its rows for each store; None leaves one store, or all stores,
                unchanged.
            compute: Stream of the consumer thread.

        Returns:
            Values of ``cached.written`` for each store; None for an unchanged store.

        Raises:
            ClosedError: If another thread closes the loop.
        """
        moves = cached.moves
        with self._open():
            self._follow(compute)
            if compute != cached.stream:
                share_each(self.device, (cached.positions, *cached.gathered_values), compute)
                cached.stream = compute
            new = values if values is not None else [None] * len(self.stores)
            are_new = [value is not None for value in new]
            self._is_changed = list(map(operator.or_, self._is_changed, are_new))
            self._is_flushed = False
            written = self._empty(moves.n_bypassed, are_new)
            bypassed = cached.cut(moves.n_held, moves.n)
            copies = [
                RowCopy(value, rows, taken=bypassed)
                for value, rows in zip(new, written, strict=True)
                if value is not None
            ]
            self.device.copy_rows([*copies, *self._held(cached, new)], self.stream)
            if not cached.has_moved:
                cached.has_moved = True
                self.policy.note_done(moves)
            return written

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
        rows, slots = self.policy.changed_rows()
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
        self.policy.note_flushed()
        self._is_flushed = True

    def close(self) -> None:
        """Free the device memory, because the loop has ended."""
        self._is_flushed = True
        self._free_staged(wait=True)
        self.tensors = []
        self.stream = None

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock while the loop moves rows.

        Raises:
            ClosedError: If another thread, or a signal handler, closes the loop.
        """
        with self.moving:
            self._require_open()
            try:
                yield
            except Exception:
                # It may be the error of a cache that a signal handler has closed.
                self._require_open()
                raise

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
            share_each(self.device, self.tensors, compute)
        self.stream = compute

    def _copied(self, rows: Rows, slots: Positions) -> ChangedRows:
        """Return a copy of some rows of the cache."""
        device = self.device
        compute = device.current_stream()
        with self.moving:
            self._follow(compute)
            values = self._empty(len(rows), self._is_changed)
            memory = device.empty(slots.nbytes, compute)
            on_device = device.tensor(memory, slots.shape, slots.dtype)
            self._free_staged(wait=False)
            staged = device.staging(slots.nbytes).view(slots.dtype)
            staged[...] = slots
            # Kept before the copy, because an interrupt may follow it.
            self._staged.append([staged, None])
            device.copy(staged, on_device, compute)
            self._staged[-1][1] = compute.record()
            pairs = zip(self.tensors, values, strict=True)
            taken = TensorRange(on_device, 0, len(slots))
            copies = [RowCopy(held, one, taken) for held, one in pairs if one is not None]
            device.copy_rows(copies, compute)
            return ChangedRows(rows, values)

    def _free_staged(self, *, wait: bool) -> None:
        """Free the staging memory whose copies are done.

        Args:
            wait: Whether to wait for the others, and free all of it.
        """
        while self._staged:
            copied = self._staged[0][1]
            if copied is None or not copied.is_done():
                if not wait:
                    return
                # The device may still read staging memory that is about to be freed.
                (copied or self.device.current_stream().record()).sync()
            self._staged.popleft()

    def _held(self, cached: CachedRows, new: Values) -> list[RowCopy]:
        """Return the copies of rows that are in the cache after the batch."""
        moves = cached.moves
        taken = cached.cut(0, moves.n_held)
        slots = cached.cut(moves.n, moves.n + moves.n_held)
        admitted = cached.cut(moves.n + moves.n_hits, moves.n + moves.n_held)
        copies = []
        for held, read, value in zip(self.tensors, cached.gathered_values, new, strict=True):
            if value is not None:
                copies.append(RowCopy(value, held, taken, slots))
            elif not cached.has_moved:
                entering = self.device.cut(read, 0, moves.n_admitted)
                copies.append(RowCopy(entering, held, into=admitted))
        return copies

    def _empty(self, n: int, are_wanted: Sequence[bool] | None = None) -> list[Any]:
        """Return new tensors of ``n`` rows, one for each store; None for those not wanted."""
        found: list[Any] = [None] * len(self.stores)
        for i, store in enumerate(self.stores):
            if are_wanted is None or are_wanted[i]:
                memory = self.device.empty(n * row_nbytes(store), self.stream)
                found[i] = self.device.tensor(memory, (n, *store.row_shape), store.dtype)
        return found

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
                f"rows with their optimizer state, which {self.device.name} cannot allocate "
                f"({described(error)}); give a smaller device_cache, or smaller batches"
            ) from error
