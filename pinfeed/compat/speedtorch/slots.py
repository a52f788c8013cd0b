"""Rows that are lent for the length of a batch: each occurrence of an id has a slot of its own."""

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
    """The rows of a batch: each occurrence of an id has a slot of its own."""

    rows: Rows
    """Of each slot."""
    unique: Rows
    """Ascending, each once."""
    first: Rows
    """The first slot of each."""
    inverse: Rows
    """Of each slot, where its row is in ``unique``."""

    @property
    def repeat(self) -> bool:
        """Whether a row has several slots."""
        return len(self.unique) < len(self.rows)


class Switcher(Tables):
    """Tables whose rows are lent for the length of a batch."""

    total_classes: int
    _lent: Slots | None = None

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Bring the rows of a batch in: those of the positive ids first, each occurrence in a slot of its own.

        Args:
            retrievedPosIndexes: Array, tensor or list of integers, of any shape.
            retrievedNegIndexes: More of them.

        Raises:
            RowIndexError: Not integers, negative or too large.
            ClosedError: There is no table yet.
        """
        self._all()
        rows = self._rows(retrievedPosIndexes, retrievedNegIndexes)
        slots = Slots(rows, *np.unique(rows, return_index=True, return_inverse=True))
        self._lend(slots)
        self._lent = slots

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Bring the rows of the batch back, as the optimizer has left them.

        Raises:
            RowIndexError: Not integers, negative or too large.
            WriteBackError: Other rows than ``beforeForwardPass`` was given, rows of another shape,
                or slots of one row that differ.
        """
        rows, lent = self._rows(retrievedPosIndexes, retrievedNegIndexes), self._lent
        if lent is None or not np.array_equal(rows, lent.rows):
            raise WriteBackError(
                f"{type(self).__name__}.afterOptimizerStep: {len(rows)} rows that are not in the model; expected beforeForwardPass "
                "with the same ids before it"
            )
        self._land(lent)
        self._lent = None

    def _begin(self, tables: dict[str, Table]) -> None:
        super()._begin(tables)
        # Rows of what was there before.
        self._lent = None

    def _rows(self, *ids: Any) -> Rows:
        arrays = [
            np.asarray(each.detach().cpu() if isinstance(each, torch.Tensor) else each)
            for each in ids
            if each is not None
        ]
        return np.concatenate(
            [
                check_rows(array.reshape(-1), self.total_classes, type(self).__name__)
                for array in arrays
            ]
        )

    def _lend(self, slots: Slots) -> None:
        raise NotImplementedError

    def _land(self, slots: Slots) -> None:
        raise NotImplementedError


def check_width(weight: torch.Tensor, embed_dimension: int, name: str) -> None:
    """Check that rows of ``embed_dimension`` numbers fit.

    Raises:
        ArgumentError: They do not.
    """
    if weight.ndim != 2 or weight.shape[1] != embed_dimension:
        raise ArgumentError(
            f"embed_dimension={embed_dimension}: {name} has a weight of shape {tuple(weight.shape)}; expected (rows, {embed_dimension})"
        )


def first_of(
    values: torch.Tensor, slots: Slots, row_shape: tuple[int, ...], name: str
) -> torch.Tensor:
    """Of each row, what its first slot holds: all of them hold the same.

    Raises:
        WriteBackError: There are more or fewer slots, or rows of another shape.
    """
    if tuple(values.shape) != (len(slots.rows), *row_shape):
        raise WriteBackError(
            f"{name} is of shape {tuple(values.shape)}; expected {(len(slots.rows), *row_shape)}, as it was lent"
        )
    return values.detach().index_select(0, torch.from_numpy(slots.first).to(values.device))
