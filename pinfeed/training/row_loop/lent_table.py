"""LentTable: a table whose rows a loop lends, with the optimizer that updates them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.pipeline.sources.row_fetch import ids_function
from pinfeed.pipeline.write_check import aliases
from pinfeed.stores import Store
from pinfeed.training.distributed.table import ShardedEmbedding
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.embeddings.combined_optimizer import row_optimizers
from pinfeed.training.embeddings.optimizer import RowOptimizer
from pinfeed.training.embeddings.shared_rows import forget_lent, lent_with, note_lent
from pinfeed.training.embeddings.source import TableSpec
from pinfeed.training.embeddings.table import HostEmbedding

if TYPE_CHECKING:
    from pinfeed.training.row_loop.loop import RowLoop

logger = logging.getLogger("pinfeed")

RowOptimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
"""A RowOptimizer, a CombinedOptimizer with some, or several of these."""


class LentTable:
    """Table whose rows a loop lends for each step, with the optimizer that updates them.

    Args:
        table: The table.
        ids: Function that returns the ids that a batch looks up, or the key of the ids in the
            batch.
        optimizer: Optimizer that updates the table, or None.

    Attributes:
        names: Names of the stores: ``"weight"``, then the keys of the row-wise state.
        stores: Store of the weights, then the stores of the row-wise state.
        trainable: Whether the rows have gradients in the running loop.
    """

    may_write = True
    """Whether the loop may write the rows back."""

    def __init__(self, table: HostEmbedding, ids: Any, optimizer: RowOptimizer | None) -> None:
        self.table = table
        self.optimizer = optimizer
        self.trainable = table.trainable
        self.names = ["weight"]
        self.stores: list[Store] = [table.store]
        self._ids_of = ids_function(ids, table.name)
        # The ranks of a sharded table exchange dense gradients. step() makes them sparse.
        self._sparse = (
            optimizer is not None
            and optimizer.gradients == "sparse"
            and not isinstance(table, ShardedEmbedding)
        )
        self._has_warned = False
        if optimizer is not None:
            state = optimizer.tables[table]
            self.names += [row.key for row in state.layout.rows]
            self.stores += state.stores

    @property
    def spec(self) -> TableSpec:
        """The table as the source of the batches needs it."""
        table = self.table
        return TableSpec(table.name, self._ids_of, self.stores, table.num_embeddings)

    @property
    def batch_rows(self) -> BatchRows:
        """Rows of the current batch."""
        return self.table.block

    def require_resumed(self) -> None:
        """Check that the rows and their state are those of this run.

        Raises:
            StoreError: If they are in an existing file that was not resumed.
        """
        self.table.require_resumed()
        if self.optimizer is not None:
            self.optimizer.require_resumed()

    @property
    def writes(self) -> bool:
        """Whether the loop writes rows back. Only max_norm changes rows of frozen tables."""
        is_changed = self.trainable or self.table.max_norm is not None
        return self.may_write and is_changed and self.table.store.writable

    def require_idle(self) -> None:
        """Check that a loop may lend the rows now.

        Raises:
            ClosedError: If another loop lends the rows.
        """
        self.table.require_not_lent()
        self._require_separate(None)

    def _require_separate(self, loop: RowLoop[Any] | None) -> None:
        """Check that no loop except ``loop`` lends a table that shares the rows.

        Raises:
            ClosedError: If another loop does, and one of the two loops writes.
        """
        for other in lent_with(self.table, self.stores, write=self.writes):
            if loop is None or other._lender is not loop:
                try:
                    self._require_other(other)
                except ClosedError as error:
                    raise ClosedError(
                        f"{self.table.name} and {other.name} have rows in common, and {error}"
                    ) from None

    def _require_other(self, other: HostEmbedding) -> None:
        """Check that the rows may be lent although a loop lends ``other``.

        Raises:
            ClosedError: If they may not be lent.
        """
        other.require_not_lent()

    def update(self) -> bool:
        """Note whether the table is trainable now, and return whether it has become trainable."""
        before = self.trainable
        self.trainable = self.table.trainable
        return self.trainable and not before

    def is_reserved(self, loop: RowLoop[Any]) -> bool:
        """Return whether the table is reserved for ``loop``."""
        return self.table._lender is loop

    def begin(self, loop: RowLoop[Any]) -> None:
        """Reserve the table for ``loop``, which is about to begin.

        Raises:
            ClosedError: If another loop lends the rows.
        """
        self.table._take(loop)
        # Two loops may begin in two threads. Each checks after its own note, so one sees the other.
        note_lent(self)
        try:
            self._require_separate(loop)
        except BaseException:
            forget_lent(self)
            self.table._release()
            raise

    def end(self) -> None:
        """End the reservation of ``begin``, after the loop."""
        self.unbind()
        forget_lent(self)
        self.table._release()

    def bind(self, rows: BatchRows, state: list[torch.Tensor]) -> None:
        """Lend the rows of a batch to the table, and their state to its optimizer."""
        rows.sparse = self._sparse
        self.table._batch_rows = rows
        if self.optimizer is not None:
            self.optimizer.bind(self.table, rows.owned, state, rows.weight)

    def unbind(self) -> None:
        """Take the rows of a batch from the table and its optimizer."""
        self.table._batch_rows = None
        if self.optimizer is not None:
            self.optimizer.release(self.table)

    def check_step(self) -> None:
        """Warn once if a training step has ended and gradients of the rows were not used."""
        rows = self.batch_rows
        if self._has_warned or rows.touched:
            return
        if self.optimizer is None and rows.weight.grad is not None:
            self._has_warned = True
            logger.warning(
                "%s has gradients, but train_rows has no optimizer for it: its rows stay "
                "unchanged, unless the training step changes them directly; give "
                "optimizer=pinfeed.RowOptimizer(...)",
                self.table.name,
            )
        if self.optimizer is not None and self.optimizer.tables[self.table].has_unused_gradients:
            self._has_warned = True
            logger.warning(
                "%s has gradients, but the training step ended without a step of its optimizer: "
                "its rows stay unchanged, and the gradients are dropped with the batch; call "
                "step() of the RowOptimizer for each batch (a GradScaler may skip a step)",
                self.table.name,
            )

    def changed_values(self) -> list[torch.Tensor | None] | None:
        """Return the values to write to each store, or None if nothing has changed.

        After a step, these are weights and state. Without a step, they are only the weights,
        because the program may have changed them directly.
        """
        rows = self.batch_rows
        touched = rows.touched
        state = None
        if self.optimizer is not None and self.trainable:
            state = self.optimizer.changed(self.table)
        if state is None and not touched:
            # torch does not record changes through weight.data.
            may_be_trained = rows.may_be_trained or self.table.training
            if not (self.trainable and may_be_trained and self.table.store.writable):
                return None
        if not self.trainable and not self.table.store.writable:
            # max_norm has changed the rows on the device. Every lookup does so again.
            return None
        if not self.trainable:
            self._check_frozen()
        kept: Sequence[torch.Tensor | None] = [None] * (len(self.stores) - 1)
        if state is not None:
            kept = state
        return [
            None if tensor is None else tensor.detach().contiguous()
            for tensor in (rows.owned, *kept)
        ]

    def _check_frozen(self) -> None:
        """Check that no other table shares directly changed rows of a frozen table.

        Raises:
            ArgumentError: If another lent table shares the rows, and would miss the change.
        """
        if not self.writes and (others := lent_with(self.table, self.stores, write=True)):
            raise ArgumentError(
                f"the training step changed rows of {self.table.name}, which is frozen and shares "
                f"them with {others[0].name}; nothing of this batch was written; change rows in a "
                "loop with only one of these tables"
            )


def lent_tables(tables: Any, optimizer: RowOptimizers) -> list[LentTable]:
    """Return the tables of ``train_rows``, each with its optimizer.

    Raises:
        ArgumentError: If ``tables`` does not map tables to their ids, or tables share rows that the
            loop writes. Also if ``optimizer`` has no RowOptimizer, or two for the same table.
    """
    optimizers = _optimizers_by_table(checked_tables(tables), optimizer)
    found = [LentTable(table, ids, optimizers.get(table)) for table, ids in tables.items()]
    require_separate(found)
    return found


def require_separate(tables: Sequence[LentTable]) -> None:
    """Check that the tables of one loop share no rows that it writes.

    Raises:
        ArgumentError: If two tables do.
    """
    names = [f"{lent.table.name}.{name}" for lent in tables for name in lent.names]
    stores = [store for lent in tables for store in lent.stores]
    written = [lent.writes and store.writable for lent in tables for store in lent.stores]
    if shared := aliases(names, stores, written):
        raise ArgumentError(
            f"{shared} have rows in common; pass a shared table once, as a single HostEmbedding "
            "that is looked up several times (frozen tables may share rows)"
        )


def checked_tables(tables: Any) -> Mapping[HostEmbedding, Any]:
    """Return the user's ``tables``, if they are a mapping with at least one table."""
    if not isinstance(tables, Mapping):
        kinds = type(tables).__name__
    elif not tables or not all(isinstance(table, HostEmbedding) for table in tables):
        kinds = ", ".join(sorted({type(table).__name__ for table in tables}))
    else:
        return tables
    raise ArgumentError(
        f"tables: got {kinds or 'none'}; expected {{table: ids_of_batch}} with one or several "
        "HostEmbeddings"
    )


def _optimizers_by_table(
    tables: Mapping[HostEmbedding, Any], optimizer: Any
) -> dict[HostEmbedding, RowOptimizer]:
    """Return the optimizer of each table that has one."""
    if isinstance(optimizer, type) or not isinstance(
        optimizer, (torch.optim.Optimizer, Iterable, NoneType)
    ):
        raise ArgumentError(
            f"optimizer={optimizer!r}: expected a RowOptimizer, or several: "
            "pinfeed.RowOptimizer(torch.optim.Adam, [table])"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = [optimizer]
    found: dict[HostEmbedding, RowOptimizer] = {}
    for given in optimizer or ():
        rows = row_optimizers(given)
        if not rows:
            raise ArgumentError(
                f"optimizer: got {type(given).__name__}; expected RowOptimizers, or "
                "CombinedOptimizers that contain them (step optimizers of dense parameters in the "
                "training step)"
            )
        for one in rows:
            for table in one.tables:
                if table in found:
                    raise ArgumentError(f"{table.name} is trained by two optimizers; expected one")
                found[table] = one
    return found
