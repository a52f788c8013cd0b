"""RankBatches: the batches of one rank, which any number of ranks can resume."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from operator import index
from typing import Any, cast, get_args

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.orders import Order, UserOrder, known
from pinfeed.rows.ranks import PerRank, Ranks, Uneven, world

logger = logging.getLogger("pinfeed")


class RankBatches(OrderBatches):
    """The batches of one rank, of those that the user has asked to share an epoch."""

    kind = "a feeder with ranks="

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            **super().fingerprint,
            "ranks": self.ranks.uneven,
            "split_batches": self.ranks.split_batches,
        }


def batches_of_rank(
    ranks: Ranks | str | None, order: Any, drop_last: bool, size: int | None, size_name: str
) -> RankBatches | None:
    """Return the batches of this process, without ``n_rows``; None if it reads all rows.

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
    shared, rank, world_size = check_ranks(ranks, order, drop_last)
    if size is None:
        raise ArgumentError(
            "ranks= needs batches of the same size on all ranks; set preferred_batch_size in the "
            "config, or give batch_size"
        )
    if shared.split_batches and size % world_size:
        below = size // world_size * world_size
        above = below + world_size
        raise ArgumentError(
            f"{size_name}={size} cannot be split among {world_size} ranks; expected a multiple of "
            f"{world_size}: {f'{below} or ' if below else ''}{above}"
        )
    return RankBatches(order, 0, index(size), drop_last, shared, rank, world_size)


def check_ranks(ranks: Any, order: Any, drop_last: bool) -> tuple[Ranks, int, int]:
    """Check that the arguments agree.

    Args:
        ranks: The user's argument ``ranks``, neither None nor ``"all"``.
        order: Order of the rows of all ranks.
        drop_last: Whether the batches leave out rows.

    Returns:
        The argument as ``Ranks``, the rank of this process, and the number of ranks.

    Raises:
        ArgumentError: If the arguments conflict, or ``order`` cannot be shared.
    """
    is_name = isinstance(ranks, str) and ranks in get_args(Uneven)
    if not is_name and not isinstance(ranks, Ranks):
        raise ArgumentError(
            f"ranks={ranks!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
        )
    shared = ranks if isinstance(ranks, Ranks) else Ranks(cast(Uneven, ranks))
    if isinstance(order, PerRank):
        raise ArgumentError(
            "per_rank(...) is already the share of one rank, and ranks= would divide it again; "
            "give one of them"
        )
    if not isinstance(order, Order):
        raise ArgumentError(
            f"ranks={ranks!r} divides orders of pinfeed.rows, but rows is a "
            f"{type(order).__name__}, which decides on its own what a process reads; leave ranks= "
            "out, and give an array as rows[rank::world_size]"
        )
    if drop_last and shared.uneven == "join":
        raise ArgumentError(
            "ranks='join' reads every row once, but drop_last=True leaves rows out; give one of "
            "them, or ranks='drop'"
        )
    rank, world_size = shared.rank, shared.world_size
    if rank is None or world_size is None:
        rank, world_size = world()
    return shared, index(rank), index(world_size)


def note_workers(ranks: Ranks | str | None, order: Any) -> None:
    """Warn, once, if several worker processes of a DataLoader each loop over all rows.

    Called in the worker process when a loop begins.

    Args:
        ranks: The user's argument. ``"all"`` requests all rows in every process. Explicit ranks may
            be those of the worker processes.
        order: The user's argument ``rows``. Anything but an order of all rows may be a worker's
            own.
    """
    # A worker process has imported this module.
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is None or info.num_workers < 2 or info.id != 0:
        return
    is_meant = ranks == "all" or (isinstance(ranks, Ranks) and ranks.rank is not None)
    if not is_meant and _has_all_rows(order):
        _warn_once(
            "each of the %(n)d worker processes of a DataLoader loops over all rows of its feeder; "
            "if these are the same rows, each row occurs %(n)d times. Give each worker its part "
            "with ranks=pinfeed.Ranks('join', rank=info.id, world_size=info.num_workers) and info "
            "= torch.utils.data.get_worker_info(), or loop over the feeder in the main process, "
            "where it prefetches with threads. If this is intended, give ranks='all'",
            info.num_workers,
        )


def note_processes(order: Any) -> None:
    """Warn, once, if several processes of a job each loop over all rows and no ranks were given."""
    if not _has_all_rows(order):
        return
    # The user has not requested ranks, so an invalid environment is no error.
    with contextlib.suppress(ArgumentError):
        rank, world_size = world()
        if world_size > 1 and rank == 0:
            _warn_once(
                "each of the %(n)d processes iterates the same rows. ranks='pad' (or 'drop', "
                "'join') gives each process its share. If this is intended, give ranks='all'",
                world_size,
            )


def _has_all_rows(rows: Any) -> bool:
    """Return whether every process has the same rows of an order, or of batches of an order.

    An order of the user may be the share of one process.
    """
    order = rows.order if isinstance(rows, LengthBatches) else rows
    return not isinstance(known(order), UserOrder | PerRank)


@functools.cache
def _warn_once(text: str, n: int) -> None:
    logger.warning(text, {"n": n})
