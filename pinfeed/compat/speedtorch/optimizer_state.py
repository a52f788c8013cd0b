"""StateTables: an optimizer's row-wise state, copied into the optimizer batch by batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.compat.speedtorch.optimizer_parameter import discover_layout, group_of, weight_of
from pinfeed.compat.speedtorch.placement import Placement, Table, table_dtype
from pinfeed.compat.speedtorch.saved_files import FileName, find_file, with_suffix
from pinfeed.compat.speedtorch.slots import Slots, SlotTables, check_row_width, values_of_rows
from pinfeed.compat.speedtorch.state_snapshot import (
    check_snapshot,
    from_arrays,
    make_snapshot,
    to_arrays,
)
from pinfeed.compat.speedtorch.tables import copy_all_rows, new_tables
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.tensors.numpy_torch import NUMPY, TORCH
from pinfeed.training.embeddings.optimizer_state import StateLayout


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
        placement: Function that creates a table in its place.

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
        dtype: Any,
        placement: Placement,
    ) -> None:
        self.given_optimizer = given_optimizer
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.model = model
        self.variable_name = variable_name
        self.dtype = table_dtype(dtype)
        self._placement = placement
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
        with new_tables() as tables:
            self._make(tables)
        state = self.given_optimizer.state[self._weight]
        self._created = {
            row.key
            for row in self._layout.rows
            if row.key in self._layout.created_in_init or state.get(row.key) is not None
        }
        self._use(tables)

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save all tables, and the state of the table as a whole, as a .npz file.

        If saving fails, an existing file does not change. ``.npz`` is added to the name if it is
        missing.
        """
        arrays = to_arrays(self.snapshot())
        with self._writing(with_suffix(saveFileName, ".npz")) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Load a file that ``saveCupy`` wrote.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If the file belongs to another optimizer or another shape.
        """
        with np.load(find_file(loadFileName, ".npz")) as file:
            arrays = {key: file[key] for key in file.files}
        self.restore(from_arrays(arrays))

    def saveTorch(self, saveFileName: FileName) -> None:
        """Save the same as ``saveCupy``, with ``torch.save`` and under exactly this name.

        Raises:
            ArgumentError: If a table has its rows in this file.
        """
        with self._writing(os.fspath(saveFileName)) as file:
            torch.save(self.snapshot(), file)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Load a file that ``saveTorch`` wrote.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If the file belongs to another optimizer or another shape.
        """
        path = find_file(loadFileName, "")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(saved, dict):
            raise StoreError(
                f"{path} contains a {type(saved).__name__}; expected the tables of an optimizer"
            )
        self.restore(saved)

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the optimizer keeps for the table, row-wise or as a whole."""
        state = self.given_optimizer.state[self._weight]
        rows = {key: table.tensor() for key, table in self._all().items()}
        shared = {
            key: state[key]
            for key in sorted(self._layout.tables & set(state))
            if state[key] is not None
        }
        return make_snapshot(type(self.given_optimizer).__name__, rows, shared, self._created)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a snapshot.

        Raises:
            StoreError: If the snapshot belongs to another optimizer or another shape.
        """
        if self._tables is None:
            self._layout = self._discover_layout()
        name = type(self.given_optimizer).__name__
        snapshot = check_snapshot(saved, name, self._layout, self.total_classes)
        with new_tables() as made:
            if self._tables is None:
                self._make(made)
            tables = self._tables or made
            for key, store in snapshot.rows.items():
                copy_all_rows(store, tables[key])
        self._restore_shared(snapshot.shared)
        self._created = snapshot.created
        self._use(tables)

    def _restore_shared(self, shared: Mapping[str, Any]) -> None:
        state = self.given_optimizer.state[self._weight]
        # The next batch copies its rows to the state again.
        state.clear()
        group = group_of(self.given_optimizer, self._weight, self.variable_name)
        step_on_device = group.get("capturable") or group.get("fused")
        for key, value in shared.items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
            elif key == "step" and not step_on_device:
                state[key] = value.clone()
            else:
                state[key] = value.to(self._weight.device, copy=True)

    def _discover_layout(self) -> StateLayout:
        return discover_layout(
            self.given_optimizer, self._weight, self.variable_name, self.embed_dimension
        )

    def _make(self, tables: dict[str, Table]) -> None:
        """Create a table for each key of the row-wise state, with its initial value."""
        for row in self._layout.rows:
            dtype = self.dtype if row.dtype == NUMPY[self._weight.dtype] else row.dtype
            shape = (self.total_classes, *row.row_shape)
            tables[row.key] = self._placement(shape, dtype, row.key)
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
