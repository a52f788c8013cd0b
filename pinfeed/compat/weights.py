"""WeightTable: rows of embeddings that take turns in the weight of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ArgumentError, StoreError
from .switching import Slots, Switcher, first_of
from .tables import OneTable, Place, Table, as_dtype


class WeightTable(Switcher, OneTable):
    """A table whose rows take turns in ``model_variable.weight``.

    Args:
        model_variable: An ``nn.Embedding``, or anything with a ``weight``.
        total_classes: Rows of the table.
        embed_dimension: Numbers in a row.
        datatype: Of the table; the weight keeps its own.
        place: Where the table is to be.

    Raises:
        ArgumentError: No weight, or options of the embedding that speak of ids, where it is given slots.
        StoreError: No such dtype.
    """

    def __init__(self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any, place: Place) -> None:
        if not isinstance(getattr(model_variable, "weight", None), torch.Tensor):
            raise ArgumentError(f"model_variable={type(model_variable).__name__}: expected an nn.Embedding, or a module with a weight")
        if getattr(model_variable, "padding_idx", None) is not None or getattr(model_variable, "scale_grad_by_freq", False):
            raise ArgumentError(
                "model_variable: padding_idx and scale_grad_by_freq mean ids, and the embedding is given slots; leave both out"
            )
        self.model_variable, self.total_classes, self.embed_dimension = model_variable, total_classes, embed_dimension
        self.datatype, self._place = as_dtype(datatype), place
        self._hook: RemovableHandle | None = None

    def zerosInit(self) -> None:
        """Make the table, of zeros."""
        self._begin(self.new_table())

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Make the table, of numbers evenly distributed from ``low`` to ``high``, drawn from torch's generator."""
        self.customInit(nn.init.uniform_, low, high)

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Make the table, of normally distributed numbers, drawn from torch's generator."""
        self.customInit(nn.init.normal_, mean, stdDev)

    def customInit(self, initFunction: Any, *args: Any) -> None:
        """Make the table, and call ``initFunction(table, *args)``, a function of ``torch.nn.init`` say, to fill it where it is.

        Raises:
            StoreError: The table is not of floating point numbers.
        """
        if self.datatype.kind not in "fV":  # V: bfloat16
            raise StoreError(f"random rows of {self.datatype}; expected a floating point datatype")
        table = self.new_table()
        table.fill(lambda tensor: initFunction(tensor, *args))
        self._begin(table)

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """Indexes of the slots, the same for every batch, to call the model with.

        Returns:
            int64 array of shape (batchSize, posPerBatch); with ``negPerBatch`` also one of shape (batchSize, negPerBatch), which goes on
            where the first one ends.
        """
        n_pos = batchSize * posPerBatch
        positive = np.arange(n_pos, dtype=np.int64).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return positive
        return positive, np.arange(n_pos, n_pos + batchSize * negPerBatch, dtype=np.int64).reshape(batchSize, negPerBatch)

    def new_table(self) -> Table:
        """A table of zeros."""
        return self._place((self.total_classes, self.embed_dimension), self.datatype, "")

    def _begin(self, table: Table) -> None:
        self.close()
        self._unhook()
        self._tables, self._lent = {"": table}, None

    def _lend(self, slots: Slots) -> None:
        weight = self.model_variable.weight
        block = self._all()[""].read(slots.rows, weight.device, weight.dtype)
        if weight.grad is not None and weight.grad.shape != block.shape:
            weight.grad = None  # of a batch of another size: nothing could be added to it
        weight.data = block
        self._unhook()
        if slots.repeat and weight.requires_grad:
            inverse = torch.from_numpy(slots.inverse).to(weight.device)
            n = len(slots.unique)
            self._hook = weight.register_hook(lambda gradient: shared_gradient(gradient, inverse, n))

    def _land(self, slots: Slots) -> None:
        weight = self.model_variable.weight
        self._unhook()
        self._all()[""].write(slots.unique, first_of(weight, slots, "weight"))

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def shared_gradient(gradient: torch.Tensor, inverse: torch.Tensor, n: int) -> torch.Tensor:
    """The gradient with which all slots of a row learn what each of them has to say: the sum over them, in each of them.

    Args:
        gradient: Of the slots, dense or sparse, shape (slots, ...).
        inverse: Of each slot, which of the ``n`` rows it holds.
        n: Rows.
    """
    if not gradient.is_sparse:
        return gradient.new_zeros(n, *gradient.shape[1:]).index_add_(0, inverse, gradient)[inverse]
    slots, values = gradient._indices()[0], gradient._values()
    sums = values.new_zeros(n, *values.shape[1:]).index_add_(0, inverse[slots], values)
    # Slots of rows that have no gradient stay without one: a sparse optimizer passes them over.
    touched = torch.zeros(n, dtype=torch.bool, device=inverse.device).index_fill_(0, inverse[slots], True)
    kept = touched[inverse].nonzero().squeeze(1)
    return torch.sparse_coo_tensor(kept[None], sums[inverse[kept]], gradient.shape, is_coalesced=True, check_invariants=False)
