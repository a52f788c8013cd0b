"""RowFetch: the rows of stores whose ids are in the batches of a loader."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pinfeed.devices.base import Device, RowCopy, Tensor
from pinfeed.pipeline.sources.base import ArrayPart, HostBatch, RowGroup
from pinfeed.pipeline.sources.ids import IdsOf, ids_array
from pinfeed.readahead.strategy import HostRows, ReadStrategy, main_hint
from pinfeed.rows.distinct import first_occurrences
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import CheckStop, HostArray, never
from pinfeed.stores.store import Array, Store, row_nbytes
from pinfeed.tensors.pytree import Rebuild

# Rows are copied to their positions in pieces of this size, which stay in the processor's cache.
_PIECE_BYTES = 256 << 10

Serve = Callable[[Rows], HostRows]
"""Returns rows of one store, which are gathered later."""


@dataclass(frozen=True)
class FetchSpec:
    """One entry of ``fetch=``: stores with equally many rows, and the ids of a batch."""

    key: Hashable
    """Key of the rows in the loop's dict of rows."""
    ids_of: IdsOf
    stores: Sequence[Store]
    strategies: Sequence[ReadStrategy]
    """Strategy to read the rows of each store."""
    rebuild: Rebuild
    """Makes the user's structure from one tensor per store."""

    @property
    def name(self) -> str:
        """Name of the entry in errors."""
        return f"fetch[{self.key!r}]"


class RepeatedRows:
    """Rows of a batch that repeat: a ``HostArray`` that gathers each distinct row once.

    Args:
        distinct: The distinct rows, m of them, in the order in which they first occur.
        positions: For each row of the batch, its position among the distinct rows, shape (n,). No
            position is greater than the position of the row itself.
    """

    def __init__(self, distinct: HostRows, positions: Rows) -> None:
        self._distinct = distinct
        self._positions = positions
        self.shape = (len(positions), *distinct.shape[1:])
        self.dtype = distinct.dtype

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the distinct rows into the beginning of ``out``, then copy each to its places."""
        self._distinct.read(out[: self._distinct.shape[0]], check_stop)
        positions = self._positions
        n = len(positions)
        # The rows before the first repeated one are already in place.
        first = int(np.argmax(positions != np.arange(n)))
        step = max(1, _PIECE_BYTES * n // max(1, out.nbytes))
        # Each row is copied from its own or a lower position. In descending order, no row is
        # overwritten before it was copied.
        for end in range(n, first, -step):
            begin = max(first, end - step)
            check_stop()
            out[begin:end] = out.take(positions[begin:end], axis=0)


class _Fetched(NamedTuple):
    """Rows of one entry for a batch."""

    spec: FetchSpec
    shape: tuple[int, ...]
    """Shape of the ids."""
    positions: Rows | None
    """Index of the distinct row for each position of the batch; None if the rows are in place."""


class RowFetch:
    """Adds rows to the batches of a loader, by the ids in the batches.

    Args:
        specs: Entries of ``fetch=``.
        device: Device that the batches are moved to.
    """

    def __init__(self, specs: Sequence[FetchSpec], device: Device) -> None:
        self._specs = specs
        self._device = device
        self._serving: list[list[Serve]] = []

    @contextlib.contextmanager
    def open_epoch(self) -> Generator[None, None, None]:
        """Serve the rows of an epoch; background reads end with the context."""
        with contextlib.ExitStack() as stack:
            self._serving = [
                [
                    # Ids have any order and number, so the position in an epoch has no meaning.
                    stack.enter_context(strategy.open_epoch(None, 0, 0))(0, 0)
                    for strategy in spec.strategies
                ]
                for spec in self._specs
            ]
            yield

    def ids(self, batch: Any) -> list[Array]:
        """Return the ids in a batch on the host, for each entry.

        This calls the user's functions, for one batch at a time, in order. The ids are copied,
        because a function may reuse the same array for each batch.

        Raises:
            RowIndexError: If the ids are not integers.
        """
        return [ids_array(spec.ids_of(batch), spec.name).copy() for spec in self._specs]

    def add(self, load: HostBatch, ids: Sequence[Array]) -> HostBatch:
        """Return a batch with the parts of ``load``, the rows of all entries, and positions.

        Only entries with repeated ids need positions.

        Raises:
            RowIndexError: If ids are out of range.
        """
        parts = list(load.parts)
        groups: list[RowGroup] = []
        found = [
            self._add_rows(spec, serving, of_spec, parts, groups)
            for spec, serving, of_spec in zip(self._specs, self._serving, ids, strict=True)
        ]
        positions = [fetched.positions for fetched in found if fetched.positions is not None]
        parts += [ArrayPart(of_entry.astype(np.int32)) for of_entry in positions]
        rebuild = functools.partial(self._rebuild, load.rebuild, len(load.parts), found)
        return HostBatch(parts, rebuild, load.batches, groups)

    def hint(self) -> str:
        """Return what to change if a loop stalls on gathering these rows."""
        pairs = [
            (row_nbytes(store), strategy.hint)
            for spec in self._specs
            for store, strategy in zip(spec.stores, spec.strategies, strict=True)
        ]
        names = ", ".join(spec.name for spec in self._specs)
        return f"Gathering rows of {names} takes most of the time. {main_hint(pairs)}"

    def _add_rows(
        self,
        spec: FetchSpec,
        serving: Sequence[Serve],
        ids: Array,
        parts: list[HostArray],
        groups: list[RowGroup],
    ) -> _Fetched:
        """Add the rows of one entry to the parts of a batch."""
        checked = check_rows(ids.reshape(-1), spec.stores[0].n_rows, f"{spec.name}: ids")
        rows, positions = first_occurrences(checked)
        if not self._device.unified:
            groups.append(RowGroup(rows, len(parts), spec.stores))
        distinct = [serve(rows) for serve in serving]
        if positions is not None and self._device.unified:
            parts += [RepeatedRows(of_store, positions) for of_store in distinct]
            positions = None
        else:
            parts += distinct
        return _Fetched(spec, ids.shape, positions)

    def _rebuild(
        self,
        rebuild: Rebuild,
        n_parts: int,
        found: Sequence[_Fetched],
        tensors: Iterator[Tensor],
    ) -> tuple[Any, dict[Hashable, Any]]:
        """Return the loader's batch and the fetched rows, from the parts of ``add``."""
        batch = rebuild(iter([next(tensors) for _ in range(n_parts)]))
        every_rows = [[next(tensors) for _ in fetched.spec.stores] for fetched in found]
        return batch, {
            fetched.spec.key: self._rows(fetched, rows, tensors)
            for fetched, rows in zip(found, every_rows, strict=True)
        }

    def _rows(self, fetched: _Fetched, rows: list[Tensor], positions: Iterator[Tensor]) -> Any:
        """Return the rows of one entry, in the shape of its ids (consumer thread)."""
        stores = fetched.spec.stores
        if fetched.positions is not None:
            of_entry = next(positions)
            n = math.prod(fetched.shape)
            rows = [
                self._spread(of_store, of_entry, (n, *store.row_shape), store.dtype)
                for of_store, store in zip(rows, stores, strict=True)
            ]
        if len(fetched.shape) != 1:
            rows = [
                of_store.reshape((*fetched.shape, *store.row_shape))
                for of_store, store in zip(rows, stores, strict=True)
            ]
        return fetched.spec.rebuild(iter(rows))

    def _spread(
        self, distinct: Tensor, positions: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Copy each distinct row to its positions, on a device that has its own memory.

        The batch is lent already, so the current stream has waited for its copies.
        """
        compute = self._device.current_stream()
        memory = self._device.empty(math.prod(shape) * dtype.itemsize, compute)
        out = self._device.tensor(memory, shape, dtype)
        self._device.copy_rows([RowCopy(distinct, out, taken=positions)], compute)
        return out
