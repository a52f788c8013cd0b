"""ReadTable: a table whose rows a loop lends only for reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pinfeed.errors import ClosedError, WriteBackError
from pinfeed.training.distributed.table import ShardedEmbedding
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.embeddings.shared_rows import forget_lent, note_lent
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_loop.lent_table import LentTable, checked_tables

if TYPE_CHECKING:
    from pinfeed.training.row_loop.loop import RowLoop


class ReadTable(LentTable):
    """Table whose rows a loop lends for each step, without gradients and write-back.

    Several loops may read a table at the same time.

    Args:
        table: The table.
        ids: As for ``LentTable``.
    """

    may_write = False

    def __init__(self, table: HostEmbedding, ids: Any) -> None:
        super().__init__(table, ids, None)
        self.trainable = False
        self._loop: RowLoop[Any] | None = None
        self._rows: BatchRows | None = None

    @property
    def batch_rows(self) -> BatchRows:
        assert self._rows is not None
        return self._rows

    def require_idle(self) -> None:
        table = self.table
        table._require_readable()
        self._require_separate(None)
        if isinstance(table, ShardedEmbedding) and table._lender is not None:
            raise ClosedError(
                f"read_rows of {table.name}, which is sharded, inside evaluating(): the ranks "
                "exchange rows for one loop at a time; inside evaluating(), look the rows up "
                "without read_rows, on all ranks at once, or loop over read_rows after the epoch"
            )

    def is_reserved(self, loop: RowLoop[Any]) -> bool:
        return self._loop is loop

    def begin(self, loop: RowLoop[Any]) -> None:
        self._loop = loop
        self.unbind()
        note_lent(self)
        try:
            self.require_idle()
        except BaseException:
            self.end()
            raise

    def _require_other(self, other: HostEmbedding) -> None:
        other._require_readable()

    def update(self) -> bool:
        return False

    def end(self) -> None:
        if self._loop is not None:
            self.table._read_loans.end(self._loop)
            forget_lent(self)
        self._loop = None
        self._rows = None

    def bind(self, rows: BatchRows, state: list[torch.Tensor]) -> None:
        assert self._loop is not None
        self._rows = rows
        self.table._read_loans.set(self._loop, rows)

    def unbind(self) -> None:
        assert self._loop is not None
        self._rows = None
        self.table._read_loans.set(self._loop, None)

    def check_step(self) -> None:
        """Check that the program has not changed the rows, because they are not written back.

        Raises:
            WriteBackError: If the rows have changed.
        """
        if self.batch_rows.touched:
            raise WriteBackError(
                f"rows of {self.table.name} were changed in a loop over read_rows, which writes "
                "nothing back; change them in a loop over train_rows, or change a clone"
            )

    def changed_values(self) -> None:
        return None


def read_tables(tables: Any) -> list[LentTable]:
    """Return the tables of ``read_rows``. They may share rows.

    Raises:
        ArgumentError: If ``tables`` does not map tables to their ids.
    """
    return [ReadTable(table, ids) for table, ids in checked_tables(tables).items()]
