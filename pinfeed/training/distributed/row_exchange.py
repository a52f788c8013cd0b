"""RowExchange: sends the rows of a batch between ranks while the loop is at earlier batches.

Each rank requests rows from the ranks that own them, and these send the rows. A row may still
change if a recent batch also looks it up. A row in the cache of its rank has its newest value on
the device. Such rows are deferred: ``ShardedDeviceBatch`` sends them when their batch is lent. All
other rows are sent here. Every row is therefore sent once, with the values of the synchronous loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.pipeline.cache_decisions import CachedRows
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.rows.distinct import distinct_rows, sort_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import memory_of, to_torch
from pinfeed.training.distributed.lockstep import Lockstep, RankStep
from pinfeed.training.distributed.row_partition import RowPartition

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ExchangedTable:
    """A sharded table whose rows are exchanged."""

    partition: RowPartition
    weights: Store
    """Store of this rank's rows."""
    n_recent: int
    """Number of preceding batches whose changes may be missing in the store during a gather."""
    is_trained: bool
    """Whether the loop changes the rows."""


class Counts(NamedTuple):
    """Numbers of rows by rank."""

    wanted: list[int]
    """Rows that this rank looks up, by the rank that owns them."""
    given: list[int]
    """Rows that this rank owns, by the rank that looks them up."""
    deferred_in: list[int]
    """Rows of ``wanted`` that are sent when the batch is lent."""
    deferred_out: list[int]
    """Rows of ``given`` that are sent when the batch is lent."""


@dataclass(frozen=True)
class ExchangePlan:
    """The rows of a table that one batch needs, on one rank.

    These are the rows that this rank looks up ("wanted"), and its own rows that any rank looks up.
    """

    order: Positions
    """Positions in the wanted rows, ordered by the rank that owns the row."""
    values: Array
    """The wanted rows, sorted by id. Deferred rows are not filled yet."""
    own: Rows
    """Own rows that any rank wants, as distinct ascending indices in this rank's store."""
    given: Positions
    """Positions in ``own``, ordered by the rank that wants the row."""
    by_row: Positions
    """Positions in ``given``, ordered by own row, then by rank."""
    n_by_row: Positions
    """Number of ranks that want each own row."""
    deferred_in: Positions
    """The part of ``order`` that is deferred."""
    deferred_out: Positions
    """The part of ``given`` that is deferred."""
    cached: CachedRows | None
    """The rows of ``own`` in the cache of the table, or None without a cache."""
    counts: Counts
    """Lengths of ``order``, ``given``, ``deferred_in`` and ``deferred_out``, by rank."""


class RowExchange:
    """Exchanges the rows of each batch of a loop.

    Args:
        lockstep: The ranks' lockstep. Nothing else uses it at the same time.
        tables: The tables.
        caches: Cache of this rank's rows for each table, or None for a table without a cache.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        tables: Sequence[ExchangedTable],
        caches: Sequence[RowCache | None],
    ) -> None:
        self._lockstep = lockstep
        self._tables = tables
        self._changing = [
            _ChangingRows(table, cache) for table, cache in zip(tables, caches, strict=True)
        ]

    def exchange(self, number: int, wanted: Sequence[Rows]) -> list[ExchangePlan]:
        """Exchange the rows of a batch.

        Args:
            number: Number of the batch.
            wanted: For each table, the distinct ids that this rank looks up, ascending.

        Returns:
            The plan of each table.

        Raises:
            RankError: If another rank has failed, has left, or has no more batches.
        """
        requests = [
            _Request(ids, *table.partition.by_owner(ids))
            for table, ids in zip(self._tables, wanted, strict=True)
        ]
        n_wanted = [request.n_by_rank for request in requests]
        numbers, _ = self._lockstep.agree(RankStep.BATCH, number, numbers=np.array(n_wanted).T)
        with self._lockstep.no_report():
            n_asked = numbers.T.tolist()
            asked = self._exchange_ids(requests, n_asked)
            offers = self._make_offers(number, asked, n_asked)
            return self._exchange_values(number, requests, offers)

    def end(self, number: int) -> None:
        """Agree that no rank has a batch ``number``.

        Raises:
            RankError: If another rank has such a batch, has failed, or has left.
        """
        self._lockstep.agree(RankStep.NO_BATCH, number)

    def _exchange_ids(
        self, requests: Sequence[_Request], n_asked: Sequence[list[int]]
    ) -> list[Rows]:
        """Send the wanted ids to the ranks that own the rows.

        Args:
            requests: Request of each table.
            n_asked: For each table, the number of ids from each rank.

        Returns:
            For each table, the rows that ranks request from this rank, in the order of ranks.
        """
        ids = [
            _column(table.partition.local(request.ids)[request.order])
            for table, request in zip(self._tables, requests, strict=True)
        ]
        n_wanted = [request.n_by_rank for request in requests]
        received = self._lockstep.exchange_rows("ids", ids, n_wanted, n_asked)
        return [_flat(column) for column in received]

    def _make_offers(
        self, number: int, asked: Sequence[Rows], n_asked: Sequence[list[int]]
    ) -> list[_Offer]:
        """Gather the requested rows, and inform the other ranks if this fails."""
        try:
            return [
                _Offer(*of_table)
                for of_table in zip(self._tables, self._changing, asked, n_asked, strict=True)
            ]
        except BaseException as error:
            self._lockstep.leave(RankStep.BAD_BATCH, repr(error), number)
            raise

    def _exchange_values(
        self, number: int, requests: Sequence[_Request], offers: Sequence[_Offer]
    ) -> list[ExchangePlan]:
        """Send the offered rows, and marks for the deferred rows."""
        lockstep = self._lockstep
        n_wanted = [request.n_by_rank for request in requests]
        n_given = [offer.n_given for offer in offers]
        n_sent = [offer.n_sent for offer in offers]
        numbers, _ = lockstep.agree(RankStep.ROWS, number, numbers=np.array(n_sent).T)
        own_marks = [_column(offer.is_deferred) for offer in offers]
        marks = lockstep.exchange_rows("marks", own_marks, n_given, n_wanted)
        own_values = [to_torch(offer.values) for offer in offers]
        values = lockstep.exchange_rows("rows", own_values, n_sent, numbers.T.tolist())
        return [
            offer.plan(request, _flat(of_table), memory_of(rows))
            for offer, request, of_table, rows in zip(offers, requests, marks, values, strict=True)
        ]


@dataclass(frozen=True)
class _Request:
    """The rows of one table that this rank looks up in a batch."""

    ids: Rows
    order: Positions
    """Positions in ``ids``, ordered by the rank that owns the row."""
    n_by_rank: list[int]


class _ChangingRows:
    """Own rows of a table whose newest values may be missing in its store.

    Args:
        table: The table.
        cache: Cache of the rows, or None for a table without a cache.
    """

    def __init__(self, table: ExchangedTable, cache: RowCache | None) -> None:
        # Rows of the preceding batches, and the rows that left the cache after each batch.
        self._recent: deque[Rows] = deque(maxlen=table.n_recent)
        self._is_trained = table.is_trained
        self._cache = cache

    def find(self, rows: Rows) -> Array:
        """Return a mask of the rows of a batch that are among these rows."""
        found = np.isin(rows, np.concatenate([np.empty(0, np.int64), *self._recent]))
        if self._cache is not None and self._is_trained:
            found |= self._cache.decisions.contains(rows)
        return found

    def add(self, rows: Rows) -> CachedRows | None:
        """Add the rows of a batch, and return the decisions of the cache about them."""
        if self._cache is None:
            self._recent.append(rows)
            return None
        self._cache.decisions.announce(rows)
        cached = self._cache.decide(rows)
        self._recent.append(np.concatenate([rows, cached.moves.evicted_rows]))
        return cached


class _Offer:
    """The rows of one table that a rank sends to all ranks for one batch.

    Args:
        table: The table.
        changing: This rank's rows that may have newer values. The rows of this batch are added.
        asked: Rows that the ranks request, in the order of ranks.
        n_given: Number of rows that each rank requests.
    """

    def __init__(
        self, table: ExchangedTable, changing: _ChangingRows, asked: Rows, n_given: list[int]
    ) -> None:
        self.n_given = n_given
        own, given = distinct_rows(asked)
        self.own = own
        self.given = given
        is_changing = changing.find(own)
        self._cached = changing.add(own)
        final = np.flatnonzero(~is_changing)
        values = np.empty((len(final), *table.weights.row_shape), table.weights.dtype)
        table.weights.gather(own[final], values)
        # Index in the values, for each own row that does not change.
        index = np.cumsum(~is_changing) - 1
        self.is_deferred = is_changing[given]
        self.values = values[index[given[~self.is_deferred]]]
        self.n_deferred = _count_by_rank(self.is_deferred, n_given)

    @property
    def n_sent(self) -> list[int]:
        """Number of rows that each rank gets now."""
        return [n - deferred for n, deferred in zip(self.n_given, self.n_deferred, strict=True)]

    def plan(self, request: _Request, is_deferred: Array, rows: Array) -> ExchangePlan:
        """Return the plan of the batch, with the marks and rows that other ranks have sent.

        Args:
            request: The rows that this rank wants.
            is_deferred: For each position in the order of the request, whether its row is deferred.
            rows: Values of the other rows, in the same order.
        """
        order = request.order
        values = np.empty((len(order), *rows.shape[1:]), rows.dtype)
        values[order[~is_deferred]] = rows
        n_deferred = _count_by_rank(is_deferred, request.n_by_rank)
        return ExchangePlan(
            order=order,
            values=values,
            own=self.own,
            given=self.given,
            by_row=sort_rows(self.given)[1],
            n_by_row=np.bincount(self.given, minlength=len(self.own)),
            deferred_in=order[is_deferred],
            deferred_out=self.given[self.is_deferred],
            cached=self._cached,
            counts=Counts(request.n_by_rank, self.n_given, n_deferred, self.n_deferred),
        )


def _count_by_rank(marks: Array, counts: Sequence[int]) -> list[int]:
    """Return the number of set marks of each rank.

    The marks of rank 0 are first, and rank i has ``counts[i]`` marks.
    """
    return [int(of_rank.sum()) for of_rank in np.split(marks, np.cumsum(counts)[:-1])]


def _column(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1, 1))


def _flat(column: torch.Tensor) -> Array:
    flat: Array = column.numpy()[:, 0]
    return flat
