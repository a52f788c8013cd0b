"""LoopTable: a table that a loop uses, with its ids and the optimizer that updates it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from pinfeed.errors import ArgumentError, ClosedError, WriteBackError, logger
from pinfeed.pipeline.sources.row_fetch import ids_function
from pinfeed.pipeline.write_check import aliases
from pinfeed.stores import Store
from pinfeed.stores.store import row_nbytes
from pinfeed.training.distributed.sharded_table import ShardedEmbedding
from pinfeed.training.embeddings.batch_rows import BatchRows, loops_over, register, unregister
from pinfeed.training.embeddings.combined_optimizer import row_optimizers
from pinfeed.training.embeddings.optimizer import RowOptimizer
from pinfeed.training.embeddings.table import HostEmbedding

if TYPE_CHECKING:
    from pinfeed.training.row_loop.session import TableSession


RowOptimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
"""A RowOptimizer, a CombinedOptimizer with some, or several of these."""


class LoopTable:
    """A table that a loop uses.

    A loop over ``train_rows`` uses the table alone. Several loops over ``read_rows`` may use it at
    the same time. Their rows have no gradients and are not written back.

    Args:
        table: The table.
        ids: Function that returns the ids that a batch looks up, or the key of the ids in the
            batch.
        optimizer: Optimizer that updates the table, or None.
        reads: Whether the loop reads the rows without training them.

    Attributes:
        names: Names of the stores: ``"weight"``, then the keys of the row-wise state.
        stores: Store of the weights, then the stores of the row-wise state.
        trainable: Whether the rows have gradients in the running loop.
        rows: Rows of the current batch; None between two batches.
        thread: Thread that got these rows.
        sharded: The table, if it is sharded over ranks; otherwise None.
        session: The loop while the table is reserved for it; otherwise None. A longer reference
            would be a cycle, whose memory only the garbage collector frees.
    """

    def __init__(
        self,
        table: HostEmbedding,
        ids: Any,
        optimizer: RowOptimizer | None = None,
        *,
        reads: bool = False,
    ) -> None:
        self.table = table
        self.name = table.name
        self.n_rows = table.num_embeddings
        self.ids_of = ids_function(ids, table.name)
        self.optimizer = optimizer
        self.sharded = table if isinstance(table, ShardedEmbedding) else None
        self.reads = reads
        self.trainable = table.trainable and not reads
        self.names = ["weight"]
        self.stores: list[Store] = [table.store]
        self.rows: BatchRows | None = None
        self.session: TableSession | None = None
        self.thread = 0
        # The ranks of a sharded table exchange dense gradients. step() makes them sparse.
        has_sparse = optimizer is not None and optimizer.gradients == "sparse"
        self._sparse = has_sparse and self.sharded is None
        self._has_warned = False
        if optimizer is not None:
            state = optimizer.tables[table]
            self.names += [row.key for row in state.layout.rows]
            self.stores += state.stores

    @property
    def lent(self) -> BatchRows:
        """Rows of the current batch, which exists."""
        assert self.rows is not None
        return self.rows

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with its optimizer state."""
        return sum(map(row_nbytes, self.stores))

    @property
    def writes(self) -> bool:
        """Whether the loop writes rows back. Only max_norm changes rows of frozen tables."""
        is_changed = self.trainable or self.table.max_norm is not None
        return not self.reads and is_changed and self.table.store.writable

    def require_resumed(self) -> None:
        """Check that the rows and their state are those of this run.

        Raises:
            StoreError: If they are in an existing file that was not resumed.
        """
        self.table.require_resumed()
        if self.optimizer is not None:
            self.optimizer.require_resumed()

    def require_free(self, *, besides: TableSession | None = None) -> None:
        """End other loops that exclude this use of the rows, or check that there are none.

        Args:
            besides: Loop that does not count.

        Raises:
            ClosedError: If another loop does.
        """
        table = self.table
        for other in loops_over(table, self.stores, reads=self.reads, writes=self.writes):
            if other.session is besides:
                continue
            if other.session is not None and not self.reads:
                other.session.end()
            try:
                other.require_compatible(reads=self.reads)
            except ClosedError as error:
                if other.table is table:
                    raise
                raise ClosedError(
                    f"{self.name} and {other.name} have rows in common, and {error}"
                ) from None
        if self.reads and self.sharded is not None and table._training is not None:
            raise ClosedError(
                f"read_rows of {self.name}, which is sharded, inside evaluating(): the ranks "
                "exchange rows for one loop at a time; inside evaluating(), look the rows up "
                "without read_rows, on all ranks at once, or loop over read_rows after the epoch"
            )

    def require_compatible(self, *, reads: bool = False) -> None:
        """Check that the loop of this table permits another use of the rows.

        It permits every use after it has ended. Inside ``evaluating()``, it permits loops that read
        the rows in its thread.

        Args:
            reads: Whether a loop over ``read_rows`` will use the rows.

        Raises:
            ClosedError: If it does not.
        """
        session = self.session
        if session is not None and not (reads and session.is_evaluating):
            session.release_if_over()
        if session is None or self.session is None:
            return
        if reads:
            session.require_evaluating(self.name)
            return
        kind, loop = ("read_rows", "read_rows of") if self.reads else ("train_rows", "rows of")
        raise ClosedError(
            f"a loop over {loop} {self.name} is running; end it first, with break or with "
            f"close() of the loop that {kind} returned"
        )

    def reserve(self, session: TableSession) -> None:
        """Reserve the table for a loop, which is about to begin.

        Raises:
            ClosedError: If another loop excludes this use of the rows.
        """
        table = self.table
        if not self.reads:
            table.require_not_lent()
        self.session = session
        if self.reads:
            table._readers[self] = None
        else:
            table._training = self
        # Each loop registers before it checks, so one sees the other.
        register(self)
        try:
            self.require_free(besides=session)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the reservation of ``reserve``. A second call does nothing."""
        if self.session is None:
            return
        self.unbind()
        unregister(self)
        self.table._readers.pop(self, None)
        if self.table._training is self:
            self.table._training = None
        self.session = None

    def bind(self, rows: BatchRows, state: list[torch.Tensor]) -> None:
        """Lend the rows of a batch to the table, and their state to its optimizer."""
        rows.sparse = self._sparse
        self.thread = threading.get_ident()
        self.rows = rows
        if not self.reads:
            self.table._lend(rows)
        if self.optimizer is not None:
            self.optimizer.bind(self.table, rows.owned, state, rows.weight)

    def unbind(self) -> None:
        """Take the rows of a batch from the table and its optimizer."""
        self.rows = None
        if not self.reads:
            self.table._lend(None)
        if self.optimizer is not None:
            self.optimizer.release(self.table)

    def check_step(self) -> None:
        """Warn once if a training step has ended and gradients of the rows were not used.

        Raises:
            WriteBackError: If rows were changed that are not written back.
        """
        rows = self.lent
        if self.reads:
            if rows.touched:
                raise WriteBackError(
                    f"rows of {self.name} were changed in a loop over read_rows, which writes "
                    "nothing back; change them in a loop over train_rows, or change a clone"
                )
            return
        if self.optimizer is None:
            is_unused = rows.weight.grad is not None
            problem = (
                "train_rows has no optimizer for it: its rows stay unchanged, unless the training "
                "step changes them directly; give optimizer=pinfeed.RowOptimizer(...)"
            )
        else:
            is_unused = self.optimizer.tables[self.table].has_unused_gradients
            problem = (
                "the training step ended without a step of its optimizer: its rows stay "
                "unchanged, and the gradients are dropped with the batch; call step() of the "
                "RowOptimizer for each batch (a GradScaler may skip a step)"
            )
        if is_unused and not self._has_warned and not rows.touched:
            self._has_warned = True
            logger.warning("%s has gradients, but %s", self.name, problem)

    def changed_values(self) -> list[torch.Tensor | None] | None:
        """Return the values to write to each store, or None if nothing has changed.

        After a step, these are weights and state. Without a step, they are only the weights,
        because the program may have changed them directly.
        """
        rows = self.lent
        touched = rows.touched
        # torch does not record changes through weight.data.
        rows.may_be_trained |= self.table.training
        state = None
        if not self.trainable:
            # On a read-only store, max_norm has changed the rows on the device alone. Every lookup
            # does so again.
            if not touched or not self.table.store.writable:
                return None
            self._check_frozen()
        elif self.optimizer is not None:
            state = self.optimizer.changed(self.table)
        may_have_changed = touched or (rows.may_be_trained and self.table.store.writable)
        if state is None and not may_have_changed:
            return None
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
            ArgumentError: If another table of a loop shares the rows, and would miss the change.
        """
        every = loops_over(self.table, self.stores, writes=True)
        others = [other for other in every if other.table is not self.table]
        if not self.writes and others:
            raise ArgumentError(
                f"the training step changed rows of {self.name}, which is frozen and shares "
                f"them with {others[0].name}; nothing of this batch was written; change rows in a "
                "loop with only one of these tables"
            )


def trained_tables(tables: Any, optimizer: RowOptimizers) -> list[LoopTable]:
    """Return the tables of ``train_rows``, each with its optimizer.

    Raises:
        ArgumentError: If ``tables`` does not map tables to their ids, or tables share rows that the
            loop writes. Also if ``optimizer`` has no RowOptimizer, or two for the same table.
    """
    optimizers = _optimizers_by_table(_checked(tables), optimizer)
    found = [LoopTable(table, ids, optimizers.get(table)) for table, ids in tables.items()]
    require_separate(found)
    return found


def read_tables(tables: Any) -> list[LoopTable]:
    """Return the tables of ``read_rows``. They may share rows.

    Raises:
        ArgumentError: If ``tables`` does not map tables to their ids.
    """
    return [LoopTable(table, ids, reads=True) for table, ids in _checked(tables).items()]


def require_separate(tables: Sequence[LoopTable]) -> None:
    """Check that the tables of one loop share no rows that it writes.

    Raises:
        ArgumentError: If two tables do.
    """
    names = [f"{used.name}.{name}" for used in tables for name in used.names]
    stores = [store for used in tables for store in used.stores]
    written = [used.writes and store.writable for used in tables for store in used.stores]
    if shared := aliases(names, stores, written):
        raise ArgumentError(
            f"{shared} have rows in common; pass a shared table once, as a single HostEmbedding "
            "that is looked up several times (frozen tables may share rows)"
        )


def _checked(tables: Any) -> Mapping[HostEmbedding, Any]:
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
