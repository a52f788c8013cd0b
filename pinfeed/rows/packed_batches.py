"""PackedBatches: the batches of packed rows, which any number of ranks can share and resume."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import RowBatches, RowIndices
from pinfeed.rows.packed import START, Mark, Packed
from pinfeed.rows.packing import Pieces
from pinfeed.rows.ranks import RankPartition, Ranks, Uneven, world
from pinfeed.rows.windows import Windows

# A state that needs an older mark has none, and so plans the epoch from its beginning.
_MOST_MARKS = 1 << 14


@dataclass(eq=False)
class PackedBatches(RowBatches):
    """The batches of one rank.

    The sequences of an epoch are divided into steps of ``n_each`` sequences for each rank, by
    ascending rank. The sequences after the last whole step are divided by the rule ``uneven``. A
    state counts sequences, so any number of ranks continues with the next one. It also names a
    window, so that only this window is planned again.

    Args:
        packed: The sequences.
        rank: Number of the rank.
        world_size: Number of ranks.
        uneven: Treatment of sequences that do not divide evenly.
        n_each: Sequences of a batch of each rank.
    """

    packed: Packed
    rank: int
    world_size: int
    uneven: Uneven
    n_each: int
    # An epoch, the sequence with which its batch 0 begins, and a mark at or before the position.
    _begun: tuple[int, int, Mark] = field(default=(0, 0, START), init=False)
    # Marks of the epoch that was begun last; the reader thread appends them.
    _marks: tuple[int, deque[Mark]] = field(default=(0, deque()), init=False)

    kind = "a feeder with rows=packed(...)"
    state_keys = ("sequences",)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {**self.packed.fingerprint, "ranks": self.uneven}

    def __len__(self) -> int:
        raise TypeError(
            "rows=packed(...) has no len(), because the number of batches depends on the epoch; "
            "packed has count(epoch) instead"
        )

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        """Yield the batches of an epoch; the order determines them, so there is no checksum."""
        begun, mark = self._position(number)
        first = begun + start * self._n_all
        marks: deque[Mark] = deque([mark], _MOST_MARKS)
        self._marks = number, marks
        sequences = self.packed.sequences(number, mark, marks.append)
        sequences = itertools.islice(sequences, first - mark.sequence, None)
        while step := list(itertools.islice(sequences, self._n_all)):
            share = self._share(number, step)
            if len(share) == self.n_each or (share and not self.packed.drop_last):
                rows, places = self.packed.places(share)
                yield RowIndices(len(rows), [(len(rows), 0)], lambda rows=rows: rows, places)  # type: ignore[misc]

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return self.packed.windows(number, start)

    def restart(self, epoch: int) -> None:
        self._begun = epoch, 0, START

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the sequences of all ranks that are done, and the mark to resume with."""
        begun, mark = self._position(epoch)
        done = begun + batch * self._n_all
        number, marks = self._marks
        if number == epoch:
            # The copy is atomic; the reader thread may append at the same time.
            mark = max((one for one in marks.copy() if one.sequence <= done), default=mark)
        return {
            "sequences": {
                "begun": begun,
                "step": self._n_all,
                "mark": list(mark),
            }
        }

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        epoch = int(state["epoch"])
        batch = int(state["batch"])
        try:
            theirs = state["sequences"]
            begun = int(theirs["begun"])
            step = int(theirs["step"])
            mark = Mark(*(int(number) for number in theirs["mark"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._no_state(error) from None
        done = begun + batch * step
        if batch < 0 or step < 1 or done < 0 or min(mark) < 0 or mark.sequence > done:
            raise self._no_state(dict(theirs))
        # The number of batches stays about the same, and is 0 only at the beginning of an epoch.
        if step != self._n_all:
            batch = -(-done // self._n_all)
            begun = done - batch * self._n_all
        self._begun = epoch, begun, mark
        return batch, False

    def _no_state(self, found: object) -> ArgumentError:
        return ArgumentError(
            f"not a state of {self.kind}: {found!r}; expected the result of state_dict()"
        )

    @property
    def _n_all(self) -> int:
        """Sequences of a batch of all ranks together."""
        return self.n_each * self.world_size

    def _position(self, epoch: int) -> tuple[int, Mark]:
        """Return the sequence with which batch 0 of an epoch begins, and a mark before the run."""
        return self._begun[1:] if epoch == self._begun[0] else (0, START)

    def _share(self, epoch: int, step: list[Pieces]) -> list[Pieces]:
        """Return this rank's sequences of a step, which is shorter at the end of the epoch."""
        partition = RankPartition(self.world_size, self.uneven, self.n_each)
        if self.uneven == "pad" and len(step) % self.world_size:
            first = self.packed.sequences(epoch, START, lambda mark: None)
            n_more = self.world_size - len(step) % self.world_size
            # An epoch with few sequences repeats them more than once.
            repeated = list(itertools.islice(first, n_more))
            step = step + list(itertools.islice(itertools.cycle(repeated), n_more))
        pieces = partition.pieces([(0, len(step))], len(step), self.rank)
        return [step[piece.at(i)] for piece in pieces for i in range(piece.n)]


def packed_batches(packed: Packed, ranks: Ranks | str | None) -> PackedBatches:
    """Return the batches of this process.

    Args:
        packed: The sequences.
        ranks: The user's argument ``ranks``.

    Raises:
        ArgumentError: If the ranks cannot share the sequences.
    """
    if ranks is None or ranks == "all":
        return PackedBatches(packed, 0, 1, "join", packed.n_sequences)
    if not isinstance(ranks, Ranks) and ranks not in get_args(Uneven):
        raise ArgumentError(
            f"ranks={ranks!r}: expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None"
        )
    shared = ranks if isinstance(ranks, Ranks) else Ranks(ranks)  # type: ignore[arg-type]
    if shared.uneven == "join" and packed.drop_last:
        raise ArgumentError(
            "ranks='join' reads every row once, but drop_last=True leaves rows out; give one of "
            "them, or ranks='drop'"
        )
    rank, world_size = shared.rank, shared.world_size
    if rank is None or world_size is None:
        rank, world_size = world()
    n_each = packed.n_sequences
    if shared.split_batches:
        n_each, rest = divmod(n_each, world_size)
        if rest:
            raise ArgumentError(
                f"batch_size={packed.n_sequences} of packed cannot be split among {world_size} "
                f"ranks; expected a multiple of {world_size}"
            )
    return PackedBatches(packed, rank, world_size, shared.uneven, n_each)
