"""ShardedBatchRows: rows of a sharded table in the body of a loop; what comes late comes, and gradients go to who has the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from pinfeed.errors import ArgumentError, VerificationError
from pinfeed.rows.orders import Rows
from pinfeed.training.distributed.lockstep import MOST_FLAGS, Lockstep, Step
from pinfeed.training.distributed.row_exchange import Counts
from pinfeed.training.embeddings.source import FedBatch, FedRows
from pinfeed.training.embeddings.table import BatchRows

T = TypeVar("T")


class RowPlaces(NamedTuple):
    """Positions on the device, as ``Traded`` has them."""

    order: torch.Tensor
    """Of the rows that this rank wants, those that rank 0 has first, and so on."""
    given: torch.Tensor
    """Of its own rows, those that rank 0 wants first, and so on."""
    by_row: torch.Tensor
    """Of what is given, by row and by rank."""
    n_by_row: torch.Tensor
    """How many ranks want each of its own rows."""
    late_to: torch.Tensor
    """Of ``order``, what comes late."""
    late_from: torch.Tensor
    """Of ``given``, what is sent late."""


@dataclass(frozen=True, eq=False)
class SharedRows(FedRows):
    """The rows of a sharded table that a batch looks up: ``rows`` and ``tensors`` are this rank's own, that any rank wants."""

    wanted: Rows
    """The ids that this rank looks up."""
    values: torch.Tensor
    """These rows, without those that come late."""
    places: RowPlaces
    counts: Counts
    mean: bool
    """Whether gradients are averaged over ranks, else summed."""
    at: tuple[int, int]
    """Number of the batch, and of the table in the loop."""
    meeting: Lockstep

    def block(self, trainable: bool) -> ShardedBatchRows:
        return ShardedBatchRows(self, trainable)


@dataclass(frozen=True, eq=False)
class ShardedBatch(FedBatch):
    """A batch with rows of sharded tables."""

    tables: Sequence[SharedRows]

    def blocks(self, trainable: Sequence[bool]) -> list[BatchRows]:
        for some in _few(self.tables):
            late = _agreed(
                some[0].meeting,
                Step.NEXT,
                some[0].at,
                some,
                [any(table.counts.late_from) for table in some],
            )
            if late:
                with late[0].meeting.committed():
                    bring_late(late)
        return super().blocks(trainable)

    def check(self, number: int) -> None:
        sent = [table.tensors[0].index_select(0, table.places.given) for table in self.tables]
        n_given, n_wanted = (
            [getattr(table.counts, name) for table in self.tables] for name in ("given", "wanted")
        )
        owned = self.tables[0].meeting.send_rows("rows to check", sent, n_given, n_wanted)
        for table, expected in zip(self.tables, owned, strict=True):
            found = table.values.detach().index_select(0, table.places.order)
            differs = (expected.view(torch.uint8) != found.view(torch.uint8)).any(1)
            if wrong := table.wanted[table.places.order[differs].cpu().numpy()].tolist():
                raise VerificationError(
                    f"batch {number}: table {table.at[1]} of the loop, row {wrong[0]} differs from what the rank has that owns it "
                    f"({len(wrong)} of {len(found)} rows differ)"
                )


class ShardedBatchRows(BatchRows):
    """The rows that this rank looks up, and those of its own that any rank does.

    Args:
        shared: Both.
        trainable: Whether they have gradients.
    """

    def __init__(self, shared: SharedRows, trainable: bool) -> None:
        super().__init__(
            shared.wanted,
            shared.ids,
            nn.Parameter(shared.values, requires_grad=trainable),
            shared.positions,
        )
        self._owned = nn.Parameter(shared.tensors[0], requires_grad=trainable)
        self._shared = shared
        self._stepped = False

    @property
    def owned(self) -> nn.Parameter:
        return self._owned

    @property
    def touched(self) -> bool:
        if super().touched:
            raise ArgumentError(
                "the rows of a sharded table were changed by hand; they are copies of what their ranks have: use gradients"
            )
        return False

    def positions(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        if self._stepped:
            raise ArgumentError(
                f"{name} was looked up after step(): the new rows are with the ranks that have them, and come with the next batch; "
                "look up before step(), or read(ids) on all ranks"
            )
        return super().positions(ids, name)

    def collect(self, blocks: Sequence[Any]) -> None:
        """Add up the gradients of all ranks, rank 0 first, in the rows of those that have them.

        All ranks at once.

        Raises:
            RankError: Another rank does something else, or is gone.
        """
        for some in _few(blocks):
            meeting, at = some[0]._shared.meeting, some[0]._shared.at
            for block in some:
                # As in a batch that has none.
                block._stepped = True
                block._owned.grad = None
            flags = [block.weight.grad is not None for block in some]
            if stepped := _agreed(meeting, Step.STEP, at, some, flags):
                with meeting.committed():
                    _collect(stepped)


def bring_late(tables: Sequence[SharedRows]) -> None:
    """Exchange the rows that earlier batches could change until now."""
    sent = [table.tensors[0].index_select(0, table.places.late_from) for table in tables]
    n_sent, n_received = (
        [table.counts.late_from for table in tables],
        [table.counts.late_to for table in tables],
    )
    for table, late in zip(
        tables, tables[0].meeting.send_rows("late rows", sent, n_sent, n_received), strict=True
    ):
        table.values.index_copy_(0, table.places.late_to, late)


@torch.no_grad()
def _collect(blocks: Sequence[ShardedBatchRows]) -> None:
    """Add up the gradients of all ranks, each row's in the order of the ranks, where the row is."""
    shared = [block._shared for block in blocks]
    gradients = [
        torch.zeros_like(block.weight) if block.weight.grad is None else block.weight.grad
        for block in blocks
    ]
    sent = [
        gradient.index_select(0, one.places.order)
        for gradient, one in zip(gradients, shared, strict=True)
    ]
    n_sent, n_received = [one.counts.wanted for one in shared], [one.counts.given for one in shared]
    meeting = shared[0].meeting
    for block, one, rows in zip(
        blocks, shared, meeting.send_rows("gradients", sent, n_sent, n_received), strict=True
    ):
        by_row = rows.index_select(0, one.places.by_row)
        # unsafe: it does not look at the lengths, for which the host would have to wait
        total = torch.segment_reduce(
            by_row, "sum", lengths=one.places.n_by_row, axis=0, unsafe=True
        )
        block.owned.grad = total.div_(meeting.size) if one.mean else total


def _agreed(
    meeting: Lockstep, word: Step, at: tuple[int, int], some: Sequence[T], wishes: Sequence[bool]
) -> list[T]:
    """Those of some tables for which any rank wishes it."""
    _, flags = meeting.meet(word, *at, flags=sum(wish << i for i, wish in enumerate(wishes)))
    return [one for i, one in enumerate(some) if flags >> i & 1]


def _few(tables: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many as there may be flags, one after the other."""
    for i in range(0, len(tables), MOST_FLAGS):
        yield tables[i : i + MOST_FLAGS]
