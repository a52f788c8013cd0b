"""RankLoop: the ranks that loop together over sharded tables."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.row_exchange import ChangingRows, Counts, RowExchange
from pinfeed.training.distributed.sharded_rows import RankLink

if TYPE_CHECKING:
    from pinfeed.training.row_loop.loop_table import LoopTable


class Exchanged(NamedTuple):
    """Bytes that this rank has sent to other ranks; all 0 for tables that are not sharded."""

    ids: int = 0
    """Ids that the batches look up: 8 bytes for each row that another rank owns."""
    rows: int = 0
    """Rows that were sent in the background."""
    late_rows: int = 0
    """Rows that were sent at the start of their step, because an earlier step could change them."""
    gradients: int = 0
    """Gradients of rows that other ranks own."""
    control_bytes: int = 0
    """Messages in which ranks agree on each exchange, and a byte for each id: late row or not."""


class RankLoop:
    """The ranks that loop together over sharded tables.

    The consumer thread calls the methods, except ``exchange``, ``end_batches`` and ``link``, which
    reader threads call.

    Args:
        tables: The tables of the loop.
        schedule: Prefetch schedule of the loop.
        verify: Whether the loop is verified.

    Raises:
        ArgumentError: If some of the tables are not sharded, or they are sharded over different
            process groups.
    """

    def __init__(
        self, tables: Sequence[LoopTable], schedule: PrefetchSchedule, *, verify: bool
    ) -> None:
        sharded = [used.sharded for used in tables if used.sharded is not None]
        group = sharded[0].rank_group
        if len(sharded) < len(tables) or any(table.rank_group is not group for table in sharded):
            kinds = [
                f"{used.name} ({'sharded' if used.sharded else 'not sharded'})" for used in tables
            ]
            raise ArgumentError(
                f"tables: {', '.join(kinds)}; expected either all tables sharded over the same "
                "process_group, or no sharded table"
            )
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._tables = tables
        self._sharded = sharded
        self._max_unseen_writes = schedule.max_unseen_writes
        # Without reader threads, the consumer thread also exchanges rows. Both kinds of steps then
        # use the same lockstep, to detect a rank that takes another step.
        self._lockstep = group.reader_lockstep if schedule.depth else group.loop_lockstep
        # Bytes that were sent before this loop was made.
        self._sent_before = group.loop_lockstep.sent + group.reader_lockstep.sent
        texts = []
        for used, table in zip(tables, sharded, strict=True):
            kinds = [f"{store.dtype} {tuple(store.row_shape)}" for store in used.stores]
            texts.append(f"{used.name}: {used.n_rows} rows, {', '.join(kinds)}, mean={table.mean}")
        # This text must be the same on all ranks.
        self._description = "; ".join([*texts, f"depth={schedule.depth}, verify={verify}"])

    @property
    def exchanged(self) -> Exchanged:
        """Bytes sent to other ranks since this object was made."""
        group = self._group
        sent = group.loop_lockstep.sent + group.reader_lockstep.sent - self._sent_before
        return Exchanged(
            ids=sent["ids"],
            rows=sent["rows"],
            late_rows=sent["late rows"],
            gradients=sent["gradients"],
            control_bytes=sent["control bytes"],
        )

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors to other ranks before a loop begins."""
        return self._group.loop_lockstep.report_failure()

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Reserve the ranks for a loop while its reader threads exist.

        Raises:
            ClosedError: If another loop of these ranks is running.
        """
        group = self._group
        thread = threading.get_ident()
        if group.is_looping:
            raise ClosedError(
                "a loop over sharded tables of these ranks is running, and ranks exchange rows for "
                "one loop at a time; end it first"
            )
        group.is_looping = True
        try:
            yield
        finally:
            try:
                if threading.get_ident() == thread:
                    self._lockstep.leave(RankStep.LEFT, "it was left")
            finally:
                group.is_looping = False

    @contextlib.contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Run a loop on all ranks. Its reader threads exist throughout.

        Raises:
            RankError: If another rank has failed, or takes another step.
        """
        lockstep = self._group.loop_lockstep
        thread = threading.get_ident()
        checksum = zlib.crc32(self._description.encode())
        lockstep.agree(RankStep.BEGIN, checksum, reason=self._description)
        lockstep.begin()
        self._lockstep.begin(len(self._tables))
        try:
            yield
            lockstep.agree(RankStep.END)
            lockstep.end()
        except BaseException as error:
            # If the garbage collector ends the loop in another thread, the other ranks notice it
            # only after their timeout.
            if threading.get_ident() == thread:
                is_break = isinstance(error, GeneratorExit)
                reason = "break, or an error in its training step" if is_break else repr(error)
                lockstep.leave(RankStep.LEFT, reason)
            raise

    def exchange(self, caches: Sequence[RowCache | None]) -> RowExchange:
        """Return the exchange of an epoch, with the caches of its tables."""
        # Without an optimizer, the loop does not change the rows.
        changing = [
            ChangingRows(
                used.stores[0],
                cache,
                self._max_unseen_writes,
                is_trained=used.optimizer is not None,
            )
            for used, cache in zip(self._tables, caches, strict=True)
        ]
        partitions = [table.owners for table in self._sharded]
        return RowExchange(self._lockstep, partitions, changing)

    def end_batches(self, number: int) -> None:
        """Agree that the loaders of all ranks have ended before batch ``number``.

        Raises:
            RankError: If another rank has such a batch, has failed, or has left.
        """
        self._lockstep.agree(RankStep.NO_BATCH, number)
        if self._lockstep is not self._group.loop_lockstep:
            self._lockstep.end()

    def link(self, number: int, table: int, counts: Counts) -> RankLink:
        """Return the exchange of one table's rows in a batch.

        Args:
            number: Number of the batch.
            table: Number of the table in the loop.
            counts: Numbers of rows by rank.
        """
        lockstep = self._group.loop_lockstep
        return RankLink(lockstep, (number, table), counts, self._sharded[table].mean)
