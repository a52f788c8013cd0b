"""BatchRows: the rows of a table that one batch looks up, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import RowIndexError
from pinfeed.rows.orders import Rows
from pinfeed.tensors.numpy_torch import version_of


class BatchRows:
    """The rows of a table that one batch looks up.

    Args:
        rows: Row indices in the table, ascending, each once, shape (n,).
        ids: The same row indices on the device, int64.
        weight: Values of the rows on the device, shape (n, embedding_dim).
        positions: Tensors of ids that the batch contains, each with the positions of its ids among
            ``rows``. A lookup of such a tensor needs no search.
    """

    def __init__(
        self,
        rows: Rows,
        ids: torch.Tensor,
        weight: nn.Parameter,
        positions: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.rows = rows
        self.ids = ids
        self.weight = weight
        self.sparse = False
        """Whether lookups give ``weight`` sparse gradients, as ``nn.Embedding(sparse=True)``."""
        self._version = version_of(weight)
        self._prepared = [(known, version_of(known), found) for known, found in positions]

    @property
    def owned(self) -> nn.Parameter:
        """Parameter that the optimizer updates and that is written back to the store."""
        return self.weight

    @property
    def touched(self) -> bool:
        """Whether ``weight`` was changed in place; changes through ``weight.data`` do not count."""
        return version_of(self.weight) != self._version

    def positions(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        """Return the positions of ids among the rows, in the shape of ``ids``.

        Raises:
            RowIndexError: If an id is not among the rows. On a GPU, an assertion fails on the
                device instead, so that the host does not wait for the result.
        """
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
            raise RowIndexError(f"{name}: ids of {ids.dtype}; expected integers (mask: ids[mask])")
        for known, version, found in self._prepared:
            # The version tells whether the ids were changed after the positions were computed.
            if ids is known and version_of(ids) == version:
                return found
        wanted = ids.to(self.ids.device, torch.int64, non_blocking=True)
        if not len(self.rows):
            if ids.numel():
                raise _not_announced(name, int(wanted.reshape(-1)[0]))
            return wanted
        positions = torch.searchsorted(self.ids, wanted).clamp_(max=len(self.rows) - 1)
        is_found = self.ids[positions] == wanted
        if self.ids.device.type == "cpu":
            if not bool(is_found.all()):
                raise _not_announced(name, int(wanted[~is_found].reshape(-1)[0]))
        else:
            torch._assert_async(
                is_found.all(), f"{name}: an id that was not announced to train_rows for this batch"
            )
        return positions

    def collect_gradients(self, every: Sequence[Any]) -> None:
        """Move gradients from ``weight`` to ``owned``, for this table and others of its kind.

        Here both are one parameter, so nothing is done.
        """

    def position_of(self, row: int | None) -> int | None:
        """Return the position of a row index; None if it is None, or not among the rows."""
        return None if row is None else position_in(self.rows, row)


def position_in(rows: Rows, row: int) -> int | None:
    """Return the position of a row index in ascending row indices; None if it is not among them."""
    position = int(np.searchsorted(rows, row))
    return position if position < len(rows) and rows[position] == row else None


def _not_announced(name: str, row: int) -> RowIndexError:
    return RowIndexError(
        f"{name}: id {row} was not announced for this batch; expected the function that train_rows "
        "was given for this table to return every id that is looked up (a tuple of tensors for "
        "several inputs). For other rows: read(ids)"
    )
