"""The checkpoint directories of ranks, and their agreement on the complete saves."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
from collections import Counter
from collections.abc import Sequence

import torch

from pinfeed.errors import CheckpointError
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.process_groups import RankGroup

_RANK_DIRECTORY = re.compile(r"(\d+)-of-(\d+)", re.ASCII)


class LocalSave:
    """Saves of one process, which alone uses the checkpoint directory."""

    def directory(self, path: pathlib.Path) -> pathlib.Path:
        """Return the directory of this rank's saves."""
        return path

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors to other ranks.

        It surrounds a save, and the first part of a resume, which does not change anything.
        """
        return contextlib.nullcontext()

    def next_save(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        """Return the number of the next save, and the numbers of the complete saves, ascending.

        Args:
            numbers: Numbers of this rank's saves.
        """
        return max(numbers, default=0) + 1, [*numbers]

    def wait(self, step: RankStep) -> None:
        """Wait until all ranks have reached a step."""

    def newest(self, path: pathlib.Path, numbers: Sequence[int]) -> int:
        """Return the number of the newest complete save.

        Args:
            path: The checkpoint directory.
            numbers: Numbers of this rank's saves.

        Raises:
            CheckpointError: If no save is complete.
        """
        if not numbers:
            raise CheckpointError(
                f"{path} has no complete checkpoint; expected the directory of checkpoint.save"
            )
        return numbers[-1]


class ShardedSave(LocalSave):
    """Saves of several ranks. Each rank has a directory in the checkpoint directory.

    A save is complete if all ranks have it.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._rank = group.rank
        self._size = group.size
        self._lockstep = group.loop_lockstep

    def directory(self, path: pathlib.Path) -> pathlib.Path:
        return path / f"{self._rank}-of-{self._size}"

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        return self._lockstep.report_failure()

    def next_save(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        of_ranks = self._of_all_ranks(RankStep.SAVE, numbers)
        complete = set(of_ranks[0]).intersection(*of_ranks)
        # A number that any rank has is not used again.
        return max(itertools.chain(*of_ranks), default=0) + 1, sorted(complete)

    def wait(self, step: RankStep) -> None:
        self._lockstep.agree(step)

    def newest(self, path: pathlib.Path, numbers: Sequence[int]) -> int:
        of_ranks = self._of_all_ranks(RankStep.RESUME, numbers)
        if not any(of_ranks):
            self._check_size(path)
        complete = set(of_ranks[0]).intersection(*of_ranks)
        if not complete:
            raise CheckpointError(
                f"{path} has no checkpoint that all {self._size} ranks have completed; "
                f"rank {self._rank} has {[*numbers]}"
            )
        return max(complete)

    def _check_size(self, path: pathlib.Path) -> None:
        """Check that no other number of ranks has saved.

        Raises:
            CheckpointError: If another number of ranks has saved.
        """
        others = sorted({size for _, size in _ranks_and_sizes(path)} - {self._size})
        if others:
            raise CheckpointError(
                f"{path} was saved by {' and by '.join(map(str, others))} ranks and is resumed by "
                f"{self._size}; expected the same number (to continue with another number, "
                "export() the tables and load the files with ShardedEmbedding.from_pretrained)"
            )

    def _of_all_ranks(self, step: RankStep, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank's saves."""
        n_own = [len(numbers)] * self._size
        self._lockstep.agree(step)
        n_received = self._lockstep.exchange_counts(n_own)
        own = torch.tensor([*numbers] * self._size, dtype=torch.int64)[:, None]
        found = self._lockstep.exchange_rows("control bytes", [own], [n_own], [n_received])[0][:, 0]
        return [of_rank.tolist() for of_rank in found.split(n_received)]


def rank_directories(path: pathlib.Path) -> list[list[pathlib.Path]]:
    """Return the directories of all ranks, for each number of ranks whose directories all exist."""
    found = _ranks_and_sizes(path)
    # Count the directories, because a name may contain any number of ranks.
    n_ranks = Counter(size for rank, size in found if rank < size)
    sizes = [size for size in sorted(n_ranks) if n_ranks[size] == size]
    return [_all_directories(path, size) for size in sizes]


def _all_directories(path: pathlib.Path, size: int) -> list[pathlib.Path]:
    return [path / f"{rank}-of-{size}" for rank in range(size)]


def _ranks_and_sizes(path: pathlib.Path) -> set[tuple[int, int]]:
    """Return the rank and the number of ranks of each rank directory."""
    found = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(path):
            if match := _RANK_DIRECTORY.fullmatch(name):
                found.add((int(match[1]), int(match[2])))
    return found
