"""The shard of a rank in the epochs of a feeder, and the limits and plan of the rank."""

from __future__ import annotations

import dataclasses
from typing import Any

from pinfeed.errors import BudgetError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.rows.orders import BlockShuffled
from pinfeed.rows.rank_shard import RankShard, shard_of_rank
from pinfeed.rows.ranks import Ranks


def shard_of_feeder(
    ranks: Ranks | str | None,
    order: Any,
    drop_last: bool,
    batch_size: int | None,
    config: MemoryLimits | None,
) -> RankShard | None:
    """Return the share of this process in every epoch; None if it has all rows.

    Args:
        ranks: The user's argument ``ranks``.
        order: The user's argument ``rows``.
        drop_last: Whether to leave out a last batch that is not full.
        batch_size: Rows per batch, of each rank or of all ranks together.
        config: Limits whose preferred batch size replaces ``batch_size``; None for no limits.

    Raises:
        ArgumentError: If the arguments conflict, or ``order`` cannot be shared.
    """
    if config is None:
        return shard_of_rank(ranks, order, drop_last, batch_size)
    size = config.preferred_batch_size
    return shard_of_rank(ranks, order, drop_last, size, "preferred_batch_size")


def limits_of_rank(shard: RankShard, config: MemoryLimits | None) -> MemoryLimits | None:
    """Return limits for the batches of one rank.

    ``config`` may already prefer smaller batches, because larger ones do not fit.
    """
    if config is None:
        return None
    size = min(shard.batch_size, config.preferred_batch_size or shard.batch_size)
    return dataclasses.replace(config, preferred_batch_size=size)


def plan_of_rank(shard: RankShard, plan: Plan, n_rows: int) -> Plan:
    """Add a note about the rank to its plan.

    Args:
        shard: Share of the rank in the epochs.
        plan: Plan of the rank.
        n_rows: Number of rows in the stores.

    Raises:
        BudgetError: If the batches of the plan are smaller than those of other ranks.
    """
    mine = shard.rows().length(n_rows)
    of_all = shard.order.length(n_rows)
    if plan.batch_size < min(shard.batch_size, mine):
        raise BudgetError(
            f"the limits of config hold batches of {plan.batch_size} rows on rank {shard.rank}, "
            f"but all ranks need batches of {shard.batch_size} rows; raise the limits, or lower "
            "preferred_batch_size"
        )
    note = (
        f"rank {shard.rank} of {shard.world_size}: {mine} of {of_all} rows ({shard.ranks.uneven})"
    )
    if shard.ranks.split_batches:
        note += f", as parts of global batches of {shard.size} rows"
        if isinstance(shard.order, BlockShuffled) and shard.world_size > 1:
            note += (
                "; every rank reads every block (without split_batches, each rank reads only its "
                "own blocks)"
            )
    return dataclasses.replace(plan, notes=(note, *plan.notes))
