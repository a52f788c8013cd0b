"""WeightTable: embeddings whose rows are copied into a model's weight batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pinfeed.compat.speedtorch.placement import Table, table_dtype
from pinfeed.compat.speedtorch.slots import Slots, SlotTables, check_row_width, values_of_rows
from pinfeed.compat.speedtorch.tables import SingleTable
from pinfeed.errors import ArgumentError, StoreError, WriteBackError

_HOOKS = WeakTensorKeyDictionary()
"""Handle of the gradient hook of each weight that has several slots for one row.

A hook belongs to the weight, because several tables may use a weight one after the other.
"""

_MAX_COMPARED = 64
"""Number of slots of a batch that are compared with the first slot of their row.

If the slots of one row differ, the slots of most rows differ. Comparing all slots would cost as
much as a gather.
"""


class WeightTable(SlotTables, SingleTable):
    """A table whose rows are copied into ``model_variable.weight`` for each batch.

    Args:
        model_variable: An ``nn.Embedding``, or any object with a ``weight``.
        total_classes: Number of rows of the table.
        embed_dimension: Length of a row.
        datatype: Dtype of the table; the weight keeps its own.

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
