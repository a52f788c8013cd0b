"""BatchRows: the rows of a table that one batch looks up; and the tables of running loops."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import RowIndexError
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.stores.overlap import share_rows
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.validation.suggestions import of_ids

if TYPE_CHECKING:
    from pinfeed.training.embeddings.table import HostEmbedding
    from pinfeed.training.row_loop.loop_table import LoopTable


class BatchRows:
    """The rows of a table that one batch looks up.

    Args:
        rows: Row indices in the table, ascending, each once, shape (n,).
        ids: The same row indices on the device, int64.
        values: Values of the rows on the device, shape (n, embedding_dim).
        positions: Tensors of ids that the batch contains, each with its version and the positions
            of its ids among ``rows``. A lookup of such a tensor needs no search, as long as it has
            this version.
    """

    def __init__(
        self,
        rows: Rows,
        ids: torch.Tensor,
        values: torch.Tensor,
        positions: Sequence[tuple[torch.Tensor, int, torch.Tensor]],
    ) -> None:
        self.rows = rows
        self.ids = ids
        self.weight = nn.Parameter(values, requires_grad=False)
        self.sparse = False
        """Whether lookups give ``weight`` sparse gradients, as ``nn.Embedding(sparse=True)``."""
        self.may_be_trained = False
        """Whether the training step got the rows in training mode.

        It may then have changed them through ``weight.data``, which torch does not record.
        """
        self._version = version_of(self.weight)
        self._prepared = positions

    @property
    def stored_rows(self) -> Rows:
        """Indices of the rows that are in the store of this process, and are written back to it."""
        return self.rows

    @property
    def owned(self) -> nn.Parameter:
        """Parameter that the optimizer updates and that is written back to the store."""
        return self.weight

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the rows, without the ids that belong to the program."""
        return [self.ids, self.weight, *(found for _, _, found in self._prepared)]

    @property
    def touched(self) -> bool:
        """Whether ``weight`` was changed in place, other than through ``weight.data``."""
        return version_of(self.weight) != self._version

    def positions(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        """Return the positions of ids among the rows, in the shape of ``ids``.

        Raises:
            RowIndexError: If an id is not among the rows. On a GPU, an assertion fails on the
                device instead, so that the host does not wait for the result.
        """
        positions, is_found = self._search(ids, name)
        if is_found is None:
            return positions
        if self.ids.device.type == "cpu" or not len(self.rows):
            if not bool(is_found.all()):
                row = int(ids.to(self.ids.device, torch.int64)[~is_found][0])
                raise RowIndexError(
                    f"{name}: id {row} was not announced for this batch; expected the function of "
                    "this table in train_rows to return every id that the step looks up (a tuple "
                    "of tensors for several inputs); to evaluate other rows, use "
                    "`with batches.evaluating():`, or eval mode and torch.no_grad() if the table "
                    "is not sharded"
                )
        else:
            torch._assert_async(
                is_found.all(), f"{name}: an id was not announced to train_rows for this batch"
            )
        return positions

    def find(self, ids: torch.Tensor, name: str) -> torch.Tensor | None:
        """Return the positions of ids among the rows, or None if an id is not among the rows.

        For ids without prepared positions, the host waits for the device.

        Raises:
            RowIndexError: If the ids are not integers.
        """
        positions, is_found = self._search(ids, name)
        return positions if is_found is None or bool(is_found.all()) else None

    def newest(self, rows: Rows, values: torch.Tensor) -> torch.Tensor:
        """Return rows of the table on the device, with the present values of this batch's rows.

        Args:
            rows: Row indices, ascending, each once, shape (n,).
            values: Values of the rows in the store, on the CPU, shape (n, embedding_dim).
        """
        device = self.weight.device
        found = np.flatnonzero(np.isin(rows, self.rows))
        positions = torch.from_numpy(np.searchsorted(self.rows, rows[found])).to(device)
        current = self.weight.detach().index_select(0, positions)
        return values.to(device).index_copy(0, torch.from_numpy(found).to(device), current)

    def _search(self, ids: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return positions of ids, and a mask of the ids that are among the rows.

        The mask is None if the positions were prepared.

        Raises:
            RowIndexError: If the ids are not integers.
        """
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
            raise RowIndexError(f"{name}: ids of {ids.dtype}; expected integers{of_ids(ids.dtype)}")
        for known, version, found in self._prepared:
            # Otherwise, a transform or the training step has changed the ids.
            if ids is known and version_of(ids) == version:
                return found, None
        wanted = ids.to(self.ids.device, torch.int64, non_blocking=True)
        if not len(self.rows):
            return wanted, torch.zeros_like(wanted, dtype=torch.bool)
        # torch warns of ids that are not contiguous, such as a column of a batch.
        positions = torch.searchsorted(self.ids, wanted.contiguous()).clamp_(max=len(self.rows) - 1)
        return positions, self.ids[positions] == wanted

    def require_gradients(self) -> None:
        """Make the rows trainable, before the training step."""
        self.weight.requires_grad_()

    def collect_gradients(self, every: Sequence[Any]) -> None:
        """Move gradients from ``weight`` to ``owned``, for this table and others of its kind.

        Here, both are the same parameter, so this does nothing.
        """


def position_in(rows: Rows, row: int | None) -> int | None:
    """Return the position of a row index in ascending row indices; None if it is not there.

    Args:
        rows: Row indices, ascending.
        row: The row index, or None.
    """
    if row is None:
        return None
    position = int(np.searchsorted(rows, row))
    return position if position < len(rows) and rows[position] == row else None


# There is no lock, because the garbage collector may end a loop and call unregister while this
# thread is inside any function of this module. Each change and each copy is atomic, in C.
_registered: set[weakref.ref[LoopTable]] = set()

# The loops of the parent process do not run in a forked process.
os.register_at_fork(after_in_child=_registered.clear)


def register(used: LoopTable) -> None:
    """Register a table that a running loop uses, until ``unregister``."""
    _registered.add(weakref.ref(used, _registered.discard))


def unregister(used: LoopTable) -> None:
    """Note that the loop has ended. A second call does nothing."""
    _registered.discard(weakref.ref(used))


def loops_over(
    table: HostEmbedding, stores: Sequence[Store], *, reads: bool = False, writes: bool = False
) -> list[LoopTable]:
    """Return the tables of running loops that exclude a use of ``table``.

    A loop over the same table excludes the use, unless both only read. A loop over another table
    excludes it if both have rows in common, and one of the two writes them.

    Args:
        table: The table.
        stores: Stores of the table to compare with those of other tables.
        reads: Whether the caller reads the rows without training them.
        writes: Whether the caller writes to the stores.
    """
    # Read once, because the loop of another thread may end now.
    training = table._training
    found = [] if training is None else [training]
    if not reads:
        found += table._readers
    every = [reference() for reference in _registered.copy()] if _registered else []
    for used in every:
        if used is None or used.table is table or not (writes or used.writes):
            continue
        if any(itertools.starmap(share_rows, itertools.product(stores, used.stores))):
            found.append(used)
    return found
