"""RowSelection: the rows that one process iterates over, and the batches that they form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError, BudgetError, RowIndexError, logger
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.order_batches import EqualBatches, OrderBatches, RankBatches, RowBatches
from pinfeed.rows.orders import Order, known, sequential, shuffled
from pinfeed.rows.ranks import Ranks
from pinfeed.rows.sampler_batches import SamplerBatches, largest_batch
from pinfeed.rows.shared_batches import SharedBatches, batches_of_rank, note_workers, shared_batches
from pinfeed.validation.arguments import check_flag, check_seed, whole_number


class RowSelection:
    """Rows that one process iterates over, and the batches that they form.

    The arguments are those of ``Feeder``.

    Attributes:
        all_rows: Order of the rows of all ranks.
        order: Order of the rows of this process.
        batch_size: Rows per batch of this process; None if ``config`` or ``order`` decides it.
        config: Memory limits of this process; None if there are none.
        drop_last: Whether to leave out a last batch that is not full.
        rank_batches: Batches of this rank, without ``n_rows``; None if the process has all rows.
        rank: Number of this rank; None if the process has all rows.

    Raises:
        ArgumentError: If an argument is invalid, two arguments conflict, or the ranks cannot share
            the rows by the rule ``ranks``.
        RowIndexError: If ``rows`` contains values that are not row indices.
    """

    def __init__(
        self,
        batch_size: int | None,
        config: MemoryLimits | None,
        rows: Any,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        ranks: Ranks | str | None,
    ) -> None:
        if batch_size is not None:
            batch_size = whole_number(batch_size, "batch_size")
        _check_batch_size(batch_size, config, rows)
        check_flag(shuffle, "shuffle")
        check_flag(drop_last, "drop_last")
        check_seed(seed)
        _check_order(rows, shuffle, drop_last)
        if rows is None:
            rows = shuffled(seed) if shuffle else sequential()
        size, size_name = batch_size, "batch_size"
        if config is not None:
            size, size_name = config.preferred_batch_size, "preferred_batch_size"
        self.drop_last = drop_last
        self._ranks = ranks
        self._given_config = config
        self.all_rows = rows
        self.order: Order | Iterable[Any] = rows
        self.batch_size = batch_size
        self.config = None if config is None else config.for_feeder()
        self.rank: int | None = None
        self.rank_batches: RankBatches | None = None
        self._shared: SharedBatches | None = None
        if isinstance(rows, LengthBatches):
            self._shared = shared_batches(rows, ranks)
            if ranks not in (None, "all"):
                self.rank = self._shared.rank
        else:
            self.rank_batches = batches_of_rank(ranks, rows, drop_last, size, size_name)
        if self.rank_batches is None:
            return
        self.order = self.rank_batches.rows()
        self.rank = self.rank_batches.rank
        if self.config is None:
            self.batch_size = self.rank_batches.batch_size
        else:
            # The limits may already prefer smaller batches, because larger ones do not fit.
            most = self.config.preferred_batch_size or self.rank_batches.batch_size
            size = min(self.rank_batches.batch_size, most)
            self.config = dataclasses.replace(self.config, preferred_batch_size=size)

    def note_workers(self) -> None:
        """Warn, once, if worker processes of a DataLoader each begin a loop over all rows."""
        note_workers(self._ranks, self.all_rows)

    def batches(self, n_rows: int, plan: Plan) -> RowBatches:
        """Return the batches of every epoch, and warn if there are none.

        Args:
            n_rows: Number of rows of the source.
            plan: Plan that fixes the batch size if ``config`` is given.
        """
        batch_size = self.batch_size if self.config is None else plan.batch_size
        if self._shared is not None:
            self._shared.rows.require_rows(n_rows)
            return self._shared
        if not isinstance(self.order, Order):
            return SamplerBatches(self.order, n_rows, batch_size, self.drop_last)
        if self.rank_batches is not None:
            batches: EqualBatches = dataclasses.replace(self.rank_batches, n_rows=n_rows)
        else:
            assert batch_size is not None
            batches = OrderBatches(self.order, n_rows, batch_size, self.drop_last)
        warn_if_empty(batches)
        return batches

    def with_notes(self, plan: Plan, n_rows: int, *, unified: bool) -> Plan:
        """Return a plan with notes on the rank, and on settings of ``config`` without effect.

        Args:
            plan: Plan of the batches of this process.
            n_rows: Number of rows of the source.
            unified: Whether the batches live in host memory.

        Raises:
            BudgetError: If the batches of the plan are smaller than those of other ranks.
        """
        notes = list(plan.notes)
        if self.rank_batches is not None:
            notes.insert(0, _rank_note(self.rank_batches, plan, n_rows))
        if unified and (setting := self._gpu_setting()):
            note = (
                f"{setting} of config has no effect on the feeder, because its batches are on the "
                "CPU; on a machine with a GPU, device='cuda' puts them there"
            )
            logger.warning("%s", note)
            notes.append(note)
        return dataclasses.replace(plan, notes=tuple(notes))

    def _gpu_setting(self) -> str:
        """Return the setting of ``config`` that only batches on a GPU need; empty without one."""
        config = self._given_config
        # The limits of the command line have no device. The command prints a remark of its own.
        device = getattr(config, "device", None)
        if config is None or device is None:
            return ""
        if config.gpu_memory_limit is not None:
            return "gpu_memory_limit"
        return f"device={str(device)!r}" if str(device).startswith("cuda") else ""


def _check_batch_size(batch_size: int | None, config: Any, rows: Any) -> None:
    """Raise ArgumentError unless exactly one argument decides the size of the batches.

    Raises:
        RowIndexError: If the first element of a list or an array of batches is no row index.
    """
    if batch_size is not None and config is not None:
        raise ArgumentError(
            "both batch_size and config were given; give one of them (Config has "
            "preferred_batch_size)"
        )
    if config is not None and not isinstance(config, MemoryLimits):
        raise ArgumentError(f"config={config!r}: expected a pinfeed.Config")
    if rows is None or isinstance(rows, Order):
        if batch_size is None and config is None:
            raise ArgumentError(
                "neither batch_size nor config was given; give one of them, or give rows= that "
                "yields whole batches"
            )
        return
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        advice = "; call the function" if callable(rows) else ""
        raise ArgumentError(
            f"rows={rows!r}: expected an order of pinfeed.rows, a sampler, or an iterable of row "
            f"indices{advice}"
        )
    if batch_size is None or largest_batch(rows, batch_size) is None:
        return
    first = np.asarray(rows[0]) if isinstance(rows, (np.ndarray, Sequence)) else None
    if first is not None and first.size and first.dtype.kind not in "iu":
        raise RowIndexError(
            f"rows: got {type(rows).__name__} of {first.dtype}; expected an order of pinfeed.rows, "
            "a sampler, or an iterable of integer row indices; convert a mask with "
            "np.flatnonzero(mask); give arrays of data as the source"
        )
    raise ArgumentError("batch_size was given, but rows yields whole batches; leave out batch_size")


def _check_order(rows: Any, shuffle: bool, drop_last: bool) -> None:
    """Raise ArgumentError if ``rows`` excludes ``shuffle`` or ``drop_last``."""
    if shuffle and rows is not None:
        raise ArgumentError(
            "both rows and shuffle=True were given, but rows already decides the order; leave "
            "out shuffle, or give rows=pinfeed.rows.shuffled(seed)"
        )
    if drop_last and isinstance(rows, LengthBatches):
        raise ArgumentError(
            f"drop_last=True was given, but rows={rows.name}(...) makes the batches; give "
            f"{rows.name}(..., drop_last=True)"
        )


def _rank_note(share: RankBatches, plan: Plan, n_rows: int) -> str:
    """Describe the share of a rank, for its plan.

    Raises:
        BudgetError: If the batches of the plan are smaller than those of other ranks.
    """
    mine = share.rows().length(n_rows)
    of_all = share.order.length(n_rows)
    if plan.batch_size < min(share.batch_size, mine):
        raise BudgetError(
            f"the limits of config hold batches of {plan.batch_size} rows on rank {share.rank}, "
            f"but all ranks need batches of {share.batch_size} rows; raise the limits, or lower "
            "preferred_batch_size"
        )
    note = (
        f"rank {share.rank} of {share.world_size}: {mine} of {of_all} rows ({share.ranks.uneven})"
    )
    if share.ranks.split_batches:
        note += f", as parts of global batches of {share.size} rows"
        if known(share.order).in_blocks and share.world_size > 1:
            note += (
                "; every rank reads every block (without split_batches, each rank reads only its "
                "own blocks)"
            )
    return note


def warn_if_empty(batches: EqualBatches, unit: str = "rows") -> None:
    """Warn if epochs have no batch.

    Args:
        batches: The batches of an epoch.
        unit: The user's word for the elements of a batch.
    """
    if len(batches):
        return
    n = batches.n_rows
    n_mine = batches.rows().length(n)
    text = f"epochs have no batch of {batches.batch_size} {unit}, with {n_mine} of {n}"
    if batches.world_size > 1:
        text += f" on rank {batches.rank} of {batches.world_size}"
    text += ", drop_last=True" * batches.drop_last
    text += f"; give more {unit}, lower batch_size or world_size, or leave out drop_last"
    logger.warning("%s", text)
