"""SaveDirectory: the saves in a checkpoint directory, of one process or of several ranks.

Each rank of sharded tables has a directory in the checkpoint directory. A save is complete if all
ranks have it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import shutil
from collections import Counter

import torch

from pinfeed.errors import CheckpointError
from pinfeed.training.checkpoint import manifest
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.process_groups import RankGroup

UNFINISHED = ".writing-"
"""Beginning of the name of a save that is being written."""
_REMOVED = ".removing-"
_RANK_DIRECTORY = re.compile(r"(\d+)-of-(\d+)", re.ASCII)


class SaveDirectory:
    """The saves of this process.

    Args:
        path: The checkpoint directory.
        group: The ranks that save together; None for a process that saves alone.

    Attributes:
        root: Directory of the saves of this process.
        numbers: Numbers of the complete saves of this process, ascending.
    """

    def __init__(self, path: pathlib.Path, group: RankGroup | None = None) -> None:
        self.path = path
        self.root = path if group is None else path / f"{group.rank}-of-{group.size}"
        self._group = group

    @property
    def numbers(self) -> list[int]:
        return save_numbers(self.root)

    def save(self, number: int) -> pathlib.Path:
        """Return the directory of a save."""
        return self.root / f"{number:08d}"

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors to other ranks.

        It surrounds a save, and the first part of a resume, which does not change anything.
        """
        if self._group is None:
            return contextlib.nullcontext()
        return self._group.loop_lockstep.report_failure()

    def wait(self, step: RankStep) -> None:
        """Wait until all ranks have reached a step."""
        if self._group is not None:
            self._group.loop_lockstep.agree(step)

    def next_save(self) -> tuple[int, list[int]]:
        """Return the number of the next save, and the numbers of the complete saves, ascending."""
        of_ranks = self._numbers_of_ranks(RankStep.SAVE)
        complete = set(of_ranks[0]).intersection(*of_ranks)
        # A number that any rank has is not used again.
        return max(itertools.chain(*of_ranks), default=0) + 1, sorted(complete)

    def newest(self) -> pathlib.Path:
        """Return the directory of the newest complete save.

        Raises:
            CheckpointError: If no save is complete, or ``path`` is a single save.
        """
        path = self.path
        if (path / manifest.NAME).is_file():
            raise CheckpointError(
                f"{path} is a single save; expected the directory that checkpoint.save was given; "
                f"give {str(path.parent)!r}"
            )
        of_ranks = self._numbers_of_ranks(RankStep.RESUME)
        complete = set(of_ranks[0]).intersection(*of_ranks)
        if complete:
            return self.save(max(complete))
        if self._group is None:
            raise CheckpointError(
                f"{path} has no complete checkpoint; expected the directory of checkpoint.save"
            )
        size = self._group.size
        others = sorted({other for _, other in _ranks_and_sizes(path)} - {size})
        if others and not any(of_ranks):
            raise CheckpointError(
                f"{path} was saved by {' and by '.join(map(str, others))} ranks and is resumed by "
                f"{size}; expected the same number (to continue with another number, "
                "export() the tables and load the files with ShardedEmbedding.from_pretrained)"
            )
        rank = self._group.rank
        raise CheckpointError(
            f"{path} has no checkpoint that all {size} ranks have completed; "
            f"rank {rank} has {of_ranks[rank]}"
        )

    def sweep(self) -> None:
        """Remove the files of saves whose processes were killed."""
        for child in self.root.iterdir():
            if child.name.startswith((UNFINISHED, _REMOVED)):
                shutil.rmtree(child, ignore_errors=True)

    def remove(self, number: int) -> None:
        """Rename a save and remove it, because its number must never name an incomplete save."""
        directory = self.save(number)
        removed = directory.with_name(f"{_REMOVED}{directory.name}")
        directory.rename(removed)
        shutil.rmtree(removed)

    def _numbers_of_ranks(self, step: RankStep) -> list[list[int]]:
        """Return the numbers of every rank's saves."""
        numbers = self.numbers
        if self._group is None:
            return [numbers]
        lockstep = self._group.loop_lockstep
        n_own = [len(numbers)] * lockstep.size
        lockstep.agree(step)
        n_received = lockstep.exchange_counts(n_own)
        own = torch.tensor(numbers * lockstep.size, dtype=torch.int64)[:, None]
        found = lockstep.exchange_rows("control bytes", [own], [n_own], [n_received])[0][:, 0]
        return [of_rank.tolist() for of_rank in found.split(n_received)]


def save_numbers(root: pathlib.Path) -> list[int]:
    """Return the numbers of the complete saves in a directory, ascending.

    Links and everything else that is not a directory are ignored.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as found:
        names = [child.name for child in found if child.is_dir(follow_symlinks=False)]
        return sorted(int(name) for name in names if re.fullmatch(r"\d{8}", name, re.ASCII))
    return []


def rank_directories(path: pathlib.Path) -> list[list[pathlib.Path]]:
    """Return the directories of all ranks, for each number of ranks whose directories all exist."""
    # Count the directories, because a name may contain any number of ranks.
    n_ranks = Counter(size for rank, size in _ranks_and_sizes(path) if rank < size)
    sizes = [size for size in sorted(n_ranks) if n_ranks[size] == size]
    return [[path / f"{rank}-of-{size}" for rank in range(size)] for size in sizes]


def sync(directory: pathlib.Path) -> None:
    """Sync the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ranks_and_sizes(path: pathlib.Path) -> set[tuple[int, int]]:
    """Return the rank and the number of ranks of each rank directory."""
    found = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(path):
            if match := _RANK_DIRECTORY.fullmatch(name):
                found.add((int(match[1]), int(match[2])))
    return found
