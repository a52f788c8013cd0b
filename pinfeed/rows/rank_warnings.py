"""Warnings about several processes that loop over the same rows."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import BlockShuffled, Drawn, Sequential, Shuffled
from pinfeed.rows.ranks import Ranks, world

logger = logging.getLogger("pinfeed")


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
    if not is_meant and isinstance(order, (Sequential, Shuffled, BlockShuffled, Drawn)):
        _warn_of_workers(info.num_workers)


def note_processes(order: Any) -> None:
    """Warn, once, if several processes of a job each loop over all rows and no ranks were given.

    Args:
        order: The user's argument ``rows``.
    """
    if not isinstance(order, (Sequential, Shuffled, BlockShuffled, Drawn)):
        return
    # The user has not requested ranks, so an invalid environment is no error.
    with contextlib.suppress(ArgumentError):
        rank, world_size = world()
        if world_size > 1 and rank == 0:
            _warn_of_processes(world_size)


@functools.cache
def _warn_of_workers(num_workers: int) -> None:
    logger.warning(
        "each of the %d worker processes of a DataLoader loops over all rows of its feeder; if "
        "these are the same rows, each row occurs %d times. Give each worker its part with "
        "ranks=pinfeed.Ranks('join', rank=info.id, world_size=info.num_workers) and info = "
        "torch.utils.data.get_worker_info(), or loop over the feeder in the main process, where "
        "it prefetches with threads. If this is intended, give ranks='all'",
        num_workers,
        num_workers,
    )


@functools.cache
def _warn_of_processes(world_size: int) -> None:
    logger.warning(
        "each of the %d processes iterates the same rows. ranks='pad' (or 'drop', 'join') gives "
        "each process its share. If this is intended, give ranks='all'",
        world_size,
    )
