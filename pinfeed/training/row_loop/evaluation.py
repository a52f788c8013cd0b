"""Evaluation: a part of a training step in which tables are read and not trained."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.errors import ClosedError
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.training.embeddings.table import HostEmbedding


class Evaluation:
    """A part of a training step in which the rows of its batch are not lent.

    The same rows are lent again at its end, so that gradients and the optimizer's state stay with
    them.

    Args:
        tables: Tables of the training loop, whose stores have all changes so far.
    """

    def __init__(self, tables: Sequence[HostEmbedding]) -> None:
        self._tables = tables
        self._kept = [table.block for table in tables]
        self._versions = [version_of(rows.weight) for rows in self._kept]

    def begin(self) -> None:
        """Take the rows from the tables."""
        for table in self._tables:
            table._batch_rows = None

    def check(self) -> None:
        """Check that the rows have not changed, and that no loop over ``read_rows`` runs any more.

        Raises:
            ClosedError: If they have changed, or such a loop runs; it is ended.
        """
        for table, rows, version in zip(self._tables, self._kept, self._versions, strict=True):
            if version_of(rows.weight) != version:
                raise ClosedError(
                    f"rows of {table.name} were changed inside evaluating(), whose lookups do not "
                    "see the change; change them before or after it"
                )
        if names := self.leave_reads():
            raise ClosedError(
                f"a loop over read_rows of {', '.join(names)} was still running at the end of "
                "evaluating(), and has been ended; leave its body before (what read_rows returned "
                "can be iterated again in the next evaluating())"
            )

    def leave_reads(self) -> list[str]:
        """End the loops that read the tables; return the names of tables that were being read."""
        names = []
        for table in self._tables:
            for loop in table._read_loans.loops:
                # This ends the loop if only tracebacks keep it.
                loop.release_tables()
            if table._read_loans.loops:
                names.append(table.name)
        for table in self._tables:
            for loop in table._read_loans.loops:
                loop.leave()
        return names

    def end(self) -> None:
        """Lend the rows of the batch again."""
        for table, rows in zip(self._tables, self._kept, strict=True):
            table._batch_rows = rows
