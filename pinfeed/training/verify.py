"""Shadow: the synchronous loop, run beside the one that prefetches, to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import VerificationError
from ..rows import Rows
from ..stores import Store
from ..tensors import to_numpy


class Shadow:
    """Rows as the synchronous loop has them: every row that was lent, as it was lent first and written since.

    A row is read from its store when it is lent for the first time: nobody has written it by then.

    Args:
        stores: By name of the table.
    """

    def __init__(self, stores: Mapping[str, Sequence[Store]]) -> None:
        self._stores = stores
        self._rows: dict[str, list[dict[int, npt.NDArray[np.uint8]]]] = {name: [{} for _ in found] for name, found in stores.items()}

    def check(self, batch: int, lent: Sequence[tuple[Rows, Sequence[torch.Tensor]]]) -> None:
        """Compare what is lent with what the synchronous loop would gather now.

        Raises:
            VerificationError: At the first difference.
        """
        for name, (rows, tensors) in zip(self._stores, lent, strict=True):
            for i, (store, tensor) in enumerate(zip(self._stores[name], tensors, strict=True)):
                known = self._rows[name][i]
                new = np.array([row for row in rows.tolist() if row not in known], np.int64)
                for row, value in zip(new.tolist(), _gathered(store, new), strict=True):
                    known[row] = value.copy()
                self._compare(f"batch {batch}", name, i, rows, _bytes(tensor))

    def write(self, batch: int, written: Sequence[tuple[Rows, Sequence[torch.Tensor | None] | None]]) -> None:
        """Scatter what the loop writes back, at once."""
        for name, (rows, tensors) in zip(self._stores, written, strict=True):
            for i, tensor in enumerate(tensors or ()):
                if tensor is not None:
                    self._rows[name][i].update(zip(rows.tolist(), _bytes(tensor).copy(), strict=True))

    def check_stores(self) -> None:
        """Compare the stores, after the loop.

        Raises:
            VerificationError: At the first difference.
        """
        for name, stores in self._stores.items():
            for i, store in enumerate(stores):
                rows = np.array(sorted(self._rows[name][i]), np.int64)
                self._compare("after the loop, in the store", name, i, rows, _gathered(store, rows))

    def _compare(self, when: str, name: str, i: int, rows: Rows, found: npt.NDArray[np.uint8]) -> None:
        if not len(rows):
            return
        expected = np.stack([self._rows[name][i][row] for row in rows.tolist()])
        wrong = np.flatnonzero((expected != found).any(axis=1))
        if len(wrong):
            what, dtype = ("weights" if i == 0 else f"state {i - 1}"), self._stores[name][i].dtype
            one, other = (array[wrong[0]].view(dtype) for array in (found, expected))
            raise VerificationError(
                f"{when}: {name}, {what}, row {rows[wrong[0]]} is {one}; the synchronous loop has {other} "
                f"({len(wrong)} of {len(rows)} rows differ)"
            )


def _gathered(store: Store, rows: Rows) -> npt.NDArray[np.uint8]:
    out = np.empty((len(rows), *store.row_shape), store.dtype)
    store.gather(rows, out)
    return _by_row(out)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return _by_row(to_numpy(tensor.detach().cpu().contiguous(), "rows"))


def _by_row(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8) if array.size else np.empty((len(array), 0), np.uint8)
