"""RowFetch: the rows of stores whose ids are in the batches of a loader; the ids of a batch."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np

from pinfeed.devices.device import Device, RowCopy, Tensor, TensorRange
from pinfeed.errors import ArgumentError, RowIndexError, StoreError, described
from pinfeed.pipeline.sources.source import ArrayPart, HostBatch, RowGroup, host_batch_of
from pinfeed.readahead.strategy import ReadStrategy, UnreadRows
from pinfeed.rows.indices import check_rows, first_occurrences
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import CheckStop, FunctionPart
from pinfeed.stores.store import Array, Store
from pinfeed.tensors.pytree import Rebuild
from pinfeed.validation.suggestions import of_ids

# Rows are copied to their positions in pieces of this size, which stay in the processor's cache.
_PIECE_BYTES = 256 << 10

IdsOf = Callable[[Any], Any]
"""Returns the ids of the rows that a batch on the host needs."""
Serve = Callable[[Rows], UnreadRows]
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


def repeated_rows(distinct: UnreadRows, positions: Rows) -> FunctionPart:
    """Return rows of a batch that repeat, of which each distinct row is gathered once.

    Args:
        distinct: The distinct rows, m of them, in the order in which they first occur.
        positions: For each row of the batch, its position among the distinct rows, shape (n,). No
            position is greater than the position of the row itself.
    """
    n = len(positions)

    def fill(out: Array, check_stop: CheckStop) -> None:
        distinct.read(out[: distinct.shape[0]], check_stop)
        # The rows before the first repeated one are already in place.
        first = int(np.argmax(positions != np.arange(n)))
        step = max(1, _PIECE_BYTES * n // max(1, out.nbytes))
        # Each row is copied from its own or a lower position. In descending order, no row is
        # overwritten before it was copied.
        for end in range(n, first, -step):
            begin = max(first, end - step)
            check_stop()
            out[begin:end] = out.take(positions[begin:end], axis=0)

    return FunctionPart((n, *distinct.shape[1:]), distinct.dtype, fill)


@dataclass
class RowFetch:
    """Adds rows to the batches of a loader, by the ids in the batches.

    Args:
        specs: Entries of ``fetch=``.
        device: Device that the batches are moved to.
    """

    specs: Sequence[FetchSpec]
    device: Device
    _serving: list[list[Serve]] = field(default_factory=list, init=False)

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
                for spec in self.specs
            ]
            yield

    def ids(self, batch: Any) -> list[Array]:
        """Return the ids in a batch on the host, for each entry.

        This calls the user's functions, for one batch at a time, in order. The ids are copied,
        because a function may reuse the same array for each batch.

        Raises:
            RowIndexError: If the ids are not integers.
        """
        return [ids_array(spec.ids_of(batch), spec.name).copy() for spec in self.specs]

    def add(self, batch: Any, ids: Sequence[Array]) -> HostBatch:
        """Return a loader's batch with the rows of all entries, and their positions.

        Only entries with repeated ids need positions.

        Raises:
            RowIndexError: If ids are out of range.
        """
        host_batch = host_batch_of(batch)
        parts = list(host_batch.parts)
        groups: list[RowGroup] = []
        shapes: list[tuple[tuple[int, ...], bool]] = []
        for spec, serving, of_spec in zip(self.specs, self._serving, ids, strict=True):
            checked = check_rows(of_spec.reshape(-1), spec.stores[0].n_rows, f"{spec.name}: ids")
            rows, positions = first_occurrences(checked)
            distinct = [serve(rows) for serve in serving]
            is_unified = self.device.unified
            if not is_unified:
                groups.append(RowGroup(rows, len(parts), spec.stores))
            if positions is None:
                parts += distinct
            elif is_unified:
                parts += [repeated_rows(of_store, positions) for of_store in distinct]
            else:
                parts += [*distinct, ArrayPart(positions.astype(np.int32))]
            shapes.append((of_spec.shape, positions is not None and not is_unified))
        rebuild = functools.partial(
            self._rebuild, host_batch.rebuild, len(host_batch.parts), shapes
        )
        return HostBatch(parts, rebuild, host_batch.batches, groups)

    def _rebuild(
        self,
        rebuild: Rebuild,
        n_parts: int,
        shapes: Sequence[tuple[tuple[int, ...], bool]],
        tensors: Iterator[Tensor],
    ) -> tuple[Any, dict[Hashable, Any]]:
        """Return the loader's batch and the fetched rows, from the parts of ``add``.

        Args:
            rebuild: Makes the loader's batch.
            n_parts: Number of its parts.
            shapes: For each entry the shape of its ids, and whether they repeat, so that its rows
                are distinct and positions follow them.
            tensors: The tensors of all parts.
        """
        batch = rebuild(iter([next(tensors) for _ in range(n_parts)]))
        fetched = {}
        for spec, (shape, is_spread) in zip(self.specs, shapes, strict=True):
            rows = [next(tensors) for _ in spec.stores]
            positions = next(tensors) if is_spread else None
            for i, store in enumerate(spec.stores):
                if positions is not None:
                    rows[i] = self._spread(rows[i], positions, store)
                if len(shape) != 1:
                    rows[i] = rows[i].reshape((*shape, *store.row_shape))
            fetched[spec.key] = spec.rebuild(iter(rows))
        return batch, fetched

    def _spread(self, distinct: Tensor, positions: Tensor, store: Store) -> Tensor:
        """Copy each distinct row to its positions, on a device that has its own memory.

        The batch is lent already, so the current stream has waited for its copies.
        """
        compute = self.device.current_stream()
        shape = (positions.shape[0], *store.row_shape)
        memory = self.device.empty(math.prod(shape) * store.dtype.itemsize, compute)
        out = self.device.tensor(memory, shape, store.dtype)
        taken = TensorRange(positions, 0, shape[0])
        self.device.copy_rows([RowCopy(distinct, out, taken)], compute)
        return out


def ids_function(ids: Any, name: str) -> IdsOf:
    """Return a function of a batch that returns its ids, from the user's function or key.

    Args:
        ids: A function of the batch, or the key of the ids in the batch.
        name: Name of the ids in errors.
    """
    if callable(ids):
        function: IdsOf = ids
        return function

    def ids_at_key(batch: Any) -> Any:
        try:
            return batch[ids]
        except (LookupError, TypeError) as error:
            found = f"the batch is a {type(batch).__name__}"
            if isinstance(batch, Mapping):
                found = f"the batch has keys {', '.join(map(repr, batch))}"
            raise ArgumentError(
                f"{name}: no ids at {ids!r}, because {found}; expected the key of its ids, or a "
                "function of the batch"
            ) from error

    return ids_at_key


def ids_array(ids: Any, name: str) -> Array:
    """Return ids as an array of integers of the same shape.

    Args:
        ids: Tensor, array, or sequence of integers.
        name: Name of the ids in errors.

    Raises:
        RowIndexError: If the ids are not integers.
    """
    # numpy takes some objects for arrays without elements, such as the empty storage that a
    # HeteroData of PyG makes for a missing key.
    if isinstance(ids, Mapping) or not (
        hasattr(ids, "__array__") or isinstance(ids, (Sequence, Number))
    ):
        raise RowIndexError(
            f"{name}: the ids of the batch are a {type(ids).__name__}; expected integers in a "
            "tensor, an array or a list; give a function or a key that returns them"
        )
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(ids, torch.Tensor):
            # The import is local, because the pipeline is loaded without torch.
            from pinfeed.tensors.numpy_torch import to_numpy

            array = to_numpy(ids, name)
        else:
            array = np.asarray(ids)
    except (StoreError, ValueError, TypeError) as error:
        raise RowIndexError(f"{name}: ids of the batch: {described(error)}") from None
    if array.size and array.dtype.kind not in "iu":
        raise RowIndexError(
            f"{name}: the ids of the batch are {array.dtype}; expected integers"
            f"{of_ids(array.dtype)}"
        )
    return array
