"""RowLending: lends each batch's rows to the tables of a loop, and writes the changes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pinfeed.devices.device import Device, Stream
from pinfeed.errors import ClosedError
from pinfeed.pipeline.lent_batch import LentBatch, WritableBatch
from pinfeed.training.embeddings.source import DeviceBatch
from pinfeed.training.row_loop.evaluation import Evaluation
from pinfeed.training.row_loop.lent_table import LentTable, require_separate
from pinfeed.training.row_loop.verify import SynchronousRows

if TYPE_CHECKING:
    from pinfeed.training.row_loop.loop import RowLoop


class RowLending:
    """Lends the rows of the current batch to the tables of a loop and their optimizers.

    It is one class because all its methods work on the batch that is lent now.

    While a batch is lent, lookups in its tables use its rows on the device. The thread of the loop
    calls all methods.

    Args:
        tables: The tables.
        device: Device of the loop.
        verify: Whether to compare all rows with those of the synchronous loop.
        writes_always: Whether a batch is written back even if nothing has changed.
    """

    def __init__(
        self, tables: Sequence[LentTable], device: Device, *, verify: bool, writes_always: bool
    ) -> None:
        self._tables = tables
        self._device = device
        self._verify = verify
        self._writes_always = writes_always
        self._reference: SynchronousRows | None = None
        self._lent: LentBatch | None = None
        # Stream of the training step at the end of the last batch; None on the CPU.
        self._stream: Stream | None = None
        # None outside evaluating().
        self._evaluation: Evaluation | None = None
        # Thread of the running loop; None if no loop runs.
        self._thread: int | None = None

    @property
    def is_in_other_thread(self) -> bool:
        """Whether the loop is running in another thread than the caller's."""
        return self._thread not in (None, threading.get_ident())

    @property
    def is_evaluating(self) -> bool:
        """Whether the training step is inside ``evaluating()``."""
        return self._evaluation is not None

    @property
    def is_inside_evaluation(self) -> bool:
        """Whether the tables are read inside ``evaluating()`` of another loop."""
        lenders = [lent.table._lender for lent in self._tables if not lent.may_write]
        return any(lender is not None and lender.is_evaluating for lender in lenders)

    def __str__(self) -> str:
        """Return the names and shapes of the tables, for the loop's ``repr``."""
        tables = [lent.table for lent in self._tables]
        return ", ".join(
            f"{table.name} ({table.num_embeddings:,}, {table.embedding_dim})" for table in tables
        )

    def require_resumed(self) -> None:
        """Check that the rows of all tables, and their state, are those of this run.

        Raises:
            StoreError: If they are in an existing file that was not resumed.
        """
        for lent in self._tables:
            lent.require_resumed()

    def require_idle(self) -> None:
        """Check that no loop lends rows of one of the tables.

        Raises:
            ClosedError: If a loop does.
        """
        for lent in self._tables:
            lent.require_idle()

    def prepare(self) -> None:
        """Prepare for an epoch, before its first batch is read."""
        if self._verify:
            self._reference = SynchronousRows(
                [(lent.table.name, lent.names, lent.stores) for lent in self._tables]
            )

    def reserve(self, loop: RowLoop[Any], stack: contextlib.ExitStack) -> None:
        """Reserve all tables for a new loop, until ``stack`` is closed.

        Raises:
            ClosedError: If another loop lends rows of one of the tables.
            ArgumentError: If tables that have become trainable share rows.
        """
        stack.callback(self._end)
        is_new = [lent.update() for lent in self._tables]
        if any(is_new):
            require_separate(self._tables)
        for lent in self._tables:
            lent.begin(loop)
            stack.callback(lent.end)

    def release(self, loop: RowLoop[Any]) -> None:
        """Release the tables that are still reserved for the ended ``loop``."""
        for lent in self._tables:
            if lent.is_reserved(loop):
                lent.end()
        self._end()

    def enter_thread(self) -> None:
        """Note that the loop runs in the caller's thread."""
        self._thread = threading.get_ident()

    def bind(self, lent: LentBatch) -> Any:
        """Lend the rows of a batch to the tables, and return the loader's batch.

        Raises:
            VerificationError: If a row differs from the synchronous loop.
        """
        batch: DeviceBatch = lent.take()
        if self._reference is not None:
            found = [(device_rows.rows, device_rows.tensors) for device_rows in batch.tables]
            self._reference.check(lent.number, found)
        batch_rows = batch.batch_rows([table.trainable for table in self._tables])
        if self._reference is not None:
            batch.check(lent.number)
        for table, rows, device_rows in zip(self._tables, batch_rows, batch.tables, strict=True):
            # The first tensor is the weights; the others are the optimizer's state.
            table.bind(rows, device_rows.tensors[1:])
        self._lent = lent
        return batch.data

    def finish_batch(self, *, check: bool) -> None:
        """Write the current batch back, and take its rows from the tables.

        Args:
            check: Whether to raise the error of an earlier write-back that failed.
        """
        # Each call runs even if the previous one fails.
        try:
            self._end_evaluation()
        finally:
            try:
                self._share_rows()
                self._write_back(copied=False, check=check)
            finally:
                self._unbind()

    def write_copy(self) -> None:
        """Write a copy of the current batch back. The training step may still change the rows.

        Raises:
            ClosedError: If the loop is running in another thread.
        """
        self.require_thread()
        # Inside evaluating(), a copy was already written at its beginning.
        if self._lent is not None and not self.is_evaluating:
            self._write_back(copied=True, check=True)

    def require_thread(self) -> None:
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

    def require_training(self) -> None:
        """Check that the training step has left ``evaluating()`` before the next batch.

        Raises:
            ClosedError: If it has not.
        """
        if self.is_evaluating:
            raise ClosedError(
                "the next batch was requested inside evaluating(); leave evaluating() before the "
                "training step ends"
            )

    @contextlib.contextmanager
    def evaluating(self, loop: RowLoop[Any]) -> Iterator[None]:
        """Flush all changes, and lend no rows until the context is left.

        Raises:
            ClosedError: If the caller is not in a training step of the loop, or is already inside
                this context. Also at its end, if rows were changed inside it.
            Exception: If a write-back has failed. The original error is raised.
        """
        self._require_step()
        loop.flush_writes()
        evaluation = Evaluation(self._tables)
        self._evaluation = evaluation
        try:
            evaluation.begin()
            yield
            # The loop may have been closed inside the context.
            if self._evaluation is evaluation:
                evaluation.check()
        finally:
            if self._evaluation is evaluation:
                self._end_evaluation()

    def check_step(self) -> None:
        """Check each table at the end of a step, as ``LentTable.check_step`` does."""
        for table in self._tables:
            table.check_step()

    def check_stores(self) -> None:
        """Compare the stores with the synchronous loop, after an epoch.

        Raises:
            VerificationError: If a row differs.
        """
        if self._reference is not None:
            self._reference.check_stores()

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
            for table in self._tables:
                for tensor in table.batch_rows.tensors:
                    device.share(tensor, compute)

    def _unbind(self) -> None:
        """Take the rows of the current batch from the tables."""
        self._lent = None
        for table in self._tables:
            table.unbind()

    def _end(self) -> None:
        """Forget the batch and the thread of a loop that has ended."""
        self._lent = None
        self._stream = None
        self._evaluation = None
        self._reference = None
        self._thread = None

    def _require_step(self) -> None:
        """Check that the caller is in a training step of the loop, and not in ``evaluating()``.

        Raises:
            ClosedError: If it is not.
        """
        self.require_thread()
        if self.is_evaluating:
            raise ClosedError(
                "evaluating() inside evaluating(); expected one at a time; leave the outer context "
                "first"
            )
        if self._lent is None or not any(table.may_write for table in self._tables):
            raise ClosedError(
                "evaluating() outside a training step; expected it inside a loop over train_rows; "
                "outside that loop, call the model or loop over read_rows without evaluating()"
            )

    def _end_evaluation(self) -> None:
        """Lend the rows of the current batch again, if the step is inside ``evaluating()``."""
        evaluation = self._evaluation
        self._evaluation = None
        if evaluation is not None:
            evaluation.end()

    def _write_back(self, *, copied: bool, check: bool) -> None:
        """Write the changed values of the current batch to the stores, in the background.

        Args:
            copied: Whether to copy the values first.
            check: Whether to raise the error of an earlier write-back that failed.
        """
        lent = self._lent
        assert lent is not None
        values = [table.changed_values() for table in self._tables]
        has_changed = any(tensors is not None for tensors in values)
        if not has_changed and not self._writes_always:
            return
        if self._reference is not None:
            groups = zip(lent.groups, values, strict=True)
            self._reference.write([(group.batch_rows, tensors) for group, tensors in groups])
        # A loop over read_rows has no values to write.
        if isinstance(lent, WritableBatch):
            lent.write(values, copied=copied, check=check)
