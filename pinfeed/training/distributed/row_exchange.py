"""The rows that ranks exchange for a batch: RowExchange ahead of it, ShardedBatchRows in its step.

Each rank requests rows from the ranks that own them, and these send the rows. A row may still
change if a recent batch also looks it up. A row in the cache of its rank has its newest value on
the device. Such rows are deferred: ``receive_deferred`` sends them when their batch is lent. All
other rows are sent here. Every row is therefore sent once, with the values of the synchronous loop.

At the beginning of a step, ranks exchange the deferred rows. In ``optimizer.step()``, they send
gradients to the ranks that own the rows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pinfeed.errors import ArgumentError, VerificationError
from pinfeed.pipeline.forwarding import RecentRows
from pinfeed.pipeline.row_cache import CachedRows, RowCache
from pinfeed.rows.indices import distinct_rows, sort_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.stores.store import Array
from pinfeed.tensors.numpy_torch import memory_of, to_torch
from pinfeed.training.distributed.lockstep import Lockstep, RankStep
from pinfeed.training.embeddings.batch_rows import BatchRows

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
