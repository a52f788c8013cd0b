"""Evaluation: a part of a training step that reads tables without training them."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.errors import ClosedError
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.training.embeddings.shared_rows import lent_with
from pinfeed.training.row_loop.lent_table import LentTable

_ENDED = (
    "this loop over read_rows was ended at the end of evaluating(), because training changes its "
    "prefetched rows; loop over the result of read_rows again in the next evaluating()"
)


class Evaluation:
    """A part of a training step in which the rows of its batch are not lent.

    The same rows are lent again at its end, with the same gradients and optimizer state.

    Args:
        tables: Tables of the training loop. Their stores have all changes so far.
    """

    def __init__(self, tables: Sequence[LentTable]) -> None:
        self._lent = tables
        self._tables = [lent.table for lent in tables]
        self._kept = [table.block for table in self._tables]
        self._versions = [version_of(rows.weight) for rows in self._kept]

    def begin(self) -> None:
        """Take the rows from the tables."""
        for table in self._tables:
            table._batch_rows = None

    def check(self) -> None:
        """Check that the rows have not changed.

        Raises:
            ClosedError: If rows have changed.
        """
        for table, rows, version in zip(self._tables, self._kept, self._versions, strict=True):
            if version_of(rows.weight) != version:
                raise ClosedError(
                    f"rows of {table.name} were changed inside evaluating(), where lookups do not "
                    "see the change; change them before or after evaluating()"
                )

    def end(self) -> None:
        """Lend the rows of the batch again, and end the loops that read them."""
        for table, rows in zip(self._tables, self._kept, strict=True):
            table._batch_rows = rows
        for lent in self._lent:
            for table in (lent.table, *lent_with(lent.table, lent.stores, write=lent.writes)):
                for loop in table._read_loans.loops:
                    loop._leave(_ENDED)
