"""SynchronousRows: the row values of the synchronous loop, for verification."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.errors import VerificationError
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import bytes_by_row, to_numpy
from pinfeed.training.row_loop.loop_table import LoopTable


class SynchronousRows:
    """The row values of the synchronous loop: a copy of every row that was lent.

    A row is copied from its store when it is lent for the first time, because the loop has not
    written it before. Later writes of the loop change the copy immediately.

    Args:
        tables: The tables of a loop.
    """

    def __init__(self, tables: Sequence[LoopTable]) -> None:
        self._tables = [
            [
                _RowCopies(f"{used.name}, {name}", store)
                for name, store in zip(used.names, used.stores, strict=True)
            ]
            for used in tables
        ]

    def check(
        self, batch: int, every: Sequence[Rows], stored: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Compare the rows of a batch with the rows that the synchronous loop would gather.

        Args:
            batch: Number of the batch, for the error.
            every: For each table, its row indices.
            stored: For each table, these rows of each of its stores.

        Raises:
            VerificationError: If a row differs.
        """
        for table, rows, tensors in zip(self._tables, every, stored, strict=True):
            for copy, tensor in zip(table, tensors, strict=True):
                copy.compare(f"batch {batch}", rows, _bytes(tensor))

    def write(
        self, every: Sequence[Rows], written: Sequence[Sequence[torch.Tensor | None] | None]
    ) -> None:
        """Write the rows that the loop writes back.

        Args:
            every: For each table, its row indices.
            written: For each table, the values for each of its stores. None instead of values
                leaves a store or a table unchanged.
        """
        for table, rows, tensors in zip(self._tables, every, written, strict=True):
            for copy, tensor in zip(table, tensors or (), strict=False):
                if tensor is not None:
                    values = _bytes(tensor).copy()
                    copy.values.update(zip(rows.tolist(), values, strict=True))

    def check_stores(self) -> None:
        """Compare the stores with the copies, after the loop.

        Raises:
            VerificationError: If a row differs.
        """
        for table in self._tables:
            for copy in table:
                rows = np.array(sorted(copy.values), np.int64)
                copy.compare("after the loop, in the store", rows, _gathered(copy.store, rows))


class _RowCopies:
    """Copies of rows of one store as bytes, by row index."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self.store = store
        self.values: dict[int, npt.NDArray[np.uint8]] = {}

    def compare(self, when: str, rows: Rows, found: npt.NDArray[np.uint8]) -> None:
        """Compare rows with their copies. Rows without a copy are first read from the store.

        Args:
            when: Beginning of the error.
            rows: Row indices, shape (n,).
            found: Bytes of these rows, shape (n, bytes per row).

        Raises:
            VerificationError: If a row differs.
        """
        new = np.array([row for row in rows.tolist() if row not in self.values], np.int64)
        self.values.update(zip(new.tolist(), _gathered(self.store, new), strict=True))
        if not len(rows):
            return
        expected = np.stack([self.values[row] for row in rows.tolist()])
        wrong = np.flatnonzero((expected != found).any(axis=1))
        if len(wrong):
            first = wrong[0]
            value = found[first].view(self.store.dtype)
            expected_value = expected[first].view(self.store.dtype)
            raise VerificationError(
                f"{when}: {self.name}, row {rows[first]} is {value}; the synchronous loop has "
                f"{expected_value} ({len(wrong)} of {len(rows)} rows differ)"
            )


def _gathered(store: Store, rows: Rows) -> npt.NDArray[np.uint8]:
    """Return rows of a store as bytes, shape (n, bytes per row)."""
    out = np.empty((len(rows), *store.row_shape), store.dtype)
    store.gather(rows, out)
    return bytes_by_row(out)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return rows on a device as bytes, shape (n, bytes per row)."""
    return bytes_by_row(to_numpy(tensor.detach().cpu().contiguous(), "rows"))
