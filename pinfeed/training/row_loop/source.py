"""row_source(): makes the source of a loader's batches and their table rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.training.distributed.source import ShardedSource, ShardedTableSpec
from pinfeed.training.distributed.table import ShardedEmbedding
from pinfeed.training.embeddings.source import TableRowSource
from pinfeed.training.row_loop.lent_table import LentTable

# Slightly larger numbers gain little.
_LOOK_AHEAD = 2


def row_source(
    loader: Any,
    tables: Sequence[LentTable],
    schedule: PrefetchSchedule,
    *,
    look_ahead: int | None,
    verify: bool,
) -> TableRowSource:
    """Return the source of the loader's batches, with rows of local or sharded tables.

    Args:
        loader: Iterable of batches on the host.
        tables: The tables.
        schedule: Number of batches to prefetch.
        look_ahead: Number of later batches that caches know when they decide which rows of a batch
            to keep. None is the default. Sharded tables have no look-ahead.
        verify: Whether the loop compares all rows with those of the synchronous loop.

    Raises:
        ArgumentError: If some of the tables are sharded and some are not, or they are sharded over
            different process groups.
    """
    specs = [lent.spec for lent in tables]
    sharded = [lent.table for lent in tables if isinstance(lent.table, ShardedEmbedding)]
    if not sharded:
        if look_ahead is None:
            # The synchronous loop requests each batch from the loader only when a step needs it.
            look_ahead = _LOOK_AHEAD if schedule.depth else 0
        return TableRowSource(loader, specs, look_ahead)
    peers = sharded[0].rank_group
    if len(sharded) < len(tables) or any(table.rank_group is not peers for table in sharded):
        raise ArgumentError(
            f"tables: {', '.join(map(_description, tables))}; expected either all tables sharded "
            "over the same process_group, or no sharded table"
        )
    shards = [
        ShardedTableSpec(spec, lent.optimizer is not None, table.mean)
        for spec, lent, table in zip(specs, tables, sharded, strict=True)
    ]
    return ShardedSource(loader, shards, peers, schedule, verify)


def _description(lent: LentTable) -> str:
    """Return the name of a table, and whether it is sharded."""
    kind = "sharded" if isinstance(lent.table, ShardedEmbedding) else "not sharded"
    return f"{lent.table.name} ({kind})"
