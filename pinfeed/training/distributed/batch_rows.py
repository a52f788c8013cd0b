"""ShardedBatchRows: the rows of a sharded table in a training step.

At the beginning of a step, ranks exchange the deferred rows. In ``optimizer.step()``, they send
gradients to the ranks that own the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from pinfeed.errors import ArgumentError, VerificationError
from pinfeed.rows.orders import Rows
from pinfeed.training.distributed.lockstep import MAX_FLAGS, Lockstep, RankStep
from pinfeed.training.distributed.row_exchange import Counts
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.embeddings.source import DeviceBatch, DeviceRows

T = TypeVar("T")


class RowPositions(NamedTuple):
    """The positions of an ``ExchangePlan`` on the device, under the same names."""

    order: torch.Tensor
    given: torch.Tensor
    by_row: torch.Tensor
    n_by_row: torch.Tensor
    deferred_in: torch.Tensor
    deferred_out: torch.Tensor


@dataclass(frozen=True, eq=False)
class ShardedDeviceRows(DeviceRows):
    """The rows of a sharded table that a batch looks up, on the device.

    ``rows`` and ``tensors`` are this rank's own rows that any rank looks up.
    """

    wanted: Rows
    """The ids that this rank looks up."""
    values: torch.Tensor
    """The rows of ``wanted``. Deferred rows are not filled yet."""
    row_positions: RowPositions
    counts: Counts
    mean: bool
    """Whether gradients are averaged over ranks, instead of summed."""
    numbers: tuple[int, int]
    """Number of the batch, and number of the table in the loop."""
    lockstep: Lockstep

    def batch_rows(self, trainable: bool) -> ShardedBatchRows:
        return ShardedBatchRows(self, trainable)


@dataclass(frozen=True, eq=False)
class ShardedDeviceBatch(DeviceBatch):
    """A batch on the device, with the rows of sharded tables that it looks up."""

    tables: Sequence[ShardedDeviceRows]

    def batch_rows(self, trainable: Sequence[bool]) -> list[BatchRows]:
        for tables in _in_flag_groups(self.tables):
            wishes = [any(table.counts.deferred_out) for table in tables]
            lockstep = tables[0].lockstep
            deferred = _agree_on(lockstep, RankStep.NEXT, tables[0].numbers, tables, wishes)
            if deferred:
                with lockstep.no_report():
                    exchange_deferred(deferred)
        return super().batch_rows(trainable)

    def check(self, number: int) -> None:
        sent = [
            table.tensors[0].index_select(0, table.row_positions.given) for table in self.tables
        ]
        n_given = [table.counts.given for table in self.tables]
        n_wanted = [table.counts.wanted for table in self.tables]
        lockstep = self.tables[0].lockstep
        received = lockstep.exchange_rows("rows to check", sent, n_given, n_wanted)
        for table, expected in zip(self.tables, received, strict=True):
            order = table.row_positions.order
            found = table.values.detach().index_select(0, order)
            differs = (expected.view(torch.uint8) != found.view(torch.uint8)).any(1)
            if wrong := table.wanted[order[differs].cpu().numpy()].tolist():
                raise VerificationError(
                    f"batch {number}: table {table.numbers[1]} of the loop, row {wrong[0]} differs "
                    f"from the row on its own rank ({len(wrong)} of {len(found)} rows differ)"
                )


class ShardedBatchRows(BatchRows):
    """The rows that this rank looks up, and its own rows that any rank looks up.

    Args:
        rows: Both kinds of rows.
        trainable: Whether the rows have gradients.
    """

    def __init__(self, rows: ShardedDeviceRows, trainable: bool) -> None:
        weight = nn.Parameter(rows.values, requires_grad=trainable)
        super().__init__(rows.wanted, rows.ids, weight, rows.positions)
        self._owned = nn.Parameter(rows.tensors[0], requires_grad=trainable)
        self._device_rows = rows
        self._is_stepped = False

    @property
    def owned(self) -> nn.Parameter:
        return self._owned

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self._owned, *self._device_rows.row_positions]

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

    def collect_gradients(self, every: Sequence[Any]) -> None:
        """Add the gradients of all ranks on the ranks that own the rows, in the order of ranks.

        All ranks call this at once.

        Raises:
            RankError: If another rank takes another step, or has died.
        """
        for tables in _in_flag_groups(every):
            for table in tables:
                table._is_stepped = True
                # It stays None if no rank has gradients for this table.
                table._owned.grad = None
            first = tables[0]._device_rows
            wishes = [table.weight.grad is not None for table in tables]
            stepped = _agree_on(first.lockstep, RankStep.STEP, first.numbers, tables, wishes)
            if stepped:
                with first.lockstep.no_report():
                    _add_gradients(stepped)


def exchange_deferred(tables: Sequence[ShardedDeviceRows]) -> None:
    """Exchange the rows that earlier steps could still change until now."""
    sent = [table.tensors[0].index_select(0, table.row_positions.deferred_out) for table in tables]
    n_sent = [table.counts.deferred_out for table in tables]
    n_received = [table.counts.deferred_in for table in tables]
    received = tables[0].lockstep.exchange_rows("late rows", sent, n_sent, n_received)
    for table, rows in zip(tables, received, strict=True):
        table.values.index_copy_(0, table.row_positions.deferred_in, rows)


@torch.no_grad()
def _add_gradients(tables: Sequence[ShardedBatchRows]) -> None:
    """Send gradients to the ranks that own the rows, and add them there in the order of ranks."""
    every = [table._device_rows for table in tables]
    sent = []
    for table, rows in zip(tables, every, strict=True):
        gradient = table.weight.grad
        if gradient is None:
            gradient = torch.zeros_like(table.weight)
        sent.append(gradient.index_select(0, rows.row_positions.order))
    n_sent = [rows.counts.wanted for rows in every]
    n_received = [rows.counts.given for rows in every]
    lockstep = every[0].lockstep
    received = lockstep.exchange_rows("gradients", sent, n_sent, n_received)
    for table, rows, gradients in zip(tables, every, received, strict=True):
        by_row = gradients.index_select(0, rows.row_positions.by_row)
        lengths = rows.row_positions.n_by_row
        # unsafe=True skips a check of the lengths, for which the host would wait for the device.
        total = torch.segment_reduce(by_row, "sum", lengths=lengths, axis=0, unsafe=True)
        table.owned.grad = total.div_(lockstep.size) if rows.mean else total


def _agree_on(
    lockstep: Lockstep,
    step: RankStep,
    numbers: tuple[int, int],
    tables: Sequence[T],
    wishes: Sequence[bool],
) -> list[T]:
    """Agree on a step, and return the tables that at least one rank wants.

    Args:
        lockstep: The ranks' lockstep.
        step: The step.
        numbers: Number of the batch and of the first table.
        tables: Tables, at most ``MAX_FLAGS``.
        wishes: Whether this rank wants each of the tables.
    """
    own_flags = sum(wish << i for i, wish in enumerate(wishes))
    _, flags = lockstep.agree(step, *numbers, flags=own_flags)
    return [table for i, table in enumerate(tables) if flags >> i & 1]


def _in_flag_groups(tables: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the tables in groups of at most ``MAX_FLAGS``, the number of flags of a message."""
    for i in range(0, len(tables), MAX_FLAGS):
        yield tables[i : i + MAX_FLAGS]
