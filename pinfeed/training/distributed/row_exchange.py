"""RowExchange: sends the rows of a batch between ranks while the loop is at earlier batches.

Each rank requests rows from the ranks that own them, and these send the rows. A row may still
change if a recent batch also looks it up. A row in the cache of its rank has its newest value on
the device. Such rows are deferred: ``receive_deferred`` sends them when their batch is lent. All
other rows are sent here. Every row is therefore sent once, with the values of the synchronous loop.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.pipeline.forwarding import RecentRows
from pinfeed.pipeline.row_cache import CachedRows, RowCache
from pinfeed.rows.indices import distinct_rows, sort_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import memory_of, to_torch
from pinfeed.training.distributed.lockstep import Lockstep, RankStep

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class RowPartition:
    """Row r is on rank ``r % size``, as row ``r // size`` of that rank.

    Consecutive rows are on different ranks. Ids are often assigned by age or by frequency. If each
    rank had a range of consecutive rows, one rank would have most of the looked-up rows.
    """

    n_rows: int
    """Number of rows of the whole table."""
    size: int
    """Number of ranks."""

    def n_own(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return len(range(rank, self.n_rows, self.size))

    def own(self, rank: int, start: int, stop: int) -> Rows:
        """Return the row indices in [start, stop) that a rank owns, ascending."""
        return np.arange(start + (rank - start) % self.size, stop, self.size)

    def local(self, rows: Rows) -> Rows:
        """Return the row indices in the store of the rank that owns the rows."""
        return rows // self.size

    def by_owner(self, rows: Rows) -> tuple[Positions, list[int]]:
        """Sort rows by the rank that owns them.

        Returns:
            Positions of the rows, ordered by rank and then by their original order, and the number
            of rows of each rank.
        """
        # numpy sorts numbers of one or two bytes with a radix sort, which is faster.
        owner = (rows % self.size).astype(np.min_scalar_type(self.size))
        return np.argsort(owner, kind="stable"), np.bincount(owner, minlength=self.size).tolist()


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


class RowPositions(NamedTuple):
    """Positions of the rows to exchange, on the host or on the device."""

    order: torch.Tensor
    """Positions in the wanted rows, ordered by the rank that owns the row."""
    given: torch.Tensor
    """Positions in the own rows, ordered by the rank that wants the row."""
    by_row: torch.Tensor
    """Positions in ``given``, ordered by own row, then by rank."""
    n_by_row: torch.Tensor
    """Number of ranks that want each own row."""
    deferred_in: torch.Tensor
    """The part of ``order`` that is deferred."""
    deferred_out: torch.Tensor
    """The part of ``given`` that is deferred."""


class ExchangePlan(NamedTuple):
    """The rows of a table that one batch needs, on one rank.

    These are the rows that this rank looks up ("wanted"), and its own rows that any rank looks up.
    """

    values: Array
    """The wanted rows, sorted by id. Deferred rows are not filled yet."""
    own: Rows
    """Own rows that any rank wants, as distinct ascending indices in this rank's store."""
    positions: RowPositions
    cached: CachedRows | None
    """The rows of ``own`` in the cache of the table, or None without a cache."""
    counts: Counts
    """Numbers of the rows by rank."""


@dataclass(frozen=True)
class RowExchange:
    """Exchanges the rows of each batch of a loop."""

    lockstep: Lockstep
    """Lockstep of the ranks. Nothing else uses it at the same time."""
    partitions: Sequence[RowPartition]
    """Assignment of rows to ranks, for each table."""
    changing: Sequence[ChangingRows]
    """Rows of this rank that may change, for each table."""

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
        lockstep = self.lockstep
        of_tables = list(zip(self.partitions, wanted, strict=True))
        by_owner = [partition.by_owner(rows) for partition, rows in of_tables]
        n_wanted = [n_by_rank for _, n_by_rank in by_owner]
        numbers = lockstep.agree(RankStep.BATCH, number, numbers=np.array(n_wanted).T)
        with lockstep.no_report():
            n_given = numbers.T.tolist()
            ids = [
                _column(partition.local(rows)[order])
                for (partition, rows), (order, _) in zip(of_tables, by_owner, strict=True)
            ]
            asked = lockstep.exchange_rows("ids", ids, n_wanted, n_given)
            with self.report_bad_batch(number):
                offers = [
                    _Offer(*of_table)
                    for of_table in zip(self.changing, map(_flat, asked), n_given, strict=True)
                ]
            n_sent = [offer.n_sent for offer in offers]
            numbers = lockstep.agree(RankStep.ROWS, number, numbers=np.array(n_sent).T)
            # For each row, a byte that says whether the row is deferred.
            flags = [_column(offer.is_deferred) for offer in offers]
            deferred = lockstep.exchange_rows("control bytes", flags, n_given, n_wanted)
            values = [to_torch(offer.values) for offer in offers]
            received = lockstep.exchange_rows("rows", values, n_sent, numbers.T.tolist())
        return [
            offer.plan(*of_rank, _flat(flags_in), memory_of(rows_in))
            for offer, of_rank, flags_in, rows_in in zip(
                offers, by_owner, deferred, received, strict=True
            )
        ]

    @contextlib.contextmanager
    def report_bad_batch(self, number: int) -> Iterator[None]:
        """Inform the other ranks if the block, which prepares a batch, fails."""
        try:
            yield
        except BaseException as error:
            self.lockstep.leave(RankStep.BAD_BATCH, repr(error), number)
            raise


class ChangingRows:
    """Own rows of a table whose newest values may be missing in its store.

    Args:
        weights: Store of this rank's rows.
        cache: Cache of the rows, or None for a table without a cache.
        n_recent: Number of preceding batches whose changes may be missing in the store during a
            gather.
        is_trained: Whether the loop changes the rows.
    """

    def __init__(
        self, weights: Store, cache: RowCache | None, n_recent: int, *, is_trained: bool
    ) -> None:
        self.weights = weights
        self._recent = RecentRows(n_recent * is_trained)
        self._numbers = itertools.count()
        self._is_trained = is_trained
        self._cache = cache

    def add(self, rows: Rows) -> tuple[Array, CachedRows | None]:
        """Add the rows of a batch.

        Returns:
            A mask of the rows of the batch that are among the changing ones, and the decisions of
            the cache about them.
        """
        found = np.zeros(len(rows), bool)
        cached = None
        if self._cache is not None:
            if self._is_trained:
                found |= self._cache.policy.contains(rows)
            cached = self._cache.decide(rows)
        shared, *_ = self._recent.add(next(self._numbers), [rows], [rows], (), [False])
        for latest, _ in shared.overlaps[0].values():
            found[shared.positions[slice(*latest.later)]] = True
        return found, cached


class _Offer:
    """The rows of one table that a rank sends to all ranks for one batch.

    Args:
        changing: This rank's rows that may have newer values. The rows of this batch are added.
        asked: Rows that the ranks request, in the order of ranks.
        n_given: Number of rows that each rank requests.
    """

    def __init__(self, changing: ChangingRows, asked: Rows, n_given: list[int]) -> None:
        weights = changing.weights
        self.n_given = n_given
        own, given = distinct_rows(asked)
        self.own = own
        self.given = given
        is_changing, self._cached = changing.add(own)
        final = np.flatnonzero(~is_changing)
        values = np.empty((len(final), *weights.row_shape), weights.dtype)
        weights.gather(own[final], values)
        # Index in the values, for each own row that does not change.
        index = np.cumsum(~is_changing) - 1
        self.is_deferred = is_changing[given]
        self.values = values[index[given[~self.is_deferred]]]
        self.n_deferred = _count_by_rank(self.is_deferred, n_given)

    @property
    def n_sent(self) -> list[int]:
        """Number of rows that each rank gets now."""
        return [n - deferred for n, deferred in zip(self.n_given, self.n_deferred, strict=True)]

    def plan(
        self, order: Positions, n_wanted: list[int], is_deferred: Array, rows: Array
    ) -> ExchangePlan:
        """Return the plan of the batch, with what other ranks have sent.

        Args:
            order: Positions in the wanted rows, ordered by the rank that owns the row.
            n_wanted: Number of rows that this rank wants from each rank.
            is_deferred: For each position in ``order``, whether its row is deferred.
            rows: Values of the other rows, in the same order.
        """
        values = np.empty((len(order), *rows.shape[1:]), rows.dtype)
        values[order[~is_deferred]] = rows
        n_deferred = _count_by_rank(is_deferred, n_wanted)
        positions = (
            order,
            self.given,
            sort_rows(self.given)[1],
            np.bincount(self.given, minlength=len(self.own)),
            order[is_deferred],
            self.given[self.is_deferred],
        )
        return ExchangePlan(
            values,
            self.own,
            RowPositions(*map(torch.from_numpy, positions)),
            self._cached,
            Counts(n_wanted, self.n_given, n_deferred, self.n_deferred),
        )


def _count_by_rank(flags: Array, counts: Sequence[int]) -> list[int]:
    """Return the number of set flags of each rank.

    The flags of rank 0 are first, and rank i has ``counts[i]`` flags.
    """
    return [int(of_rank.sum()) for of_rank in np.split(flags, np.cumsum(counts)[:-1])]


def _column(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1, 1))


def _flat(column: torch.Tensor) -> Array:
    flat: Array = column.numpy()[:, 0]
    return flat
