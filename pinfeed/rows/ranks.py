"""Ranks: how the processes of a job share an epoch, and which of them this is."""

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
    """How the processes of a job share an epoch.

    ``Feeder(..., ranks="pad")`` is short for ``ranks=Ranks("pad")``.

    The order of an epoch is cut into global batches, and each of them into one batch for every
    rank, in the order of ranks: put together, the batches of the ranks are those of one process. A
    block-shuffled order is cut into one stretch for every rank instead, so that a block is read by
    one of them, unless ``split_batches``.

    Another number of ranks that loads a state goes on with the next global batch where batches are
    split, and else shares what is left.

    Args:
        uneven: What becomes of rows that do not divide. ``"pad"``: the first rows of the order come
            again, so that all ranks have equally many rows and batches. ``"drop"``: fewer rows than
            there are ranks are left out, to the same end. ``"join"``: every row comes exactly once,
            and some ranks have a row, and perhaps a batch, more than others, rank 0 among them (see
            ``torch.distributed.algorithms.Join``).
        split_batches: ``batch_size`` (or ``preferred_batch_size``) is that of a global batch, which
            has the same rows at any number of ranks that divides it; else it is that of each rank.
        rank: Of this process, with ``world_size``: for a group that is not the whole job
            (``group.rank()``, ``group.size()``), or another launcher. Without them they are those
            of torch.distributed; before it is initialised those that torchrun gives; else there is
            one process.
        world_size: Processes that share an epoch.

    Raises:
        ArgumentError: Values that cannot be.
    """

    uneven: Uneven = "pad"
    split_batches: bool = False
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.uneven not in get_args(Uneven):
            raise ArgumentError(
                f"ranks={self.uneven!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
            )
        check_flag(self.split_batches, "split_batches")
        if (self.rank is None) != (self.world_size is None):
            raise ArgumentError(
                f"Ranks(rank={self.rank}, world_size={self.world_size}): give both, or neither for those of the job"
            )
        if self.rank is not None and self.world_size is not None:
            check_rank(
                self.rank,
                self.world_size,
                f"Ranks(rank={self.rank!r}, world_size={self.world_size!r})",
            )


def world() -> tuple[int, int]:
    """This process's rank, and how many there are: as torch.distributed says, or else torchrun's environment; (0, 1) without either.

    Raises:
        ArgumentError: The environment has half of it.
    """
    # Who has not loaded it has not initialised it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)}
    if not said:
        return 0, 1
    text = "the environment has " + ", ".join(f"{name}={value}" for name, value in said.items())
    if len(said) == 1:
        raise ArgumentError(
            f"{text}, and not the other one of RANK and WORLD_SIZE; start with torchrun, or give Ranks(rank=, world_size=)"
        )
    try:
        rank, world_size = int(said["RANK"]), int(said["WORLD_SIZE"])
    except ValueError:
        raise ArgumentError(f"{text}; expected whole numbers, as torchrun sets them") from None
    return check_rank(rank, world_size, text)
