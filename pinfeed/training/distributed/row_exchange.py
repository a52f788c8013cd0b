"""RowExchange: the rows of one batch, asked of the ranks that have them and sent to those that want them, while the loop is at earlier batches.

A row that is wanted again within a few batches may still change: it is sent when its batch is lent,
by ``ShardedBatch``. All others are sent here. So every row crosses once, and as it is in the
synchronous loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import memory_of, to_torch
from pinfeed.training.distributed.lockstep import Lockstep, Step
from pinfeed.training.distributed.row_partition import RowPartition

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ShardedRows:
    """A sharded table, as the trade sees it."""

    owners: RowPartition
    weights: Store
    """This rank's rows of it."""
    n_recent: int
    """Batches before one whose changes the store may not have yet when its rows are gathered."""


class Counts(NamedTuple):
    """Rows, for or from each rank."""

    wanted: list[int]
    given: list[int]
    late_to: list[int]
    late_from: list[int]


@dataclass(frozen=True)
class ExchangePlan:
    """A table's rows of one batch, on one rank: those that it wants, and those of its own that anybody wants."""

    order: Positions
    """Positions in the rows that it wants: those that rank 0 has first, and so on."""
    values: Array
    """The rows that it wants, in the order of their ids; those that come late are not filled."""
    own: Rows
    """Its own rows that are wanted, as they are called here, ascending, each once."""
    given: Positions
    """Positions in ``own``: those that rank 0 wants first, and so on."""
    by_row: Positions
    """Positions in ``given``: those of the first of its own rows, by rank, and so on."""
    n_by_row: Positions
    """How many ranks want each of its own rows."""
    late_to: Positions
    """Of ``order``, what comes late."""
    late_from: Positions
    """Of ``given``, what is sent late."""
    counts: Counts
    """Of ``order``, ``given``, ``late_to`` and ``late_from``."""


class RowExchange:
    """Trades the rows of batch after batch of a loop.

    Args:
        meeting: Of the ranks; nobody else uses it meanwhile.
        tables: The tables.
    """

    def __init__(self, meeting: Lockstep, tables: Sequence[ShardedRows]) -> None:
        self._meeting = meeting
        self._tables = tables
        # Own rows of the batches before.
        self._recent: list[deque[Rows]] = [deque(maxlen=table.n_recent) for table in tables]

    def trade(self, number: int, wanted: Sequence[Rows]) -> list[ExchangePlan]:
        """The rows of a batch.

        Args:
            number: Of the batch.
            wanted: For each table the ids that this rank looks up, ascending, each once.

        Raises:
            RankError: Another rank failed, has left, or has no more batches.
        """
        meeting, tables = self._meeting, self._tables
        orders, n_wanted = zip(
            *(table.owners.by_owner(ids) for table, ids in zip(tables, wanted, strict=True)),
            strict=True,
        )
        heard, _ = meeting.meet(Step.BATCH, number, numbers=np.array(n_wanted).T)
        with meeting.committed():
            n_asked = heard.T.tolist()
            ids = [
                _column(table.owners.here(ids)[order])
                for table, ids, order in zip(tables, wanted, orders, strict=True)
            ]
            requests = [
                _flat(of_table) for of_table in meeting.send_rows("ids", ids, n_wanted, n_asked)
            ]
            try:
                offers = [
                    _Offer(*of_table)
                    for of_table in zip(tables, self._recent, requests, n_asked, strict=True)
                ]
            except BaseException as error:
                meeting.leave(Step.BAD_BATCH, repr(error), number)
                raise
            n_fresh = [offer.n_fresh for offer in offers]
            heard, _ = meeting.meet(Step.ROWS, number, numbers=np.array(n_fresh).T)
            late = meeting.send_rows(
                "marks", [_column(offer.late) for offer in offers], n_asked, n_wanted
            )
            rows = meeting.send_rows(
                "rows", [to_torch(offer.values) for offer in offers], n_fresh, heard.T.tolist()
            )
            return [
                offer.traded(order, n, _flat(marks), memory_of(fresh))
                for offer, order, n, marks, fresh in zip(
                    offers, orders, n_wanted, late, rows, strict=True
                )
            ]

    def end(self, number: int) -> None:
        """There is no batch ``number``.

        Raises:
            RankError: Another rank has one, failed or left.
        """
        self._meeting.meet(Step.NO_BATCH, number)


class _Offer:
    """What a rank has for the others, of one table, for one batch.

    Args:
        table: The table.
        recent: This rank's rows of the batches before; those of this one are added.
        requests: What the ranks ask for, rank 0 first.
        n_given: How many rows each asks for.
    """

    def __init__(
        self, table: ShardedRows, recent: deque[Rows], requests: Rows, n_given: list[int]
    ) -> None:
        self.n_given = n_given
        self.own, self.given = np.unique(requests, return_inverse=True)
        changing = np.isin(self.own, np.concatenate([np.empty(0, np.int64), *recent]))
        recent.append(self.own)
        fresh = np.flatnonzero(~changing)
        values = np.empty((len(fresh), *table.weights.row_shape), table.weights.dtype)
        table.weights.gather(self.own[fresh], values)
        # Of each own row in the values, if it is there.
        place = np.cumsum(~changing) - 1
        self.late = changing[self.given]
        self.values = values[place[self.given[~self.late]]]
        self.n_late = _counts(self.late, n_given)

    @property
    def n_fresh(self) -> list[int]:
        """How many rows each rank gets now."""
        return [n - late for n, late in zip(self.n_given, self.n_late, strict=True)]

    def traded(
        self, order: Positions, n_wanted: list[int], late: Array, rows: Array
    ) -> ExchangePlan:
        """All of it, with what has come: marks and rows in ``order``."""
        values = np.empty((len(order), *rows.shape[1:]), rows.dtype)
        values[order[~late]] = rows
        return ExchangePlan(
            order=order,
            values=values,
            own=self.own,
            given=self.given,
            by_row=np.argsort(self.given, kind="stable"),
            n_by_row=np.bincount(self.given, minlength=len(self.own)),
            late_to=order[late],
            late_from=self.given[self.late],
            counts=Counts(n_wanted, self.n_given, _counts(late, n_wanted), self.n_late),
        )


def _counts(marks: Array, counts: Sequence[int]) -> list[int]:
    """How many marks are set in the stretch of each rank."""
    return [int(of_rank.sum()) for of_rank in np.split(marks, np.cumsum(counts)[:-1])]


def _column(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1, 1))


def _flat(column: torch.Tensor) -> Array:
    flat: Array = column.numpy()[:, 0]
    return flat
