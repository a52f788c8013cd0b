"""RankShard: one rank's part of every epoch of an order."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, cast, get_args

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import BlockShuffled, Order, PerRank
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.rows.rank_partition import Progress, Uneven
from pinfeed.rows.rank_warnings import note_processes
from pinfeed.rows.ranks import Ranks, world


@dataclass(frozen=True)
class RankShard:
    """One rank's part of every epoch of an order.

    Args:
        order: Order of all rows.
        ranks: The user's choice of how ranks share an epoch.
        rank: Number of the rank.
        world_size: Number of ranks.
        drop_last: Whether to leave out a last batch that is not full.
        size: Rows per batch, of each rank or, with ``ranks.split_batches``, of all ranks together.
    """

    order: Order
    ranks: Ranks
    rank: int
    world_size: int
    drop_last: bool
    size: int

    def of(self, rank: int, world_size: int) -> RankShard:
        """Return the part of another rank, possibly at another number of ranks."""
        return dataclasses.replace(self, rank=rank, world_size=world_size)

    @property
    def batch_size(self) -> int:
        """Rows per batch of this rank."""
        return self.size // self.world_size if self.ranks.split_batches else self.size

    def rows(self, done: Progress = ()) -> PerRank:
        """Return the order of this rank's rows.

        Args:
            done: Positions of the epoch that are already done.
        """
        in_one = isinstance(self.order, BlockShuffled) and not self.ranks.split_batches
        return PerRank(
            self.order,
            self.rank,
            self.world_size,
            self.ranks.uneven,
            None if in_one else self.batch_size,
            done,
        )

    def batches(self, n_rows: int, done: Progress = ()) -> OrderBatches:
        """Return the batches of this rank.

        Args:
            n_rows: Number of rows in the stores.
            done: Positions of the epoch that are already done.
        """
        return OrderBatches(self.rows(done), n_rows, self.batch_size, self.drop_last)


def shard_of_rank(
    ranks: Ranks | str | None,
    order: Any,
    drop_last: bool,
    size: int | None,
    size_name: str = "batch_size",
) -> RankShard | None:
    """Return this process's part of every epoch; None if it reads all rows.

    Args:
        ranks: The user's argument ``ranks``.
        order: The user's argument ``rows``.
        drop_last: Whether to leave out a last batch that is not full.
        size: Rows per batch, of each rank or of all ranks together.
        size_name: Name of the argument that gave ``size``, for error messages.

    Raises:
        ArgumentError: If the arguments conflict, or ``order`` cannot be shared.
    """
    if ranks is None:
        note_processes(order)
    if ranks is None or ranks == "all":
        return None
    shared = _check_ranks(ranks, order, drop_last)
    if size is None:
        raise ArgumentError(
            "ranks= needs batches of the same size on all ranks; set preferred_batch_size in the "
            "config, or give batch_size"
        )
    if shared.rank is None or shared.world_size is None:
        rank, world_size = world()
    else:
        rank, world_size = shared.rank, shared.world_size
    if shared.split_batches:
        _check_divisible(size, size_name, world_size)
    return RankShard(
        order,
        shared,
        operator.index(rank),
        operator.index(world_size),
        drop_last,
        operator.index(size),
    )


def _check_ranks(ranks: Any, order: Any, drop_last: bool) -> Ranks:
    """Check that the arguments agree; return ``ranks`` as ``Ranks``."""
    is_name = isinstance(ranks, str) and ranks in get_args(Uneven)
    if not is_name and not isinstance(ranks, Ranks):
        raise ArgumentError(
            f"ranks={ranks!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
        )
    shared = ranks if isinstance(ranks, Ranks) else Ranks(cast(Uneven, ranks))
    if isinstance(order, PerRank):
        raise ArgumentError(
            "rows=per_rank(...) is already the share of one rank, and ranks= would divide it "
            "again; give one of them"
        )
    if not isinstance(order, Order):
        raise ArgumentError(
            f"ranks={ranks!r} divides orders of pinfeed.rows, but rows is a "
            f"{type(order).__name__}, which decides on its own what a process reads; leave ranks= "
            f"out{_own_share(order)}"
        )
    if drop_last and shared.uneven == "join":
        raise ArgumentError(
            "ranks='join' reads every row once, but drop_last=True leaves rows out; give one of "
            "them, or ranks='drop'"
        )
    return shared


def _own_share(rows: Any) -> str:
    """Say how rows without an order are divided; empty if a sampler divides them."""
    if isinstance(rows, ElementBatches):
        return ", and give element_batches order=pinfeed.rows.per_rank(order, rank=, world_size=)"
    if hasattr(rows, "__array__") or isinstance(rows, (list, range)):
        return ", and give rows[rank::world_size]"
    return ""


def _check_divisible(size: int, name: str, world_size: int) -> None:
    """Check that the ranks can split a batch of all ranks into equal parts."""
    if size % world_size == 0:
        return
    below = size // world_size * world_size
    above = -(-size // world_size) * world_size
    raise ArgumentError(
        f"{name}={size} cannot be split among {world_size} ranks; expected a multiple of "
        f"{world_size}: "
        f"{below or above}" + (f" or {above}" if below else "")
    )
