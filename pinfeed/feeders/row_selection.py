"""RowSelection: the rows that one process iterates over, and the batches that they form."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.devices.base import Device
from pinfeed.errors import ArgumentError, RowIndexError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.rank_plan import limits_of_rank, shard_of_feeder
from pinfeed.rows.batches import OrderBatches, RowBatches
from pinfeed.rows.orders import Order, PerRank, sequential, shuffled
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.rows.rank_shard import RankShard
from pinfeed.rows.sampler_batches import SamplerBatches, largest_batch
from pinfeed.validation.arguments import check_flag, check_seed

logger = logging.getLogger("pinfeed")


@dataclass(frozen=True)
class RowArguments:
    """Arguments of ``Feeder`` that decide which rows form which batch, as the user gave them."""

    batch_size: int | None
    config: MemoryLimits | None
    rows: Any
    shuffle: bool
    seed: int
    drop_last: bool

    def check(self) -> None:
        """Check each argument, and that none excludes another.

        Raises:
            ArgumentError: If an argument is invalid, or two arguments conflict.
            RowIndexError: If ``rows`` contains values that are not row indices.
        """
        if self.batch_size is not None and self.config is not None:
            raise ArgumentError(
                "both batch_size and config were given; give one of them (Config has "
                "preferred_batch_size)"
            )
        if self.config is not None and not isinstance(self.config, MemoryLimits):
            raise ArgumentError(f"config={self.config!r}: expected a pinfeed.Config")
        check_flag(self.shuffle, "shuffle")
        check_flag(self.drop_last, "drop_last")
        check_seed(self.seed)
        if self.rows is not None:
            self._check_rows()
        is_order = self.rows is None or isinstance(self.rows, Order)
        if self.batch_size is None and self.config is None and is_order:
            raise ArgumentError(
                "neither batch_size nor config was given; give one of them, or give rows= that "
                "yields whole batches"
            )
        if self.rows is not None and self.shuffle:
            raise ArgumentError(
                "both rows and shuffle=True were given, but rows already decides the order; leave "
                "out shuffle, or give rows=pinfeed.rows.shuffled(seed)"
            )
        if self.drop_last and isinstance(self.rows, ElementBatches):
            raise ArgumentError(
                "drop_last=True was given, but rows=element_batches(...) makes the batches; give "
                "element_batches(..., drop_last=True)"
            )
        if self.batch_size is not None and not is_order and largest_batch(self.rows) is not None:
            _require_row_indices(self.rows)
            raise ArgumentError(
                "batch_size was given, but rows yields whole batches; leave out batch_size"
            )

    def with_notes(self, plan: Plan, device: Device) -> Plan:
        """Return a plan with a note if a GPU setting of ``config`` does not affect the feeder."""
        # The limits of the command line have no device. The command prints a remark of its own.
        chosen = getattr(self.config, "device", None)
        if chosen is None or self.config is None or not device.unified:
            return plan
        if self.config.gpu_memory_limit is not None:
            setting = "gpu_memory_limit"
        elif str(chosen).startswith("cuda"):
            setting = f"device={str(chosen)!r}"
        else:
            return plan
        note = (
            f"{setting} of config has no effect on the feeder, because its batches are on the CPU; "
            "for batches on a GPU, give device='cuda' to the feeder"
        )
        return dataclasses.replace(plan, notes=(*plan.notes, note))

    @property
    def order(self) -> Order | Iterable[Any]:
        """Order of all rows."""
        if self.rows is not None:
            rows: Order | Iterable[Any] = self.rows
            return rows
        return shuffled(self.seed) if self.shuffle else sequential()

    def _check_rows(self) -> None:
        """Raise ArgumentError unless ``rows`` is an order, a sampler or another iterable."""
        rows = self.rows
        if isinstance(rows, (Order, Iterable)) and not isinstance(rows, (str, bytes)):
            return
        advice = "; give what the function returns" if callable(rows) else ""
        if callable(rows) and getattr(rows, "__module__", "") == Order.__module__:
            name = getattr(rows, "__name__", "shuffled")
            advice = f"; call it: rows=pinfeed.rows.{name}(...)"
        raise ArgumentError(
            f"rows={rows!r}: expected an order of pinfeed.rows, a sampler, or an iterable of row "
            f"indices{advice}"
        )


@dataclass(frozen=True)
class RowSelection:
    """Rows that one process iterates over, and the size of their batches.

    Attributes:
        order: Order of the rows of this process.
        batch_size: Rows per batch of this process; None if ``config`` or ``order`` decides it.
        config: Memory limits; None if there are none.
        drop_last: Whether to leave out a last batch that is not full.
        shard: Share of this rank; None if the process has all rows.
    """

    order: Order | Iterable[Any]
    batch_size: int | None
    config: MemoryLimits | None
    drop_last: bool
    shard: RankShard | None

    @classmethod
    def of(cls, arguments: RowArguments, ranks: Any) -> RowSelection:
        """Return the rows that this process iterates over, if the ranks of a job share them.

        Raises:
            ArgumentError: If the ranks cannot share the rows by the rule ``ranks``.
        """
        order = arguments.order
        batch_size = arguments.batch_size
        config = arguments.config
        drop_last = arguments.drop_last
        shard = shard_of_feeder(ranks, order, drop_last, batch_size, config)
        if config is not None:
            config = config.for_feeder()
        if shard is None:
            return cls(order, batch_size, config, drop_last, None)
        if batch_size is not None:
            batch_size = shard.batch_size
        return cls(shard.rows(), batch_size, limits_of_rank(shard, config), drop_last, shard)

    def batches(self, n_rows: int, plan: Plan) -> RowBatches:
        """Return the batches of every epoch, and warn if there are none.

        Args:
            n_rows: Number of rows of the source.
            plan: Plan that fixes the batch size if ``config`` is given.
        """
        batch_size = self.batch_size if self.config is None else plan.batch_size
        if not isinstance(self.order, Order):
            return SamplerBatches(self.order, n_rows, batch_size, self.drop_last)
        assert batch_size is not None
        batches = OrderBatches(self.order, n_rows, batch_size, self.drop_last)
        warn_if_empty(batches)
        return batches if self.shard is None else RankBatches(self.shard, n_rows)


def warn_if_empty(batches: OrderBatches, unit: str = "rows") -> None:
    """Warn if epochs have no batch.

    Args:
        batches: The batches of an epoch.
        unit: The user's word for the elements of a batch.
    """
    if len(batches):
        return
    order = batches.order
    n_own = order.length(batches.n_rows)
    if batches.n_rows == 0:
        logger.warning("there are no %s, so epochs have no batch; give at least one", unit)
    elif isinstance(order, PerRank):
        logger.warning(
            "rank %d of %d has no batch, with %d of %d %s and batches of %d%s; lower world_size or "
            "batch_size, or check rank and world_size",
            order.rank,
            order.world_size,
            n_own,
            order.order.length(batches.n_rows),
            unit,
            batches.batch_size,
            ", drop_last=True" if batches.drop_last else "",
        )
    else:
        logger.warning(
            "drop_last=True leaves no batch of %d %s in batches of %d; lower batch_size, or leave "
            "out drop_last",
            n_own,
            unit,
            batches.batch_size,
        )


def _require_row_indices(rows: Any) -> None:
    """Refuse a list or an array of values that are not row indices.

    Raises:
        RowIndexError: If the first element is neither a row index nor a batch of them.
    """
    if not isinstance(rows, (np.ndarray, Sequence)):
        return
    first = np.asarray(rows[0])
    if first.size and first.dtype.kind not in "iu":
        raise RowIndexError(
            f"rows: got {type(rows).__name__} of {first.dtype}; expected an order of pinfeed.rows, "
            "a sampler, or an iterable of integer row indices; convert a mask with "
            "np.flatnonzero(mask); give arrays of data as the source"
        )
