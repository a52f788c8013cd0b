"""Shadow: the synchronous loop, run beside the one that prefetches, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.errors import VerificationError
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import bytes_by_row, to_numpy


class Shadow:
    """Rows as the synchronous loop has them: every row that was lent, as it was lent first and written since.

    A row is read from its store when it is lent for the first time: nobody has written it by then.

    Args:
        tables: For each table its name, and the names and stores of its weights and state.
    """

    def __init__(self, tables: Sequence[tuple[str, Sequence[str], Sequence[Store]]]) -> None:
        self._tables = [
            [_Rows(f"{table}, {name}", store) for name, store in zip(names, stores, strict=True)]
            for table, names, stores in tables
        ]

    def check(self, batch: int, lent: Sequence[tuple[Rows, Sequence[torch.Tensor]]]) -> None:
        """Compare what is lent with what the synchronous loop would gather now.

        Raises:
            VerificationError: At the first difference.
        """
        for table, (rows, tensors) in zip(self._tables, lent, strict=True):
            for known, tensor in zip(table, tensors, strict=True):
                known.compare(f"batch {batch}", rows, _bytes(tensor))

    def write(self, written: Sequence[tuple[Rows, Sequence[torch.Tensor | None] | None]]) -> None:
        """Scatter what the loop writes back, at once."""
        for table, (rows, tensors) in zip(self._tables, written, strict=True):
            for known, tensor in zip(table, tensors or (), strict=False):
                # None, where the table stays as it is.
                if tensor is not None:
                    known.values.update(zip(rows.tolist(), _bytes(tensor).copy(), strict=True))

    def check_stores(self) -> None:
        """Compare the stores, after the loop.

        Raises:
            VerificationError: At the first difference.
        """
        for known in (known for table in self._tables for known in table):
            rows = np.array(sorted(known.values), np.int64)
            known.compare("after the loop, in the store", rows, _gathered(known.store, rows))


class _Rows:
    """Rows of one store as the synchronous loop has them."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self.store = store
        self.values: dict[int, npt.NDArray[np.uint8]] = {}

    def compare(self, when: str, rows: Rows, found: npt.NDArray[np.uint8]) -> None:
        new = np.array([row for row in rows.tolist() if row not in self.values], np.int64)
        self.values.update(zip(new.tolist(), _gathered(self.store, new), strict=True))
        if not len(rows):
            return
        expected = np.stack([self.values[row] for row in rows.tolist()])
        wrong = np.flatnonzero((expected != found).any(axis=1))
        if len(wrong):
            one, other = (array[wrong[0]].view(self.store.dtype) for array in (found, expected))
            raise VerificationError(
                f"{when}: {self.name}, row {rows[wrong[0]]} is {one}; the synchronous loop has {other} "
                f"({len(wrong)} of {len(rows)} rows differ)"
            )


def _gathered(store: Store, rows: Rows) -> npt.NDArray[np.uint8]:
    out = np.empty((len(rows), *store.row_shape), store.dtype)
    store.gather(rows, out)
    return bytes_by_row(out)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return bytes_by_row(to_numpy(tensor.detach().cpu().contiguous(), "rows"))
