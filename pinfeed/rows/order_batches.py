"""RowBatches: the row indices of an epoch, batch by batch; OrderBatches: those of an order."""

from __future__ import annotations

import dataclasses
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import At, KnownOrder, Order, Rows, known
from pinfeed.rows.ranks import PerRank, Progress, Ranks
from pinfeed.rows.runs import Places
from pinfeed.rows.windows import Windows


class RowIndices(NamedTuple):
    """Row indices of one batch, or of several consecutive batches that are gathered together."""

    n_rows: int
    """Number of rows in all of the batches."""
    batches: Sequence[tuple[int, int]]
    """For each batch the number of rows, and a checksum of the epoch's row indices up to its end.

    The checksum is 0 if a resumed epoch needs none.
    """
    rows: Callable[[], Rows]
    """Computes the row indices, shape (n_rows,). Any thread may call it."""
    places: Places | None = None
    """Places of the rows of packed batches in their sequences; None for whole rows."""
    n_positions: int | None = None
    """Positions of the order that the batches of all ranks take; None for one for each row."""


class EpochHooks:
    """Reactions of a source's batches to the position of its loop; this base class has none.

    The consumer thread calls the hooks, between batches or between epochs.
    """

    kind = "a feeder"
    """Kind of feeder that a state belongs to, for error messages."""
    state_keys: Sequence[str] = ()
    """Keys that a loaded state must have besides those of every feeder."""
    changeable: Sequence[str] = ()
    """Keys of the fingerprint whose values may differ from those of a loaded state."""
    continues_after_end = True
    """Whether a loop that is resumed at the end of an epoch continues with the next epoch."""

    @property
    def chosen_epoch(self) -> int | None:
        """Epoch that the owner of a sampler has set for the next run, or None."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Note that the user has set the feeder to ``epoch``."""

    def epoch_changed(self, epoch: int) -> None:
        """Note that the next run is ``epoch``, because a state was loaded or a run has ended."""

    def restart(self, epoch: int) -> None:
        """Note that the next run begins at the first batch of ``epoch``."""

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the entries that a state after ``batch`` batches of ``epoch`` has in addition."""
        return {}

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        """Translate a state that was loaded into a position of this process.

        Args:
            state: State of a feeder with the same fingerprint, ``changeable`` keys excepted.
            n_batches: Number of batches in an epoch; infinite if it is not known.

        Returns:
            The batch of the epoch with which the next run begins, and whether the epoch is over.

        Raises:
            ArgumentError: If an epoch has no such batch.
        """
        epoch = int(state["epoch"])
        batch = int(state["batch"])
        if not 0 <= batch <= n_batches:
            raise ArgumentError(
                f"the state is at batch {batch} of epoch {epoch}, but an epoch has {n_batches} "
                "batches"
            )
        return batch, 0 < batch == n_batches


class RowBatches(EpochHooks, ABC):
    """The batches of every epoch, as row indices."""

    @property
    def is_distinct(self) -> bool:
        """Whether the batches are known to have each row at most once per epoch."""
        return False

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly if a saved position stands for the same batch."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: If the number is not known.
        """

    def n_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch, which other ranks may have begun.

        Raises:
            TypeError: If the number is not known.
        """
        return len(self)

    @abstractmethod
    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        """Yield the batches of an epoch in order; the row indices are computed later.

        Args:
            number: Number of the epoch.
            start: Number of the first batch to yield.
            checksum: Checksum that a state has for the batches before ``start``.
            batches_per_slot: Maximum number of batches per yielded item.
        """

    @abstractmethod
    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        """Return the windows of an epoch, or None, and the range of positions that it reads.

        Args:
            number: Number of the epoch.
            start: Number of the first batch.

        Returns:
            The windows, the first position, and the position after the last one.
        """


# An order computes this many rows at once. Small batches then share numpy's cost per call, and
# large batches need no more memory.
_RUN_ROWS = 1 << 14
ORDER_BYTES = 3 << 20
"""Most bytes that an order needs: three tables of 512 KiB, and arrays for a run of rows."""
# A single process reads every row once.
_ALONE = Ranks("join")


@dataclass(eq=False)
class _OrderRun:
    """Row indices at consecutive positions of an order, computed once, when first needed.

    Args:
        n_rows: Number of the positions.
        compute: Computes the row indices.
        lock: Held while ``compute`` is called, because it may call the user's code.
    """

    n_rows: int
    compute: Callable[[], Rows]
    lock: threading.Lock
    computed: Rows | None = None
    """The row indices; None before they are first needed."""

    def part(self, begin: int, end: int, next_run: _OrderRun | None) -> Rows:
        """Return rows [begin, end) of the run, and compute the next run before it is needed."""
        rows = self.rows()
        if next_run is not None:
            next_run.rows()
        return rows[begin:end]

    def rows(self) -> Rows:
        """Return the row indices of the run."""
        if self.computed is None:
            with self.lock:
                if self.computed is None:
                    self.computed = self.compute()
        return self.computed


@dataclass(eq=False)
class EqualBatches(RowBatches):
    """Batches of equally many rows each, in the sequence of an order that ranks may share.

    If a part of an epoch was read with another size of batches, or by another number of ranks, the
    epoch consists of the remaining rows. The state of any rank can be loaded with any size, and in
    jobs with any number of ranks.

    Args:
        order: Order of all rows.
        n_rows: Number of rows in the stores; 0 before it is known.
        size: Rows per batch, of each rank or, with ``ranks.split_batches``, of all ranks together.
        drop_last: Whether to leave out a last batch that is not full.
        ranks: The user's choice of how ranks share an epoch.
        rank: Number of the rank.
        world_size: Number of ranks.
    """

    order: Order
    n_rows: int
    size: int
    drop_last: bool = False
    ranks: Ranks = _ALONE
    rank: int = 0
    world_size: int = 1
    # An epoch, and its positions that were done before batch 0.
    _begun: tuple[int, Progress] = field(default=(0, ()), init=False)

    state_keys = ("ranks",)
    changeable = ("batch_size",)

    @property
    def batch_size(self) -> int:
        """Rows per batch of this rank."""
        return self.size // self.world_size if self.ranks.split_batches else self.size

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that determine the row order; rank and world size are not among them."""
        return {
            "order": repr(self.order),
            "n_rows": self.n_rows,
            "batch_size": self.size,
            "drop_last": self.drop_last,
        }

    def rows(self, done: Progress = ()) -> KnownOrder:
        """Return the order of this rank's rows.

        Args:
            done: Positions of the epoch that are already done.
        """
        order = known(self.order)
        if self.world_size == 1 and not done:
            return order
        in_one = order.in_blocks and not self.ranks.split_batches
        chunk = None if in_one else self.batch_size
        return PerRank(order, self.rank, self.world_size, self.ranks.uneven, chunk, done)

    def __len__(self) -> int:
        return self._count(())

    def n_batches(self, epoch: int) -> int:
        return self._count(self._done(epoch))

    def begin(self, epoch: int, done: Progress) -> None:
        """Set the positions of an epoch that are already done; no other epoch was begun."""
        self._begun = epoch, done

    def restart(self, epoch: int) -> None:
        self.begin(epoch, ())

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the position after ``batch`` batches of an epoch, as plain values.

        The state after the end of an epoch contains no positions that were done before.
        """
        done = self._done(epoch)
        if done and batch == self._most(done):
            batch = self._most(())
            done = ()
        return {
            "batch": batch,
            "ranks": {"world_size": self.world_size, "done": [list(part) for part in done]},
        }

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        size = saved_size(state)
        batch, done, is_over = self.resumed(int(state["batch"]), state["ranks"], size)
        self.begin(int(state["epoch"]), done)
        return batch, is_over

    def resumed(
        self, batch: int, theirs: Mapping[str, Any], size: int
    ) -> tuple[int, Progress, bool]:
        """Translate the position of other ranks into a position of this rank.

        Args:
            batch: Number of batches that each of the other ranks has done.
            theirs: Entry ``"ranks"`` of their state.
            size: Their ``size``.

        Returns:
            The batch of this rank to begin with, the positions that were done before, and whether
            the epoch is over.

        Raises:
            ArgumentError: If ``theirs`` is not such an entry, or their epoch has no such batch.
        """
        world_size, done = self._read(theirs, size)
        n = dataclasses.replace(self, size=size, world_size=world_size)._most(done)
        if not 0 <= batch <= n:
            of_each = f" of each of the {world_size} ranks" * (world_size > 1)
            raise ArgumentError(
                f"the state is at batch {batch}; expected 0 to {n}, the number of batches"
                f"{of_each} in that epoch"
            )
        # Ranks that have no batch of an epoch leave it out; a single process begins it.
        if batch == n and (batch or done or world_size > 1):
            return len(self), (), bool(batch or done)
        is_split = self.ranks.split_batches
        same_batches = size == self.size and (world_size == self.world_size or is_split)
        if batch and not same_batches:
            # The rows of a global batch are all read, by however many ranks.
            done = (*done, (1 if is_split else world_size, batch * size))
            batch = 0
        if (batch or done) and batch == self._most(done):
            # Too few rows are left for a batch of every rank.
            return len(self), (), True
        return batch, done, False

    def _read(self, theirs: Mapping[str, Any], size: int) -> tuple[int, Progress]:
        """Read the entry ``"ranks"`` of a state: the ranks, and the positions done before them."""
        try:
            world_size = int(theirs["world_size"])
            done = tuple((int(a), int(n)) for a, n in theirs["done"])
            if world_size < 1 or any(a < 1 or n < 0 for a, n in done):
                raise ValueError("negative numbers")
            if self.ranks.split_batches and size % world_size:
                raise ValueError(f"{size} rows for {world_size} ranks")
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of {self.kind} ({error!r}): {theirs!r}; expected the result of "
                "state_dict()"
            ) from None
        return world_size, done

    def _most(self, done: Progress) -> int:
        """Return the most batches that a rank has after the positions ``done``."""
        # No rank has more than the first one.
        return dataclasses.replace(self, rank=0)._count(done)

    def _count(self, done: Progress) -> int:
        """Return the number of batches of this rank after the positions ``done``."""
        n = self.rows(done).length(self.n_rows)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def _done(self, epoch: int) -> Progress:
        """Return the positions of an epoch that were done before its batch 0."""
        return self._begun[1] if epoch == self._begun[0] else ()

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        """Yield the batches of an epoch; the order determines them, so there is no checksum."""
        size = self.batch_size
        slot_rows = batches_per_slot * size
        full = [(size, 0)] * batches_per_slot
        runs = self._runs(number, start, slot_rows)
        run = next(runs, None)
        while run is not None:
            next_run = next(runs, None)
            for i in range(0, run.n_rows, slot_rows):
                n = min(slot_rows, run.n_rows - i)
                batches = full if n == slot_rows else sizes(n, size)
                ahead = next_run if i == 0 else None
                yield RowIndices(n, batches, functools.partial(run.part, i, i + n, ahead))
            run = next_run

    def spans(self, number: int, start: int, batches_per_slot: int) -> Generator[Rows, None, None]:
        """Yield the row indices of an epoch, for many batches at a time.

        Args:
            number: Number of the epoch.
            start: Number of the first batch.
            batches_per_slot: Number that divides the batches of each span, except the last one.
        """
        for run in self._runs(number, start, batches_per_slot * self.batch_size):
            yield run.rows()

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        rows = self.rows(self._done(number))
        return rows.windows(self.n_rows, number), *self._range(number, start)

    def _runs(self, number: int, start: int, slot_rows: int) -> Iterator[_OrderRun]:
        """Yield runs of whole slots, from batch ``start`` of an epoch on."""
        at = self.rows(self._done(number)).bind(self.n_rows, number)
        lock = threading.Lock()
        position, stop = self._range(number, start)
        step = max(1, _RUN_ROWS // slot_rows) * slot_rows
        for begin in range(position, stop, step):
            end = min(begin + step, stop)
            yield _OrderRun(end - begin, functools.partial(self._compute, at, begin, end), lock)

    def _compute(self, at: At, begin: int, end: int) -> Rows:
        """Return the row indices at positions [begin, end)."""
        if end - begin <= _RUN_ROWS:
            return at(np.arange(begin, end))
        rows = np.empty(end - begin, np.int64)
        for i in range(begin, end, _RUN_ROWS):
            stop = min(i + _RUN_ROWS, end)
            rows[i - begin : stop - begin] = at(np.arange(i, stop))
        return rows

    def _range(self, epoch: int, start: int) -> tuple[int, int]:
        """Return the positions of the rest of an epoch from batch ``start`` on."""
        n = self.rows(self._done(epoch)).length(self.n_rows)
        return start * self.batch_size, min(self.n_batches(epoch) * self.batch_size, n)


class OrderBatches(EqualBatches):
    """The batches of an order that one process reads as a whole."""

    @property
    def is_distinct(self) -> bool:
        return self.rows().most_copies == 1


class RankBatches(EqualBatches):
    """The batches of one rank, of those that the user has asked to share an epoch."""

    kind = "a feeder with ranks="

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            **super().fingerprint,
            "ranks": self.ranks.uneven,
            "split_batches": self.ranks.split_batches,
        }


def saved_size(state: Mapping[str, Any]) -> int:
    """Return the rows of a batch of the feeder that saved a state.

    Raises:
        ArgumentError: If the state has no such number.
    """
    size = state["source"].get("batch_size")
    # Functions that read samples count these in a batch; one input gives one_read_count of them.
    n_samples = state["source"].get("one_read_count", 1)
    if not isinstance(size, int) or size < n_samples:
        raise ArgumentError(
            f"a state with batch_size={size!r}: expected the result of state_dict()"
        )
    return size // int(n_samples)


def sizes(n_rows: int, batch_size: int) -> list[tuple[int, int]]:
    """Cut ``n_rows`` rows into batches; return the size of each, with the checksum 0."""
    return [(min(batch_size, n_rows - i), 0) for i in range(0, n_rows, batch_size)]
