"""StateTables: rows of the state of an optimizer that take turns in it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..dtypes import BFLOAT16
from ..errors import ArgumentError, StoreError
from ..stores import ArrayStore
from ..tensors import NUMPY, TORCH, memory_of, to_torch
from ..training.rowstate import RowState, discover
from .switching import Slots, Switcher, first_of
from .tables import FileName, Place, Table, as_dtype, copy_rows, existing

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})  # how an optimizer computes, not what it keeps


class StateTables(Switcher):
    """Tables of row-wise state of an optimizer, whose rows take turns in the optimizer.

    Args:
        given_optimizer: A torch optimizer that has the parameter, alone or among others.
        total_classes: Rows of the table.
        embed_dimension: Numbers in a row.
        model: Where the parameter is.
        variable_name: Of the embedding in the model, with dots if it is nested.
        dtype: Of the tables of what the optimizer keeps in the dtype of the weight.
        place: Where the tables are to be.

    Raises:
        ArgumentError: No such parameter, or one that the optimizer has not, or an optimizer that cannot train rows.
        StoreError: No such dtype.
    """

    _init = "optInit()"

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any, place: Place,
    ) -> None:  # fmt: skip
        self.given_optimizer, self.total_classes, self.embed_dimension = given_optimizer, total_classes, embed_dimension
        self.model, self.variable_name, self.dtype, self._place = model, variable_name, as_dtype(dtype), place
        self._weight = _parameter(model, variable_name)
        self._group = _group_of(given_optimizer, self._weight, variable_name)
        self._layout = discover(type(given_optimizer), _options(type(given_optimizer), self._group), embed_dimension, self._weight.dtype)
        if copies := [row.key for row in self._layout.rows if row.initial is None]:
            raise ArgumentError(
                f"{type(given_optimizer).__name__} begins {copies} as a copy of the weights; expected state that begins with a constant "
                "(pinfeed.RowOptimizer can train with this)"
            )
        self._begun: set[str] = set()

    def optInit(self) -> None:
        """Make the tables: every row begins with what the optimizer itself begins with."""
        tables = {}
        for row in self._layout.rows:
            dtype = self.dtype if row.dtype == NUMPY[self._weight.dtype] else row.dtype
            tables[row.key] = self._place((self.total_classes, *row.row_shape), dtype, row.key)
            if row.initial:
                tables[row.key].fill(functools.partial(torch.fill_, value=row.initial))
        state = self.given_optimizer.state[self._weight]
        # A key comes with the optimizer's first step, and what is there already was made by one.
        self._begun = {row.key for row in self._layout.rows if row.key in self._layout.born or state.get(row.key) is not None}
        self.close()
        self._tables, self._lent = tables, None

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save all tables, and the state that is one for each, as a .npz file; the name gets .npz if it has not."""
        saved = {key: memory_of(value) if isinstance(value, torch.Tensor) else np.asarray(value) for key, value in self.snapshot().items()}
        np.savez(os.fspath(saveFileName), allow_pickle=False, **saved)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Take over what ``saveCupy`` has saved.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is of another optimizer, or of another shape.
        """
        with np.load(existing(loadFileName, ".npz")) as file:
            saved = {key: file[key] for key in file.files}
        bits = {key: value.view(BFLOAT16) if value.dtype.kind == "V" else value for key, value in saved.items()}
        self.restore({key: to_torch(value) if key.startswith(("rows.", "table.")) else value.item() for key, value in bits.items()})

    def saveTorch(self, saveFileName: FileName) -> None:
        """As ``saveCupy``, with ``torch.save``."""
        torch.save(self.snapshot(), saveFileName)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Take over what ``saveTorch`` has saved.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is of another optimizer, or of another shape.
        """
        self.restore(torch.load(existing(loadFileName, ""), map_location="cpu", weights_only=True))

    def snapshot(self) -> dict[str, Any]:
        """Everything that the optimizer keeps for the table: row-wise state, state of the table as a whole, what has begun."""
        state = self.given_optimizer.state[self._weight]
        rows = {f"rows.{key}": table.tensor().cpu() for key, table in self._all().items()}
        whole = {key: state[key] for key in sorted(self._layout.tables & set(state)) if state[key] is not None}
        own = {f"{'table' if isinstance(value, torch.Tensor) else 'number'}.{key}": value for key, value in whole.items()}
        tensors = {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
        return rows | tensors | {f"begun.{key}": True for key in sorted(self._begun)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``snapshot`` gave.

        Raises:
            StoreError: It is of another optimizer or of another shape.
        """
        rows = {key.removeprefix("rows."): value for key, value in saved.items() if key.startswith("rows.")}
        if set(rows) != {row.key for row in self._layout.rows}:
            raise StoreError(
                f"state {sorted(rows)} was saved; {type(self.given_optimizer).__name__} has {[r.key for r in self._layout.rows]}"
            )
        if self._tables is None:
            self.optInit()
        for key, value in rows.items():
            copy_rows(ArrayStore(value.contiguous()), self._all()[key])
        state = self.given_optimizer.state[self._weight]
        state.clear()  # rows are lent anew
        on_device = self._group.get("capturable") or self._group.get("fused")
        for name, value in saved.items():
            kind, _, key = name.partition(".")
            if kind == "table":
                state[key] = value.clone() if key == "step" and not on_device else value.to(self._weight.device, copy=True)
            elif kind == "number":
                state[key] = value
        self._begun, self._lent = {name.removeprefix("begun.") for name in saved if name.startswith("begun.")}, None

    def _shown(self, view: Callable[[Table], Any]) -> Any:
        return {key: view(table) for key, table in self._all().items()}

    def _lend(self, slots: Slots) -> None:
        state = self.given_optimizer.state[self._weight]
        for row in self._layout.rows:
            state.pop(row.key, None)
            if row.key in self._begun:
                state[row.key] = self._all()[row.key].read(slots.rows, self._weight.device, TORCH[row.dtype])

    def _land(self, slots: Slots) -> None:
        state = self.given_optimizer.state[self._weight]
        known = self._layout.tables | {row.key for row in self._layout.rows}
        if unknown := [key for key, value in state.items() if isinstance(value, torch.Tensor) and key not in known]:
            raise ArgumentError(f"{type(self.given_optimizer).__name__} keeps {unknown}, which it did not keep when it was tried")
        kept: list[tuple[RowState, torch.Tensor]] = [(row, state[row.key]) for row in self._layout.rows if state.get(row.key) is not None]
        for row, value in kept:
            self._all()[row.key].write(slots.unique, first_of(value, slots, row.key))
            self._begun.add(row.key)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    named = dict(model.named_parameters(remove_duplicate=False))
    found = named.get(f"{name}.weight")
    if found is None:
        names = [each.removesuffix(".weight") for each in named if each.endswith(".weight")]
        raise ArgumentError(f"variable_name={name!r}: the model has no {name}.weight; expected one of {names}")
    return found


def _group_of(optimizer: torch.optim.Optimizer, weight: nn.Parameter, name: str) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            return group
    raise ArgumentError(f"variable_name={name!r}: the optimizer does not have this parameter; give it to the optimizer at construction")


def _options(optimizer_class: type, group: Mapping[str, Any]) -> dict[str, Any]:
    """What the class is to be constructed with to have a group like this one."""
    taken = inspect.signature(optimizer_class).parameters
    options = {key: value for key, value in group.items() if key in taken and key != "params" and key not in _HOW}
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
