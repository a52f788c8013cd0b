"""Where ranks save what is sharded, each its own part, and which saves all of them have."""

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
from pinfeed.training.distributed.lockstep import Step
from pinfeed.training.distributed.process_groups import RankGroup

_PART = re.compile(r"(\d+)-of-(\d+)", re.ASCII)


class LocalSave:
    """One process: the directory is its own."""

    def part(self, path: pathlib.Path) -> pathlib.Path:
        """Where this rank saves."""
        return path

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Around a save, or what comes before anything is changed by one that is resumed."""
        return contextlib.nullcontext()

    def known(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        """The number of the next save, and those of the saves that are whole, ascending, given those that are here."""
        return max(numbers, default=0) + 1, [*numbers]

    def wait(self, word: Step) -> None:
        """Wait until all ranks have come so far."""

    def newest(self, path: pathlib.Path, numbers: Sequence[int]) -> int:
        """The number of the newest save that is whole.

        Raises:
            CheckpointError: There is none.
        """
        if not numbers:
            raise CheckpointError(
                f"{path} has no complete checkpoint; expected one that checkpoint.save wrote"
            )
        return numbers[-1]


class ShardedSave(LocalSave):
    """Ranks, each with a directory in the one that they were given.

    A save is whole when all of them have it.

    Args:
        peers: The ranks.
    """

    def __init__(self, peers: RankGroup) -> None:
        self._rank = peers.rank
        self._size = peers.size
        self._meeting = peers.loop

    def part(self, path: pathlib.Path) -> pathlib.Path:
        return path / f"{self._rank}-of-{self._size}"

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return self._meeting.telling()

    def known(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        # A number that any rank has is not used again.
        of_ranks = self._gathered(Step.SAVE, numbers)
        return max(itertools.chain(*of_ranks), default=0) + 1, sorted(
            set(of_ranks[0]).intersection(*of_ranks)
        )

    def wait(self, word: Step) -> None:
        self._meeting.meet(word)

    def newest(self, path: pathlib.Path, numbers: Sequence[int]) -> int:
        of_ranks = self._gathered(Step.RESUME, numbers)
        common = set(of_ranks[0]).intersection(*of_ranks)
        if not any(of_ranks) and (
            others := sorted({size for _, size in _parts(path)} - {self._size})
        ):
            raise CheckpointError(
                f"{path} was saved by {' and by '.join(map(str, others))} ranks and is resumed by {self._size}; expected as many (to go on "
                "with others: export() the tables, and ShardedEmbedding.from_pretrained the files)"
            )
        if not common:
            raise CheckpointError(
                f"{path} has no complete checkpoint that all of {self._size} ranks have; rank {self._rank} has {[*numbers]}"
            )
        return max(common)

    def _gathered(self, word: Step, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank."""
        meeting, n_mine = self._meeting, [len(numbers)] * self._size
        meeting.meet(word)
        n = meeting.counts(n_mine)
        mine = torch.tensor([*numbers] * self._size, dtype=torch.int64)[:, None]
        found = meeting.send_rows("words", [mine], [n_mine], [n])[0][:, 0]
        return [of_rank.tolist() for of_rank in found.split(n)]


def whole_parts(path: pathlib.Path) -> list[list[pathlib.Path]]:
    """The directories of all ranks, for each number of ranks of which all are there."""
    parts = _parts(path)
    # Counted: a name may say that there are any number.
    n_ranks = Counter(size for rank, size in parts if rank < size)
    return [
        [path / f"{rank}-of-{size}" for rank in range(size)]
        for size in sorted(n_ranks)
        if n_ranks[size] == size
    ]


def _parts(path: pathlib.Path) -> set[tuple[int, int]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return {
            (int(found[1]), int(found[2]))
            for name in os.listdir(path)
            if (found := _PART.fullmatch(name))
        }
    return set()
