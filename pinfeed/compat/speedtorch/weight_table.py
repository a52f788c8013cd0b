"""WeightTable: embeddings whose rows are copied into a model's weight batch by batch.

A weight holds a batch in slots, one row for each occurrence of an id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pinfeed.compat.speedtorch.tables import SingleTable, Table, Tables, as_numpy, table_dtype
from pinfeed.errors import ArgumentError, StoreError, WriteBackError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows

_HOOKS = WeakTensorKeyDictionary()
"""Handle of the gradient hook of each weight that has several slots for one row.

A hook belongs to the weight, because several tables may use a weight one after the other.
"""

_MAX_COMPARED = 64
"""Number of slots of a batch that are compared with the first slot of their row.

If the slots of one row differ, the slots of most rows differ. Comparing all slots would cost as
much as a gather.
"""


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
        name = type(self).__name__
        arrays = [np.asarray(as_numpy(each)).reshape(-1) for each in ids if each is not None]
        return np.concatenate([check_rows(array, self.total_classes, name) for array in arrays])

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


class WeightTable(SlotTables, SingleTable):
    """A table whose rows are copied into ``model_variable.weight`` for each batch.

    Args:
        model_variable: An ``nn.Embedding``, or any object with a ``weight``.
        total_classes: Number of rows of the table.
        embed_dimension: Length of a row.
        datatype: Dtype of the table; the weight keeps its own.
        place: Arguments of the place of the factory.
        options: The same by name.

    Raises:
        ArgumentError: If ``model_variable`` has no weight, its rows have another length, or it has
            options that refer to ids (the model calls it with slots).
        StoreError: If ``datatype`` is not a dtype.
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        *place: Any,
        **options: Any,
    ) -> None:
        if not isinstance(getattr(model_variable, "weight", None), torch.Tensor):
            raise ArgumentError(
                f"model_variable={type(model_variable).__name__}: "
                "expected an nn.Embedding, or a module with a weight"
            )
        check_row_width(model_variable.weight, embed_dimension, type(model_variable).__name__)
        has_padding = getattr(model_variable, "padding_idx", None) is not None
        if has_padding or getattr(model_variable, "scale_grad_by_freq", False):
            raise ArgumentError(
                "model_variable has padding_idx or scale_grad_by_freq, which refer to ids; "
                "expected neither, because the model calls the embedding with slots; leave both out"
            )
        self.model_variable = model_variable
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.datatype = table_dtype(datatype)
        self._shape = (total_classes, embed_dimension)
        self._locate(*place, **options)

    def zerosInit(self) -> None:
        """Create the table, filled with zeros."""
        # A new table has zeros.
        with self._filling():
            pass

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Create the table, filled with uniformly distributed numbers from torch's generator."""
        self.customInit(nn.init.uniform_, low, high)

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Create the table, filled with normally distributed numbers from torch's generator."""
        self.customInit(nn.init.normal_, mean, stdDev)

    def customInit(self, initFunction: Any, *args: Any) -> None:
        """Create the table and call ``initFunction(table, *args)`` to fill it in place.

        Functions of ``torch.nn.init`` can be passed.

        Raises:
            StoreError: If the dtype of the table is not floating point.
        """
        # numpy's kind of bfloat16 is V.
        if self.datatype.kind not in "fV":
            raise StoreError(
                f"datatype={self.datatype}: random rows need a floating-point dtype; give another "
                "datatype, or call zerosInit()"
            )
        with self._filling() as tables:
            tables[""].fill(lambda tensor: initFunction(tensor, *args))

    def variableTransformer(
        self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None
    ) -> Any:
        """Return the slot indices for calls of the model; they are the same for every batch.

        Returns:
            int64 array of shape (batchSize, posPerBatch). With ``negPerBatch``, a pair of this
            array and one of shape (batchSize, negPerBatch) with the following slot indices.
        """
        n_pos = batchSize * posPerBatch
        positive = np.arange(n_pos, dtype=np.int64).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return positive
        negative = np.arange(n_pos, n_pos + batchSize * negPerBatch, dtype=np.int64)
        return positive, negative.reshape(batchSize, negPerBatch)

    def _use(self, tables: dict[str, Table]) -> None:
        super()._use(tables)
        remove_gradient_hook(self.model_variable.weight)

    def _copy_in(self, slots: Slots) -> None:
        weight = self.model_variable.weight
        values = self._all()[""].read(slots.rows, weight.device, weight.dtype)
        if weight.shape != values.shape:
            # The backward pass cannot add to a gradient of another size.
            weight.grad = None
            # Autograd's node of the weight also has the size, and lives as long as the last loss is
            # referenced. torch creates a new node after the weight had another dtype.
            other_dtype = torch.float32 if weight.dtype == torch.float64 else torch.float64
            weight.data = weight.data.new_empty(0, dtype=other_dtype)
        weight.data = values
        remove_gradient_hook(weight)
        if slots.repeat and weight.requires_grad:
            inverse = torch.from_numpy(slots.inverse).to(weight.device)
            n = len(slots.unique)
            _HOOKS[weight] = weight.register_hook(
                lambda gradient: shared_gradient(gradient, inverse, n)
            )

    def _copy_out(self, slots: Slots) -> None:
        weight = self.model_variable.weight
        table = self._all()[""]
        values = values_of_rows(weight, slots, table.shape[1:], "weight")
        if slots.repeat and weight.requires_grad:
            check_slots_equal(weight.detach(), slots)
        table.write(slots.unique, values)
        remove_gradient_hook(weight)


def remove_gradient_hook(weight: torch.Tensor) -> None:
    """Remove the hook that shares gradients between slots, if the weight has it."""
    if (handle := _HOOKS.pop(weight, None)) is not None:
        handle.remove()


def check_slots_equal(values: torch.Tensor, slots: Slots) -> None:
    """Check for some slots that they equal the first slot of their row.

    Raises:
        WriteBackError: If a slot differs by more than rounding.
    """
    first = slots.first[slots.inverse]
    repeated = np.flatnonzero(first != np.arange(len(first)))[:_MAX_COMPARED]
    found, expected = (
        values.index_select(0, torch.from_numpy(which).to(values.device))
        for which in (repeated, first[repeated])
    )
    # Rounding may differ, because a vector instruction may compute one slot and not another. The
    # comparison is false for NaN, so NaN is accepted.
    tolerance = 32 * torch.finfo(values.dtype).eps * expected.abs().max()
    if bool(((found - expected).abs() > tolerance).any()):
        raise WriteBackError(
            "slots of one row differ in the weight, and only one value can be kept; expected equal "
            "slots; use an OptimizerFactory for an optimizer with state, or give each id once"
        )


def shared_gradient(gradient: torch.Tensor, inverse: torch.Tensor, n: int) -> torch.Tensor:
    """Return a gradient in which each slot has the sum over all slots of its row.

    Args:
        gradient: Gradient of the slots, dense or sparse, shape (slots, ...).
        inverse: Position of each slot's row among the ``n`` distinct rows.
        n: Number of distinct rows.
    """
    if not gradient.is_sparse:
        return gradient.new_zeros(n, *gradient.shape[1:]).index_add_(0, inverse, gradient)[inverse]
    slots = gradient._indices()[0]
    values = gradient._values()
    sums = values.new_zeros(n, *values.shape[1:]).index_add_(0, inverse[slots], values)
    # Slots of rows without a gradient get none, so that a sparse optimizer skips them.
    has_gradient = torch.zeros(n, dtype=torch.bool, device=inverse.device)
    has_gradient.index_fill_(0, inverse[slots], True)
    kept = has_gradient[inverse].nonzero().squeeze(1)
    return torch.sparse_coo_tensor(
        kept[None], sums[inverse[kept]], gradient.shape, is_coalesced=True, check_invariants=False
    )
