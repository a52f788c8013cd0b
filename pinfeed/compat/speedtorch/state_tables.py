"""StateTables: an optimizer's row-wise state, copied into the optimizer batch by batch.

The keys of a saved state are ``optimizer`` (the name of the class), ``rows.<key>`` (row-wise
state), ``table.<key>`` and ``number.<key>`` (tensors and numbers for the table as a whole) and
``begun.<key>`` (row-wise state that the optimizer has created).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pinfeed.compat.speedtorch.tables import (
    FileName,
    Table,
    as_numpy,
    copy_all_rows,
    find_file,
    store_of_saved,
    table_dtype,
    with_suffix,
)
from pinfeed.compat.speedtorch.weight_table import (
    Slots,
    SlotTables,
    check_row_width,
    values_of_rows,
)
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.tensors.numpy_torch import NUMPY, TORCH, to_torch
from pinfeed.training.embeddings.optimizer_state import StateLayout, discover

# These options select an implementation and do not change the state.
_IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})


class StateTables(SlotTables):
    """Tables of an optimizer's row-wise state, one per state key.

    Their rows are copied into the optimizer's state for each batch.

    Args:
        given_optimizer: A torch optimizer that has the parameter, alone or among others.
        total_classes: Number of rows of a table.
        embed_dimension: Length of a row of the embedding.
        model: The model that has the embedding.
        variable_name: Name of the embedding in the model, with dots if it is nested.
        dtype: Dtype of the tables for state that has the dtype of the weight.
        place: Arguments of the place of the factory.
        options: The same by name.

    Raises:
        ArgumentError: If the model or the optimizer does not have the parameter, if its rows have
            another length, or if the optimizer cannot train rows.
        StoreError: If ``dtype`` is not a dtype.
    """

    _init_method = "optInit()"

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        *place: Any,
        **options: Any,
    ) -> None:
        self.given_optimizer = given_optimizer
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.model = model
        self.variable_name = variable_name
        self.dtype = table_dtype(dtype)
        self._locate(*place, **options)
        self._weight = weight_of(model, variable_name)
        check_row_width(self._weight, embed_dimension, variable_name)
        self._layout = self._discover_layout()
        # Keys of the row-wise state that the optimizer has created. It creates the other keys in
        # its first step.
        self._created: set[str] = set()

    def optInit(self) -> None:
        """Create the tables. Every row has the initial values of the optimizer itself."""
        # The dtype of the model may have changed.
        self._layout = self._discover_layout()
        with self._filling():
            state = self.given_optimizer.state[self._weight]
            self._created = {
                row.key
                for row in self._layout.rows
                if row.key in self._layout.created_in_init or state.get(row.key) is not None
            }

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save all tables, and the state of the table as a whole, as a .npz file.

        If saving fails, an existing file does not change. ``.npz`` is added to the name if it is
        missing.
        """
        arrays = {key: as_numpy(value) for key, value in self.snapshot().items()}
        with self._writing(with_suffix(saveFileName, ".npz")) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Load a file that ``saveCupy`` wrote.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If the file belongs to another optimizer or another shape.
        """
        with np.load(find_file(loadFileName, ".npz")) as file:
            self.restore({key: _from_array(key, file[key]) for key in file.files})

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the optimizer keeps for the table, row-wise or as a whole."""
        state = self.given_optimizer.state[self._weight]
        saved: dict[str, Any] = {"optimizer": type(self.given_optimizer).__name__}
        for key, table in self._all().items():
            saved[f"rows.{key}"] = table.tensor().cpu()
        for key in sorted(self._layout.tables & set(state)):
            if isinstance(value := state[key], torch.Tensor):
                saved[f"table.{key}"] = value.detach().cpu()
            elif value is not None:
                saved[f"number.{key}"] = value
        return saved | {f"begun.{key}": True for key in sorted(self._created)}

    def restore(self, saved: Any) -> None:
        """Restore a snapshot.

        Raises:
            StoreError: If the snapshot belongs to another optimizer or another shape.
        """
        if not isinstance(saved, dict):
            raise StoreError(
                f"the file contains a {type(saved).__name__}; expected the tables of an optimizer"
            )
        if self._tables is None:
            self._layout = self._discover_layout()
        rows = {key: store_of_saved(value, f"rows.{key}") for key, value in _part(saved, "rows")}
        created = {key for key, _ in _part(saved, "begun")}
        self._check_saved(saved, {key: (one.n_rows, *one.row_shape) for key, one in rows.items()})
        with self._filling(anew=False) as tables:
            for key, store in rows.items():
                copy_all_rows(store, tables[key])
        self._restore_shared(dict(_part(saved, "table", "number")))
        self._created = created

    def _check_saved(self, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a snapshot with tables of these shapes belongs to this optimizer."""
        name = type(self.given_optimizer).__name__
        if (other := saved.get("optimizer", name)) != name:
            raise StoreError(f"the saved state belongs to {other}; expected {name}")
        expected = {row.key: (self.total_classes, *row.row_shape) for row in self._layout.rows}
        known = {f"begun.{key}" for key in expected}
        known |= {f"{kind}.{key}" for kind in ("table", "number") for key in self._layout.tables}
        found = {key for key in saved if key.startswith(("table.", "number.", "begun."))}
        if shapes != expected or found - known:
            raise StoreError(
                f"the saved state has {shapes}, {sorted(found)}; "
                f"{name} expects {expected}, {sorted(self._layout.tables)}"
            )

    def _restore_shared(self, shared: Mapping[str, Any]) -> None:
        state = self.given_optimizer.state[self._weight]
        # The next batch copies its rows to the state again.
        state.clear()
        group = self._group()
        step_on_device = group.get("capturable") or group.get("fused")
        for key, value in shared.items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
            elif key == "step" and not step_on_device:
                state[key] = value.clone()
            else:
                state[key] = value.to(self._weight.device, copy=True)

    def _group(self) -> dict[str, Any]:
        """Return the optimizer's parameter group that has the weight."""
        for group in self.given_optimizer.param_groups:
            if any(parameter is self._weight for parameter in group["params"]):
                return group
        raise ArgumentError(
            f"variable_name={self.variable_name!r}: the optimizer does not have this parameter; "
            "make the optimizer from model.parameters()"
        )

    def _discover_layout(self) -> StateLayout:
        """Find the state that the optimizer keeps for the weight, with its current options."""
        optimizer_class = type(self.given_optimizer)
        accepted = inspect.signature(optimizer_class).parameters
        options = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in self._group().items()
            if key in accepted and key != "params" and key not in _IMPLEMENTATION_OPTIONS
        }
        # A default device must not apply to the small tables of the trial.
        with torch.device("cpu"):
            layout = discover(optimizer_class, options, self.embed_dimension, self._weight.dtype)
        if copies := [row.key for row in layout.rows if row.initial is None]:
            raise ArgumentError(
                f"{optimizer_class.__name__} starts its state {copies} as a copy of the weights; "
                "expected state that starts with a constant; use pinfeed.RowOptimizer, which can "
                "train with this optimizer"
            )
        return layout

    def _make(self, tables: dict[str, Table]) -> None:
        for row in self._layout.rows:
            dtype = self.dtype if row.dtype == NUMPY[self._weight.dtype] else row.dtype
            shape = (self.total_classes, *row.row_shape)
            tables[row.key] = self._place.new_table(shape, dtype, row.key)
            if row.initial:
                tables[row.key].fill(functools.partial(torch.fill_, value=row.initial))

    def _shown(self, view: Callable[[Table], Any]) -> Any:
        return {key: view(table) for key, table in self._all().items()}

    def _copy_in(self, slots: Slots) -> None:
        state = self.given_optimizer.state[self._weight]
        for row in self._layout.rows:
            # Existing state belongs to a batch that was not written back, or to load_state_dict.
            # The optimizer relies on it.
            was_present = state.pop(row.key, None) is not None
            if was_present or row.key in self._created:
                table = self._all()[row.key]
                state[row.key] = table.read(slots.rows, self._weight.device, TORCH[row.dtype])

    def _copy_out(self, slots: Slots) -> None:
        state = self.given_optimizer.state[self._weight]
        rows = self._layout.rows
        known = self._layout.tables | {row.key for row in rows}
        tensor_keys = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
        if unknown := [key for key in tensor_keys if key not in known]:
            raise ArgumentError(
                f"{type(self.given_optimizer).__name__} keeps state {unknown} that it did not keep "
                "in the trial of optInit(); set its options before optInit()"
            )
        kept = {
            row.key: values_of_rows(state[row.key], slots, row.row_shape, row.key)
            for row in rows
            if state.get(row.key) is not None
        }
        for key, values in kept.items():
            self._all()[key].write(slots.unique, values)
        self._created |= set(kept)


def weight_of(model: nn.Module, variable_name: str) -> nn.Parameter:
    """Return the weight of an embedding in a model.

    Raises:
        ArgumentError: If the model has no embedding of this name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weight = parameters.get(f"{variable_name}.weight")
    if weight is None:
        names = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
        raise ArgumentError(
            f"variable_name={variable_name!r}: the model has no parameter {variable_name}.weight; "
            f"expected one of {names}"
        )
    return weight


def _from_array(key: str, array: npt.NDArray[Any]) -> Any:
    """Return the tensor or the number that a file has as an array."""
    # numpy reads bfloat16 back as plain bytes.
    typed = array.view(BFLOAT16) if array.dtype.kind == "V" else array
    return to_torch(typed) if key.startswith(("rows.", "table.")) else typed.item()


def _part(saved: Mapping[str, Any], *kinds: str) -> list[tuple[str, Any]]:
    """Return the entries of these kinds, in order, without the kind in their keys."""
    entries = []
    for name, value in saved.items():
        kind, dot, key = name.partition(".")
        if dot and kind in kinds:
            entries.append((key, value))
    return entries
