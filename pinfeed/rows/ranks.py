"""Ranks: how the processes of a job share an epoch, and the rank of this process."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import get_args

from pinfeed.errors import ArgumentError
from pinfeed.rows.rank_partition import Uneven
from pinfeed.validation.arguments import check_flag, check_rank


@dataclass(frozen=True)
class Ranks:
    """Rule by which the processes of a job share an epoch.

    ``Feeder(..., ranks="pad")`` is short for ``ranks=Ranks("pad")``.

    pinfeed cuts the order of an epoch into global batches, and each global batch into one batch per
    rank, by ascending rank. Together, these are the batches that a single process would get. A
    block-shuffled order is cut into one interval per rank instead, unless ``split_batches`` is
    True; then only one rank reads a block.

    A job with another number of ranks can load a saved state. With ``split_batches``, it continues
    with the next global batch. Without, its ranks share the remaining rows.

    Args:
        uneven: Treatment of rows that do not divide evenly. ``"pad"`` repeats the first rows of the
            order, so that all ranks have equal numbers of rows and batches. ``"drop"`` leaves out
            up to ``world_size - 1`` rows for the same reason. ``"join"`` uses every row exactly
            once, so some ranks, including rank 0, have one row and perhaps one batch more than
            others (see ``torch.distributed.algorithms.Join``).
        split_batches: Whether ``batch_size`` (or ``preferred_batch_size``) is the size of a global
            batch, which has the same rows for any number of ranks that divides it. By default, it
            is the size of each rank's batch.
        rank: Rank of this process. Give it together with ``world_size`` for a group that is not the
            whole job (``group.rank()``, ``group.size()``) or for another launcher. By default, both
            are those of torch.distributed if it is initialized; otherwise those of torchrun's
            environment variables; without these, there is one process.
        world_size: Number of processes that share an epoch.

    Raises:
        ArgumentError: If a value is invalid, or only one of ``rank`` and ``world_size`` is given.

    Examples:
        >>> images = np.zeros((10, 3), "float32")
        >>> ranks = pinfeed.Ranks("pad", rank=0, world_size=4)
        >>> with pinfeed.Feeder(images, batch_size=2, ranks=ranks) as feeder:
        ...     n_rows = sum(len(batch) for batch in feeder)
        >>> n_rows
        3
    """

    uneven: Uneven = "pad"
    split_batches: bool = False
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.uneven not in get_args(Uneven):
            raise ArgumentError(
                f"Ranks({self.uneven!r}): expected 'pad', 'drop' or 'join'; for all rows on every "
                "rank, give ranks='all' to the Feeder"
            )
        check_flag(self.split_batches, "split_batches")
        if (self.rank is None) != (self.world_size is None):
            raise ArgumentError(
                f"Ranks(rank={self.rank}, world_size={self.world_size}): "
                "give both, or neither for those of the job"
            )
        if self.rank is not None and self.world_size is not None:
            check_rank(
                self.rank,
                self.world_size,
                f"Ranks(rank={self.rank!r}, world_size={self.world_size!r})",
            )


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    The source is torch.distributed, or else torchrun's environment; without either, it is (0, 1).

    Raises:
        ArgumentError: If the environment has only one of the two, or values that are not whole
            numbers.
    """
    # A program that has not imported torch.distributed has not initialized it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)}
    if not given:
        return 0, 1
    text = "the environment has " + ", ".join(f"{name}={value}" for name, value in given.items())
    if len(given) == 1:
        raise ArgumentError(
            f"{text}; expected both RANK and WORLD_SIZE; start with torchrun, or give "
            "Ranks(rank=, world_size=)"
        )
    try:
        rank = int(given["RANK"])
        world_size = int(given["WORLD_SIZE"])
    except ValueError:
        raise ArgumentError(f"{text}; expected whole numbers, as torchrun sets them") from None
    return check_rank(rank, world_size, text)
