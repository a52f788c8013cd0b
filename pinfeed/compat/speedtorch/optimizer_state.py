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

from pinfeed.compat.speedtorch.placement import Place, Table, as_dtype
from pinfeed.compat.speedtorch.slots import Slots, Switcher, check_width, first_of
from pinfeed.compat.speedtorch.tables import FileName, copy_rows, existing, making, named, store_of
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores import ArrayStore
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.tensors.numpy_torch import NUMPY, TORCH, memory_of, to_torch
from pinfeed.training.embeddings.optimizer_state import StateLayout, discover

# How an optimizer computes, not what it keeps.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})


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
        ArgumentError: No such parameter, or one that the optimizer has not, or one with rows of
            another length, or an optimizer that cannot train rows.
        StoreError: No such dtype.
    """

    _init = "optInit()"

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any, place: Place,
    ) -> None:  # fmt: skip
        self.given_optimizer = given_optimizer
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.model = model
        self.variable_name = variable_name
        self.dtype = as_dtype(dtype)
        self._place = place
        self._weight = _parameter(model, variable_name)
        check_width(self._weight, embed_dimension, variable_name)
        self._layout = self._discovered()
        self._begun: set[str] = set()

    def optInit(self) -> None:
        """Make the tables: every row begins with what the optimizer itself begins with."""
        # The model may have changed its dtype.
        self._layout = self._discovered()
        with making() as tables:
            self._make(tables)
        state = self.given_optimizer.state[self._weight]
        # A key comes with the optimizer's first step, and what is there already was made by one.
        self._begun = {
            row.key
            for row in self._layout.rows
            if row.key in self._layout.created_in_init or state.get(row.key) is not None
        }
        self._begin(tables)

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save all tables, and the state that is one for each, as a .npz file, which is there whole or as it was.

        The name gets .npz if it has not.
        """
        saved = {
            key: memory_of(value) if isinstance(value, torch.Tensor) else np.asarray(value)
            for key, value in self.snapshot().items()
        }
        with self._writing(named(saveFileName, ".npz")) as file:
            np.savez(file, allow_pickle=False, **saved)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Take over what ``saveCupy`` has saved.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is of another optimizer, or of another shape.
        """
        with np.load(existing(loadFileName, ".npz")) as file:
            saved = {key: file[key] for key in file.files}
        bits = {
            key: value.view(BFLOAT16) if value.dtype.kind == "V" else value
            for key, value in saved.items()
        }
        self.restore(
            {
                key: to_torch(value) if key.startswith(("rows.", "table.")) else value.item()
                for key, value in bits.items()
            }
        )

    def saveTorch(self, saveFileName: FileName) -> None:
        """As ``saveCupy``, with ``torch.save`` and under just this name.

        Raises:
            ArgumentError: A table has its rows in this file.
        """
        with self._writing(os.fspath(saveFileName)) as file:
            torch.save(self.snapshot(), file)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Take over what ``saveTorch`` has saved.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is of another optimizer, or of another shape.
        """
        path = existing(loadFileName, "")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(saved, dict):
            raise StoreError(
                f"{path}: a {type(saved).__name__} was saved; expected tables of an optimizer"
            )
        self.restore(saved)

    def snapshot(self) -> dict[str, Any]:
        """Everything that the optimizer keeps for the table: row-wise state, state of the table as a whole, what has begun."""
        state = self.given_optimizer.state[self._weight]
        rows = {f"rows.{key}": table.tensor().cpu() for key, table in self._all().items()}
        whole = {
            key: state[key]
            for key in sorted(self._layout.tables & set(state))
            if state[key] is not None
        }
        own = {
            f"{'table' if isinstance(value, torch.Tensor) else 'number'}.{key}": value
            for key, value in whole.items()
        }
        tensors = {
            key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for key, value in own.items()
        }
        begun = {f"begun.{key}": True for key in sorted(self._begun)}
        return {"optimizer": type(self.given_optimizer).__name__} | rows | tensors | begun

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``snapshot`` gave.

        Raises:
            StoreError: It is of another optimizer or of another shape.
        """
        if self._tables is None:
            self._layout = self._discovered()
        rows = self._checked(saved)
        with making() as made:
            if self._tables is None:
                self._make(made)
            tables = self._tables or made
            for key, store in rows.items():
                copy_rows(store, tables[key])
        state = self.given_optimizer.state[self._weight]
        # Rows are lent anew.
        state.clear()
        group = self._group()
        on_device = group.get("capturable") or group.get("fused")
        for name, value in saved.items():
            kind, _, key = name.partition(".")
            if kind == "table":
                state[key] = (
                    value.clone()
                    if key == "step" and not on_device
                    else value.to(self._weight.device, copy=True)
                )
            elif kind == "number":
                state[key] = value
        self._begun = {name.removeprefix("begun.") for name in saved if name.startswith("begun.")}
        self._begin(tables)

    def _checked(self, saved: Mapping[str, Any]) -> dict[str, ArrayStore]:
        """The row-wise state of a snapshot, of which everything fits."""
        name = type(self.given_optimizer).__name__
        if (other := saved.get("optimizer", name)) != name:
            raise StoreError(f"state of {other} was saved; the optimizer is {name}")
        rows = {
            key.removeprefix("rows."): store_of(value, key)
            for key, value in saved.items()
            if key.startswith("rows.")
        }
        shapes = {key: (store.n_rows, *store.row_shape) for key, store in rows.items()}
        expected = {row.key: (self.total_classes, *row.row_shape) for row in self._layout.rows}
        own = {key for key in saved if key.startswith(("table.", "number."))}
        begun = {key for key in saved if key.startswith("begun.")}
        whole = {f"{kind}.{key}" for kind in ("table", "number") for key in self._layout.tables}
        if shapes != expected or own - whole or begun - {f"begun.{key}" for key in expected}:
            raise StoreError(
                f"state {shapes}, {sorted(own | begun)} was saved; {name} has {expected}, {sorted(self._layout.tables)}"
            )
        return rows

    def _discovered(self) -> StateLayout:
        """What the optimizer keeps for the parameter as it is now."""
        made = type(self.given_optimizer)
        with torch.device("cpu"):
            # Whatever the default device is.
            layout = discover(
                made, _options(made, self._group()), self.embed_dimension, self._weight.dtype
            )
        if copies := [row.key for row in layout.rows if row.initial is None]:
            raise ArgumentError(
                f"{made.__name__} begins {copies} as a copy of the weights; expected state that begins with a constant "
                "(pinfeed.RowOptimizer can train with this)"
            )
        return layout

    def _group(self) -> dict[str, Any]:
        # load_state_dict makes new ones.
        return _group_of(self.given_optimizer, self._weight, self.variable_name)

    def _make(self, tables: dict[str, Table]) -> None:
        for row in self._layout.rows:
            dtype = self.dtype if row.dtype == NUMPY[self._weight.dtype] else row.dtype
            tables[row.key] = self._place((self.total_classes, *row.row_shape), dtype, row.key)
            if row.initial:
                tables[row.key].fill(functools.partial(torch.fill_, value=row.initial))

    def _shown(self, view: Callable[[Table], Any]) -> Any:
        return {key: view(table) for key, table in self._all().items()}

    def _lend(self, slots: Slots) -> None:
        state = self.given_optimizer.state[self._weight]
        for row in self._layout.rows:
            # What is there already is of a step whose rows did not come back, or of
            # load_state_dict: the optimizer counts on it.
            if state.pop(row.key, None) is not None or row.key in self._begun:
                state[row.key] = self._all()[row.key].read(
                    slots.rows, self._weight.device, TORCH[row.dtype]
                )

    def _land(self, slots: Slots) -> None:
        state = self.given_optimizer.state[self._weight]
        rows = self._layout.rows
        known = self._layout.tables | {row.key for row in rows}
        if unknown := [
            key
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and key not in known
        ]:
            raise ArgumentError(
                f"{type(self.given_optimizer).__name__} keeps {unknown}, which it did not keep when it was tried"
            )
        kept = {
            row.key: first_of(state[row.key], slots, row.row_shape, row.key)
            for row in rows
            if state.get(row.key) is not None
        }
        for key, values in kept.items():
            self._all()[key].write(slots.unique, values)
        self._begun |= set(kept)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    named = dict(model.named_parameters(remove_duplicate=False))
    found = named.get(f"{name}.weight")
    if found is None:
        names = [each.removesuffix(".weight") for each in named if each.endswith(".weight")]
        raise ArgumentError(
            f"variable_name={name!r}: the model has no {name}.weight; expected one of {names}"
        )
    return found


def _group_of(optimizer: torch.optim.Optimizer, weight: nn.Parameter, name: str) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            return group
    raise ArgumentError(
        f"variable_name={name!r}: the optimizer does not have this parameter; give it to the optimizer at construction"
    )


def _options(optimizer_class: type, group: Mapping[str, Any]) -> dict[str, Any]:
    """What the class is to be constructed with to have a group like this one."""
    taken = inspect.signature(optimizer_class).parameters
    options = {
        key: value
        for key, value in group.items()
        if key in taken and key != "params" and key not in _HOW
    }
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }
