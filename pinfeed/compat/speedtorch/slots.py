"""Slots: the rows of a weight that hold one batch, one slot for each occurrence of an id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.compat.speedtorch.placement import Table
from pinfeed.compat.speedtorch.tables import Tables
from pinfeed.errors import ArgumentError, WriteBackError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows


@dataclass(frozen=True)
class Slots:
    """The slots of a batch, one for each occurrence of an id."""

    rows: Rows
    """Row index of each slot."""
    unique: Rows
    """The distinct row indices, ascending."""
    first: Rows
    """The first slot of each distinct row."""
    inverse: Rows
    """The position in ``unique`` of each slot's row."""

    @property
    def repeat(self) -> bool:
        """Whether a row has several slots."""
        return len(self.unique) < len(self.rows)


class SlotTables(Tables):
    """Base of tables whose rows are copied into slots for a batch, and back after its step."""

    total_classes: int
    _current: Slots | None = None
    """The slots whose rows are in the model or the optimizer now."""

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of a batch into the slots: first those of the positive ids.

        Args:
            retrievedPosIndexes: Array, tensor or list of integer ids, of any shape.
            retrievedNegIndexes: Further ids; None for no further ids.

        Raises:
            RowIndexError: If the ids are not integers, or one is negative or too large.
            ClosedError: If the table does not exist yet.
        """
        self._all()
        rows = self._rows(retrievedPosIndexes, retrievedNegIndexes)
        slots = Slots(rows, *np.unique(rows, return_index=True, return_inverse=True))
        self._copy_in(slots)
        self._current = slots

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of the batch back to the table after the step of the optimizer.

        Args:
            retrievedPosIndexes: The same ids as in ``beforeForwardPass``.
            retrievedNegIndexes: The same further ids as in ``beforeForwardPass``.

        Raises:
            RowIndexError: If the ids are not integers, or one is negative or too large.
            WriteBackError: If ``beforeForwardPass`` got other ids, if the rows have another shape,
                or if slots of one row differ.
        """
        rows = self._rows(retrievedPosIndexes, retrievedNegIndexes)
        slots = self._current
        if slots is None or not np.array_equal(rows, slots.rows):
            raise WriteBackError(
                f"{type(self).__name__}.afterOptimizerStep got {len(rows)} rows that are not in "
                "the model; call beforeForwardPass with the same ids before"
            )
        self._copy_out(slots)
        self._current = None

    def _use(self, tables: dict[str, Table]) -> None:
        super()._use(tables)
        # The slots hold rows of the previous tables.
        self._current = None

    def _rows(self, *ids: Any) -> Rows:
        """Return the row indices of a batch, shape (n,), after checking them."""
        arrays = []
        for each in ids:
            if each is not None:
                array = np.asarray(each.detach().cpu() if isinstance(each, torch.Tensor) else each)
                arrays.append(array.reshape(-1))
        return np.concatenate(
            [check_rows(array, self.total_classes, type(self).__name__) for array in arrays]
        )

    def _copy_in(self, slots: Slots) -> None:
        raise NotImplementedError

    def _copy_out(self, slots: Slots) -> None:
        raise NotImplementedError


def check_row_width(weight: torch.Tensor, embed_dimension: int, name: str) -> None:
    """Check that the rows of a weight have ``embed_dimension`` numbers.

    Raises:
        ArgumentError: If the rows have another length.
    """
    if weight.ndim != 2 or weight.shape[1] != embed_dimension:
        raise ArgumentError(
            f"embed_dimension={embed_dimension}: {name} has a weight of shape "
            f"{tuple(weight.shape)}; expected (rows, {embed_dimension})"
        )


def values_of_rows(
    values: torch.Tensor, slots: Slots, row_shape: tuple[int, ...], name: str
) -> torch.Tensor:
    """Return the value of each distinct row, taken from its first slot.

    Raises:
        WriteBackError: If the number of slots or the shape of the rows has changed.
    """
    if tuple(values.shape) != (len(slots.rows), *row_shape):
        raise WriteBackError(
            f"{name} has shape {tuple(values.shape)}; expected {(len(slots.rows), *row_shape)}, "
            "the shape after beforeForwardPass; do not resize it before afterOptimizerStep"
        )
    return values.detach().index_select(0, torch.from_numpy(slots.first).to(values.device))
