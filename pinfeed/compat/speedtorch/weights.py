"""WeightTable: rows of embeddings that take turns in the weight of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pinfeed.compat.speedtorch.placement import Place, Table, as_dtype
from pinfeed.compat.speedtorch.slots import Slots, Switcher, check_width, first_of
from pinfeed.compat.speedtorch.tables import OneTable, making
from pinfeed.errors import ArgumentError, StoreError, WriteBackError

_HOOKS = WeakTensorKeyDictionary()
"""Of each weight whose slots share gradients, the handle of its hook.

It is the weight's, not its table's: tables may come and go.
"""

# Slots of a batch: where the slots of a row differ, they do in most rows, and all of them would
# cost as much as a gather.
_COMPARED = 64


class WeightTable(Switcher, OneTable):
    """A table whose rows take turns in ``model_variable.weight``.

    Args:
        model_variable: An ``nn.Embedding``, or anything with a ``weight``.
        total_classes: Rows of the table.
        embed_dimension: Numbers in a row.
        datatype: Of the table; the weight keeps its own.
        place: Where the table is to be.

    Raises:
        ArgumentError: No weight, or one with rows of another length, or options of the embedding
            that speak of ids, where it is given slots.
        StoreError: No such dtype.
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any,
        place: Place,
    ) -> None:
        if not isinstance(getattr(model_variable, "weight", None), torch.Tensor):
            raise ArgumentError(
                f"model_variable={type(model_variable).__name__}: expected an nn.Embedding, or a module with a weight"
            )
        check_width(model_variable.weight, embed_dimension, type(model_variable).__name__)
        if getattr(model_variable, "padding_idx", None) is not None or getattr(
            model_variable, "scale_grad_by_freq", False
        ):
            raise ArgumentError(
                "model_variable: padding_idx and scale_grad_by_freq mean ids, and the embedding is given slots; leave both out"
            )
        self.model_variable = model_variable
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.datatype = as_dtype(datatype)
        self._place = place

    def zerosInit(self) -> None:
        """Make the table, of zeros."""
        self._begin({"": self.new_table()})

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
        if self.datatype.kind not in "fV":
            # V: bfloat16
            raise StoreError(f"random rows of {self.datatype}; expected a floating point datatype")
        with making() as tables:
            tables[""] = self.new_table()
            tables[""].fill(lambda tensor: initFunction(tensor, *args))
        self._begin(tables)

    def variableTransformer(
        self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None
    ) -> Any:
        """Indexes of the slots, the same for every batch, to call the model with.

        Returns:
            int64 array of shape (batchSize, posPerBatch); with ``negPerBatch`` also one of shape
            (batchSize, negPerBatch), which goes on where the first one ends.
        """
        n_pos = batchSize * posPerBatch
        positive = np.arange(n_pos, dtype=np.int64).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return positive
        return positive, np.arange(n_pos, n_pos + batchSize * negPerBatch, dtype=np.int64).reshape(
            batchSize, negPerBatch
        )

    def new_table(self) -> Table:
        """A table of zeros."""
        return self._place((self.total_classes, self.embed_dimension), self.datatype, "")

    def _begin(self, tables: dict[str, Table]) -> None:
        super()._begin(tables)
        unhook(self.model_variable.weight)

    def _lend(self, slots: Slots) -> None:
        weight = self.model_variable.weight
        block = self._all()[""].read(slots.rows, weight.device, weight.dtype)
        if weight.shape != block.shape:
            # Of a batch of another size: nothing could be added to it.
            weight.grad = None
            # Autograd's node of the weight knows the size too, and lives on as long as somebody
            # holds the last loss. torch makes a new one for a weight that has had another dtype.
            weight.data = weight.data.new_empty(
                0, dtype=torch.float32 if weight.dtype == torch.float64 else torch.float64
            )
        weight.data = block
        unhook(weight)
        if slots.repeat and weight.requires_grad:
            inverse = torch.from_numpy(slots.inverse).to(weight.device)
            n = len(slots.unique)
            _HOOKS[weight] = weight.register_hook(
                lambda gradient: shared_gradient(gradient, inverse, n)
            )

    def _land(self, slots: Slots) -> None:
        weight, table = self.model_variable.weight, self._all()[""]
        values = first_of(weight, slots, table.shape[1:], "weight")
        if slots.repeat and weight.requires_grad:
            check_alike(weight.detach(), slots)
        table.write(slots.unique, values)
        unhook(weight)


def unhook(weight: torch.Tensor) -> None:
    """Let the slots of a weight have gradients of their own."""
    if (handle := _HOOKS.pop(weight, None)) is not None:
        handle.remove()


def check_alike(block: torch.Tensor, slots: Slots) -> None:
    """Check, for some slots, that they have evolved as the first slot of their row.

    Raises:
        WriteBackError: They have not.
    """
    first = slots.first[slots.inverse]
    others = np.flatnonzero(first != np.arange(len(first)))[:_COMPARED]
    these, those = (
        block.index_select(0, torch.from_numpy(at).to(block.device))
        for at in (others, first[others])
    )
    # One slot may be computed by a vector instruction and the other not. Nothing is greater than a
    # NaN.
    if bool(((these - those).abs() > 32 * torch.finfo(block.dtype).eps * those.abs().max()).any()):
        raise WriteBackError(
            "weight: slots of one row differ, and only one of them could be kept; expected them to evolve alike: an optimizer that keeps "
            "state needs its OptimizerFactory (or give each id once)"
        )


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
    touched = torch.zeros(n, dtype=torch.bool, device=inverse.device).index_fill_(
        0, inverse[slots], True
    )
    kept = touched[inverse].nonzero().squeeze(1)
    return torch.sparse_coo_tensor(
        kept[None], sums[inverse[kept]], gradient.shape, is_coalesced=True, check_invariants=False
    )
