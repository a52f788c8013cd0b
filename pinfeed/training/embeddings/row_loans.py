"""RowLender and ReadLoans: loops that lend rows to a table for the steps of the program."""

from __future__ import annotations

import threading
from typing import Protocol

from pinfeed.errors import ClosedError
from pinfeed.training.embeddings.batch_rows import BatchRows


class RowLender(Protocol):
    """A loop over ``train_rows`` or ``read_rows`` that lends rows to tables."""

    @property
    def is_running(self) -> bool:
        """Whether the loop has not ended."""
        ...

    @property
    def is_evaluating(self) -> bool:
        """Whether the training step is inside ``evaluating()``, where no rows are lent."""
        ...

    def _require_evaluating(self, table: str) -> None:
        """Check that the caller is inside ``evaluating()``, in the thread of the loop.

        Args:
            table: Name of the table to read.

        Raises:
            ClosedError: If it is not.
        """

    def flush_writes(self) -> None:
        """Write every change so far to the stores. Called by the consumer thread."""

    def _flush_earlier_writes(self) -> None:
        """Write every change of the batches before the current one to the stores.

        Called by the consumer thread.
        """

    def release_tables(self) -> None:
        """Release the tables if the loop has ended without doing so, or cannot continue.

        Interrupts can prevent a loop from releasing its tables. A loop cannot continue if only
        tracebacks refer to its iterator.
        """

    def _leave(self, reason: str) -> None:
        """End the loop, as ``break`` does, and release the tables. Called by its thread.

        Args:
            reason: Error message of its iterator, if the program requests another batch.
        """


class ReadLoans:
    """Rows that loops over ``read_rows`` lend to one table at present.

    Several loops may run at the same time, in several threads. Only the thread of a loop sees its
    rows, because on a GPU another thread may use another stream.
    """

    def __init__(self) -> None:
        self._loans: dict[RowLender, tuple[int, BatchRows | None]] = {}

    @property
    def loops(self) -> list[RowLender]:
        """The loops that read the table."""
        return list(self._loans)

    def set(self, loop: RowLender, rows: BatchRows | None) -> None:
        """Note the rows that a loop lends in this thread; None between two batches."""
        self._loans[loop] = (threading.get_ident(), rows)

    def end(self, loop: RowLender) -> None:
        """Note that a loop has ended. A second call does nothing."""
        self._loans.pop(loop, None)

    def here(self) -> list[BatchRows]:
        """Return the rows that are lent in this thread, with the newest loop first."""
        if not self._loans:
            return []
        here = threading.get_ident()
        loans = reversed(list(self._loans.values()))
        return [rows for thread, rows in loans if rows is not None and thread == here]

    def require_none(self, table: str) -> None:
        """Check that no loop reads the table.

        Raises:
            ClosedError: If a loop does.
        """
        for loop in self.loops:
            loop.release_tables()
        if self._loans:
            raise ClosedError(
                f"a loop over read_rows of {table} is running; end it first, with break or with "
                "close() of the loop that read_rows returned"
            )
