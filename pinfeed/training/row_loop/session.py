"""TableSession: one loop over tables, from their reservation to their release.

All tables of a loop are in the same state. Events change it:

    state        event                             next state
    IDLE         the loop begins                   RESERVED
    RESERVED     the loop lends a batch            LENT
    LENT         the training step ends            RESERVED
    LENT         the step enters evaluating()      EVALUATING
    EVALUATING   the step leaves evaluating()      LENT
    any          the loop ends                     IDLE

The loop ends after its last batch, or by ``break``, an error, an interrupt or ``close``. A loop
over ``read_rows`` is never EVALUATING.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from types import GeneratorType
from typing import Any, cast

from pinfeed.devices.batch_copies import share_each
from pinfeed.devices.device import Device, Stream
from pinfeed.errors import ClosedError
from pinfeed.pipeline.epochs import EpochRunner
from pinfeed.pipeline.lent_batch import LentBatch, WritableBatch
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.training.distributed.rank_loop import RankLoop
from pinfeed.training.distributed.row_exchange import check_received, receive_deferred
from pinfeed.training.embeddings.batch_rows import loops_over
from pinfeed.training.row_loop.loop_table import LoopTable, require_separate
from pinfeed.training.row_loop.row_source import TableBatch
from pinfeed.training.row_loop.synchronous_rows import SynchronousRows

_ENDED_BY_ANOTHER = (
    "this loop was ended when another loop over one of its tables began; loop over one after the "
    "other"
)
_ENDED = (
    "this loop over read_rows was ended at the end of evaluating(), because training changes its "
    "prefetched rows; loop over the result of read_rows again in the next evaluating()"
)


class State(enum.Enum):
    """The state of the tables of a loop."""

    IDLE = enum.auto()
    """No loop runs. Lookups read the stores."""
    RESERVED = enum.auto()
    """The loop is between two batches."""
    LENT = enum.auto()
    """The program is in a training step. Lookups use the rows of its batch on the device."""
    EVALUATING = enum.auto()
    """Lookups read the stores, which have all changes. The batch keeps its rows."""


class TableSession:
    """The tables of a loop, and the batch whose rows they have.

    The thread of the loop calls all methods, unless they say otherwise. It is one class because it
    is one state machine.

    Args:
        tables: The tables. They all train or all read their rows.
        runner: Runs the loop.
        device: Device of the loop.
        ranks: Ranks that loop together over sharded tables; None for other tables.
        verify: Whether to compare all rows with those of the synchronous loop.
    """

    def __init__(
        self,
        tables: Sequence[LoopTable],
        runner: EpochRunner,
        device: Device,
        *,
        ranks: RankLoop | None,
        verify: bool,
    ) -> None:
        self._tables = tables
        self._runner = runner
        self._device = device
        self._ranks = ranks
        self._verify = verify
        self._reads = any(used.reads for used in tables)
        self._state = State.IDLE
        # The batch of the current step, in the states LENT and EVALUATING.
        self._batch: LentBatch | None = None
        # Thread of the running loop; None if no loop runs.
        self._thread: int | None = None
        # Stream of the training step at the end of the last batch; None on the CPU.
        self._stream: Stream | None = None
        self._reference: SynchronousRows | None = None
        # Iterator of the last loop. The reference is weak, so a loop ends when the caller drops it.
        self._iterator: weakref.ref[GeneratorType[Any, None, None]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the loop has not ended. Any thread may ask."""
        return self._runner.is_running

    @property
    def is_evaluating(self) -> bool:
        """Whether the training step is inside ``evaluating()``. Any thread may ask."""
        return self._state is State.EVALUATING

    @property
    def is_inside_evaluation(self) -> bool:
        """Whether the tables are read inside ``evaluating()`` of another loop."""
        return any(used.reads and used.table._is_in_evaluation for used in self._tables)

    @property
    def is_in_other_thread(self) -> bool:
        """Whether the loop is running in another thread than the caller's."""
        return self._thread not in (None, threading.get_ident())

    @property
    def iterator(self) -> GeneratorType[Any, None, None] | None:
        """The iterator of the last loop, if the caller has not dropped it."""
        return self._iterator() if self._iterator is not None else None

    def require_evaluating(self, table: str) -> None:
        """Check that the caller is inside ``evaluating()``, in the thread of the loop.

        Args:
            table: Name of the table to read.

        Raises:
            ClosedError: If it is not.
        """
        if not self.is_evaluating or self.is_in_other_thread:
            raise ClosedError(
                f"read_rows of {table} while a loop over train_rows uses its rows; expected "
                "`with batches.evaluating():` around the loop over read_rows, in the training step "
                "and its thread, where batches is the loop that train_rows returned"
            )

    def iterate(self, begin: Callable[[], object]) -> Iterator[Any]:
        """Return the iterator of a new loop.

        Args:
            begin: Function that begins an epoch of the loader. The runner calls it.
        """
        generator = self._runner.run(lambda lent: lent, begin=begin, through=self._lend_each)
        self._iterator = weakref.ref(cast("GeneratorType[Any, None, None]", generator))
        return generator

    def flush_writes(self, *, of_step: bool = True) -> None:
        """Wait until every change so far is in the stores.

        Args:
            of_step: Whether to include the changes of the current step.

        Raises:
            ClosedError: If the loop runs in another thread.
            Exception: If a write-back has failed. The original error is raised.
        """
        self._require_thread()
        # The garbage collector must not end a dropped loop in the middle of this call.
        _kept = self.iterator
        # Inside evaluating(), all changes were already written at its beginning.
        if of_step and self._state is State.LENT:
            self._write_back(copied=True, check=True)
        self._runner.drain()

    def end(self) -> None:
        """End the loop, as ``break`` does, because another one begins over one of its tables.

        A loop in another thread, or whose training step is inside ``evaluating()``, continues.
        """
        if not self.is_evaluating:
            self._runner.leave(_ENDED_BY_ANOTHER)

    def release_if_over(self) -> None:
        """Release the tables if the loop has ended without doing so, as after an interrupt.

        Raises:
            Exception: If a write-back has failed. The original error is raised.
        """
        if self.is_running:
            return
        if (generator := self.iterator) is not None:
            generator.close()
        self._release()
        self._runner.drain()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Flush all changes, and lend no rows until the context is left.

        Raises:
            ClosedError: If the caller is not in a training step of the loop, or is already inside
                this context. Also at its end, if rows were changed inside it.
            Exception: If a write-back has failed. The original error is raised.
        """
        self._require_thread()
        if self.is_evaluating:
            raise ClosedError(
                "evaluating() inside evaluating(); expected one at a time; leave the outer context "
                "first"
            )
        if self._state is not State.LENT or self._reads:
            raise ClosedError(
                "evaluating() outside a training step; expected it inside a loop over train_rows; "
                "outside that loop, call the model or loop over read_rows without evaluating()"
            )
        self.flush_writes()
        batch = self._batch
        versions = [version_of(used.lent.weight) for used in self._tables]
        try:
            self._state = State.EVALUATING
            for used in self._tables:
                used.table._lend(None)
            yield
            # The loop may have been closed inside the context.
            if self._batch is not batch:
                return
            for used, version in zip(self._tables, versions, strict=True):
                if version_of(used.lent.weight) != version:
                    raise ClosedError(
                        f"rows of {used.name} were changed inside evaluating(), where lookups do "
                        "not see the change; change them before or after evaluating()"
                    )
        finally:
            if self._batch is batch:
                self._end_evaluation()

    def _lend_each(self, lent_batches: Iterator[LentBatch]) -> Iterator[Any]:
        """Lend the rows of each batch while the caller runs its training step."""
        batches = cast("Generator[LentBatch, None, None]", lent_batches)
        with contextlib.ExitStack() as stack:
            stack.callback(self._release)
            self._reserve()
            if self._ranks is not None:
                stack.enter_context(self._ranks.claim())
            stack.enter_context(contextlib.closing(batches))
            if self._ranks is not None:
                stack.enter_context(self._ranks.in_lockstep())
            self._thread = threading.get_ident()
            for lent_batch in batches:
                data = self._bind(lent_batch)
                has_finished = False
                try:
                    yield data
                    has_finished = True
                    if self.is_evaluating:
                        raise ClosedError(
                            "the next batch was requested inside evaluating(); leave evaluating() "
                            "before the training step ends"
                        )
                    for used in self._tables:
                        used.check_step()
                finally:
                    # After break or an error, the optimizer's changes count, as in the plain loop.
                    del data
                    self._finish_batch(check=has_finished)
            if self._reference is not None:
                self._reference.check_stores()

    def _reserve(self) -> None:
        """Reserve all tables for a new loop.

        Raises:
            ClosedError: If another loop excludes this one.
            ArgumentError: If tables that have become trainable share rows.
        """
        if not self._reads:
            before = [used.trainable for used in self._tables]
            for used in self._tables:
                used.trainable = used.table.trainable
            if any(used.trainable > was for used, was in zip(self._tables, before, strict=True)):
                require_separate(self._tables)
        if self._verify:
            self._reference = SynchronousRows(self._tables)
        for used in self._tables:
            used.reserve(self)
        self._state = State.RESERVED
        self._runner.finish_step = functools.partial(self._finish_batch, check=False)

    def _bind(self, lent: LentBatch) -> Any:
        """Lend the rows of a batch to the tables, and return the loader's batch.

        Raises:
            VerificationError: If a row differs from the synchronous loop.
        """
        batch: TableBatch = lent.take()
        if self._reference is not None:
            stored_rows = [rows.stored_rows for rows in batch.rows]
            self._reference.check(lent.number, stored_rows, batch.stored)
        if self._ranks is not None:
            receive_deferred(batch.rows)
            if self._verify:
                check_received(batch.rows)
        for used, rows, stored in zip(self._tables, batch.rows, batch.stored, strict=True):
            if used.trainable:
                rows.require_gradients()
            # The first tensor is the weights; the others are the optimizer's state.
            used.bind(rows, stored[1:])
        self._batch = lent
        self._state = State.LENT
        return batch.data

    def _finish_batch(self, *, check: bool) -> None:
        """Write the current batch back, if any, and take its rows from the tables.

        Args:
            check: Whether to raise the error of an earlier write-back that failed.
        """
        if self._batch is None:
            return
        # Each call runs even if the previous one fails.
        try:
            self._end_evaluation()
        finally:
            try:
                self._share_rows()
                self._write_back(copied=False, check=check)
            finally:
                self._state = State.RESERVED
                self._batch = None
                for used in self._tables:
                    used.unbind()

    def _require_thread(self) -> None:
        """Check that the loop is not running in another thread than the caller's.

        Raises:
            ClosedError: If it is.
        """
        if self.is_in_other_thread:
            raise ClosedError(
                "rows were requested in another thread than that of their loop over train_rows; "
                "request them in the training step (the functions that return the ids of a batch "
                "run in a background thread)"
            )

    def _write_back(self, *, copied: bool, check: bool) -> None:
        """Write the changed values of the current batch to the stores, in the background.

        Args:
            copied: Whether to copy the values first. The training step may still change the rows.
            check: Whether to raise the error of an earlier write-back that failed.
        """
        lent = self._batch
        # A loop over read_rows has no values to write.
        if self._reads or not isinstance(lent, WritableBatch):
            return
        values = [used.changed_values() for used in self._tables]
        # Ranks defer rows for a number of batches, but changes are in the stores after a number of
        # writes. Every batch must therefore count as a write.
        if not any(values) and self._ranks is None:
            return
        if self._reference is not None:
            self._reference.write([group.batch_rows for group in lent.groups], values)
        lent.write(values, copied=copied, check=check)

    def _share_rows(self) -> None:
        """Share the rows of the current batch with the stream to which the step has changed.

        Their memory is then not used again before that stream has done the lookups.
        """
        device = self._device
        if device.unified:
            return
        compute = device.current_stream()
        # The batch was lent in the stream in which the last step had ended.
        if compute != self._stream:
            self._stream = compute
            for used in self._tables:
                share_each(device, used.lent.tensors, compute)

    def _end_evaluation(self) -> None:
        """Lend the rows of the batch again, and end the loops that read them."""
        if self._state is not State.EVALUATING:
            return
        self._state = State.LENT
        for used in self._tables:
            used.table._lend(used.rows)
        for used in self._tables:
            for other in loops_over(used.table, used.stores, writes=used.writes):
                if other.reads and other.session is not None:
                    other.session.leave(_ENDED)

    def leave(self, reason: str) -> None:
        """End the loop as ``break`` does, and release its tables. The loop is in this thread.

        Args:
            reason: Error message of its iterator, if the program requests another batch.
        """
        self._runner.leave(reason)
        self._release()

    def _release(self) -> None:
        """Release the tables that are still reserved, and forget the loop."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            for used in self._tables:
                stack.callback(used.release)

    def _forget(self) -> None:
        self._state = State.IDLE
        self._batch = None
        self._stream = None
        self._reference = None
        self._thread = None
        self._runner.finish_step = None
