"""ShardedBatchRows: the rows of a sharded table in a training step.

At the beginning of a step, ranks exchange the deferred rows. In ``optimizer.step()``, they send
gradients to the ranks that own the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, VerificationError
from pinfeed.rows.orders import Rows
from pinfeed.training.distributed.lockstep import Lockstep, RankStep
from pinfeed.training.distributed.row_exchange import Counts, RowPositions
from pinfeed.training.embeddings.batch_rows import BatchRows


class RankLink(NamedTuple):
    """The exchange of one table's rows in a batch."""

    lockstep: Lockstep
    numbers: tuple[int, int]
    """Number of the batch, and number of the table in the loop."""
    counts: Counts
    mean: bool
    """Whether gradients are averaged over ranks, instead of summed."""


class OwnRows(NamedTuple):
    """Rows of a table on their own rank."""

    rows: Rows
    """Row indices in the store of the rank, ascending, each once."""
    values: torch.Tensor
    """Values of the rows on the device."""


class ShardedBatchRows(BatchRows):
    """The rows that this rank looks up, and its own rows that any rank looks up.

    Args:
        rows: Ids that this rank looks up, ascending, each once.
        ids: The same ids on the device.
        values: Rows of these ids on the device. Deferred rows are not filled yet.
        positions: As for ``BatchRows``.
        own: Own rows that any rank looks up.
        row_positions: Positions of the rows to exchange, on the device.
        link: Exchange of the rows.
    """

    def __init__(
        self,
        rows: Rows,
        ids: torch.Tensor,
        values: torch.Tensor,
        positions: Sequence[tuple[torch.Tensor, int, torch.Tensor]],
        own: OwnRows,
        row_positions: RowPositions,
        link: RankLink,
    ) -> None:
        super().__init__(rows, ids, values, positions)
        self._stored_rows = own.rows
        self._owned = nn.Parameter(own.values, requires_grad=False)
        self.row_positions = row_positions
        self.link = link
        self._is_stepped = False

    @property
    def stored_rows(self) -> Rows:
        return self._stored_rows

    @property
    def owned(self) -> nn.Parameter:
        return self._owned

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self._owned, *self.row_positions]

    @property
    def touched(self) -> bool:
        if super().touched:
            raise ArgumentError(
                "the training step changed rows of a sharded table, which are copies of rows on "
                "other ranks; change them only through gradients and the optimizer"
            )
        return False

    def positions(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        if self._is_stepped:
            raise ArgumentError(
                f"{name} was looked up after step(): the updated rows are on their own ranks, and "
                "are sent with the next batch; look rows up before step(), or on all ranks inside "
                "evaluating()"
            )
        return super().positions(ids, name)

    def require_gradients(self) -> None:
        super().require_gradients()
        self._owned.requires_grad_()

    def collect_gradients(self, every: Sequence[Any]) -> None:
        """Add the gradients of all ranks on the ranks that own the rows, in the order of ranks.

        All ranks call this at once.

        Raises:
            RankError: If another rank takes another step, or has died.
        """
        for table in every:
            table._is_stepped = True
            # It stays None if no rank has gradients for this table.
            table._owned.grad = None
        has_gradient = [table.weight.grad is not None for table in every]
        _exchange(RankStep.STEP, every, has_gradient, _add_gradients)


def receive_deferred(every: Sequence[ShardedBatchRows]) -> None:
    """Exchange the deferred rows of a batch, which earlier steps could still change until now.

    All ranks call this at once.

    Raises:
        RankError: If another rank takes another step, or has died.
    """
    has_deferred = [any(table.link.counts.deferred_out) for table in every]
    _exchange(RankStep.NEXT, every, has_deferred, exchange_deferred)


def check_received(every: Sequence[ShardedBatchRows]) -> None:
    """Compare rows that other ranks sent with those in their stores.

    Raises:
        VerificationError: If they differ.
    """
    sent = [table.owned.detach().index_select(0, table.row_positions.given) for table in every]
    n_given = [table.link.counts.given for table in every]
    n_wanted = [table.link.counts.wanted for table in every]
    lockstep = every[0].link.lockstep
    received = lockstep.exchange_rows("rows to check", sent, n_given, n_wanted)
    for table, expected in zip(every, received, strict=True):
        order = table.row_positions.order
        found = table.weight.detach().index_select(0, order)
        differs = (expected.view(torch.uint8) != found.view(torch.uint8)).any(1)
        if wrong := table.rows[order[differs].cpu().numpy()].tolist():
            batch, number = table.link.numbers
            raise VerificationError(
                f"batch {batch}: table {number} of the loop, row {wrong[0]} differs from the row "
                f"on its own rank ({len(wrong)} of {len(found)} rows differ)"
            )


def exchange_deferred(tables: Sequence[ShardedBatchRows]) -> None:
    """Exchange the deferred rows of some tables."""
    sent = [
        table.owned.detach().index_select(0, table.row_positions.deferred_out) for table in tables
    ]
    n_sent = [table.link.counts.deferred_out for table in tables]
    n_received = [table.link.counts.deferred_in for table in tables]
    received = tables[0].link.lockstep.exchange_rows("late rows", sent, n_sent, n_received)
    for table, rows in zip(tables, received, strict=True):
        # This does not count as a change of the training step, because torch does not record
        # changes through data.
        table.weight.data.index_copy_(0, table.row_positions.deferred_in, rows)


@torch.no_grad()
def _add_gradients(tables: Sequence[ShardedBatchRows]) -> None:
    """Send gradients to the ranks that own the rows, and add them there in the order of ranks."""
    sent = []
    for table in tables:
        gradient = table.weight.grad
        if gradient is None:
            gradient = torch.zeros_like(table.weight)
        sent.append(gradient.index_select(0, table.row_positions.order))
    n_sent = [table.link.counts.wanted for table in tables]
    n_received = [table.link.counts.given for table in tables]
    lockstep = tables[0].link.lockstep
    received = lockstep.exchange_rows("gradients", sent, n_sent, n_received)
    for table, gradients in zip(tables, received, strict=True):
        by_row = gradients.index_select(0, table.row_positions.by_row)
        lengths = table.row_positions.n_by_row
        # unsafe=True skips a check of the lengths, for which the host would wait for the device.
        total = torch.segment_reduce(by_row, "sum", lengths=lengths, axis=0, unsafe=True)
        table.owned.grad = total.div_(lockstep.size) if table.link.mean else total


def _exchange(
    step: RankStep,
    tables: Sequence[ShardedBatchRows],
    wishes: Sequence[bool],
    exchange: Callable[[Sequence[ShardedBatchRows]], None],
) -> None:
    """Agree on a step, and exchange rows of the tables that at least one rank wants to exchange.

    Args:
        step: The step.
        tables: The tables.
        wishes: Whether this rank wants to exchange rows of each table.
        exchange: Function that exchanges rows of tables.
    """
    link = tables[0].link
    of_ranks = link.lockstep.agree(step, *link.numbers, numbers=wishes)
    are_wanted = np.any(of_ranks, axis=0).tolist()
    if wanted := [table for table, wish in zip(tables, are_wanted, strict=True) if wish]:
        with link.lockstep.no_report():
            exchange(wanted)
