"""RowOptimizer: any torch optimizer, whose row-wise state moves with the rows of its tables."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch import nn

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.embeddings.optimizer_state import group_options, table_layouts
from pinfeed.training.embeddings.optimizer_trial import GradientKind, sparse_rows
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.embeddings.table_state import StateStore, TableState, make_state_stores


class RowOptimizer(torch.optim.Optimizer):
    """A torch optimizer for host tables, which updates the rows of a batch and their state.

    Learning-rate schedulers, ``GradScaler`` and gradient clipping (``optimizer.parameters()``) use
    it like any other optimizer. Gradients live as long as their batch: call ``step()`` before the
    loop requests the next batch.

    Examples:
        >>> users = pinfeed.HostEmbedding(1_000, 16, name="users")
        >>> optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [users], lr=1e-3)
        >>> loader = [torch.tensor([3, 7, 3])]
        >>> for ids in pinfeed.train_rows(loader, {users: lambda ids: ids}, optimizer=optimizer):
        ...     users(ids).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    A step updates only the rows ``R`` that the batch looks up. Let ``U(w, s, g, t)`` be the update
    of ``optimizer_class`` for weights ``w``, row-wise state ``s`` and gradients ``g``. State of the
    whole table, such as the number of steps, is ``t``. A step is

        w[R], s[R], t = U(w[R], s[R], gradient of w[R], t)

    All other rows keep their weights and their state, and get no weight decay (*lazy* updates).
    Optimizers that do not change a row whose gradient is zero (SGD without momentum and weight
    decay, Adagrad) give the result of the dense optimizer. Other optimizers follow the rule of
    ``torch.optim.SparseAdam``, so their result differs from the dense one. Dense Adam, for example,
    also moves rows that a batch does not look up, by their momentum. Some optimizers treat their
    first step specially: SGD takes the first gradient as momentum, without dampening. Here this
    happens only in the first step of the table. A row that is first looked up in a later step
    begins with its initial state, which is zero for a momentum.

    The constructor runs the optimizer on a small table to find its row-wise state and the initial
    values.

    Args:
        optimizer_class: A class of ``torch.optim``, or one with the same interface.
        tables: HostEmbeddings, or parameter groups:
            ``[{"params": [users], "lr": 0.1}, {"params": [items]}]``.
        state: Function of table, key, shape and dtype that makes a store for row-wise state. By
            default, the state is in the same kind of memory as the table, or in a file next to it:
            ``users.exp_avg.npy`` for ``users.npy``. As with tables, an existing file is not
            changed, and cannot be used until ``checkpoint.resume`` has replaced its rows.
        gradients: Kind of the gradients in a step: ``"sparse"`` as in
            ``nn.Embedding(sparse=True)``, or ``"dense"`` as in ``nn.Embedding(sparse=False)``. With
            None, they are dense. For optimizers that refuse dense gradients, None means sparse
            gradients of all rows of the batch.
        options: Options of ``optimizer_class``.

    Raises:
        ArgumentError: If ``tables`` is empty, a table is frozen or given twice, or the optimizer
            cannot train rows. Also if ``gradients`` is None, and the optimizer has different rules
            for dense and for sparse gradients.
        StoreError: If a store has another shape or dtype, or a different file exists at its path.
    """

    # It is one class because all of it is the interface of torch.optim.Optimizer. The state of a
    # table, parameter groups and stores have modules of their own.

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        tables: Iterable[HostEmbedding | Mapping[str, Any]],
        *,
        state: StateStore | None = None,
        gradients: GradientKind | None = None,
        **options: Any,
    ) -> None:
        check_optimizer_class(optimizer_class)
        if gradients not in (None, *get_args(GradientKind)):
            raise ArgumentError(f"gradients={gradients!r}: expected 'dense', 'sparse' or None")
        groups = table_groups(tables)
        layouts = table_layouts(optimizer_class, groups, options, gradients)
        with contextlib.ExitStack() as undo:
            stores, existing = make_state_stores(state, layouts, undo)
            self.tables = {
                table: TableState(table, layout, stores[table]) for table, layout in layouts.items()
            }
            for group in groups:
                group["params"] = [self.tables[table].weight for table in group["params"]]
            self.inner: torch.optim.Optimizer = optimizer_class(groups, **options)
            undo.pop_all()
        self.gradients = gradients
        """Kind of the gradients that the user chose, or None."""
        self._existing = existing
        self.awaits_resume = bool(existing)
        """Whether ``checkpoint.resume`` has yet to replace state in existing files."""
        super().__init__([nn.Parameter(torch.empty(0, device="cpu"))], self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        # For each table, its group and the place of its parameter there.
        every = self.inner.param_groups
        places = ((group, i) for group in every for i in range(len(group["params"])))
        self._places = dict(zip(self.tables, places, strict=True))

    def __repr__(self) -> str:
        return f"RowOptimizer({self.inner!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows of the batch that have gradients.

        Args:
            closure: Function that is called first, with gradients enabled. The method returns its
                loss.

        Raises:
            ArgumentError: If gradients of an earlier batch were never applied, because their rows
                have left the device. Also if ``train_rows`` was called without this optimizer.
            ClosedError: If the training step is inside ``evaluating()``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stale = [state.table.name for state in self.tables.values() if state.has_stale_gradients]
        if stale:
            raise ArgumentError(
                f"step() found gradients of an earlier batch of {', '.join(stale)}; call "
                "backward() and step(), or zero_grad(), before the loop requests the next batch "
                "(to accumulate gradients, give train_rows larger batches and split them in the "
                "training step)"
            )
        self._collect_gradients()
        for state in self.tables.values():
            gradient = state.weight.grad
            state.is_stepped |= gradient is not None
            state.has_pending_gradients = False
            state.has_unused_gradients = False
            if gradient is not None and state.layout.sparse and not gradient.is_sparse:
                state.weight.grad = sparse_rows(gradient)
        sharded = [state for state in self.tables.values() if state.weight is not state.lent]
        try:
            for state in sharded:
                self._put_in_group(state.table, state.weight)
            self.inner.step()
        finally:
            for state in sharded:
                self._put_in_group(state.table, state.lent)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch optimizers do."""
        super().zero_grad(set_to_none)
        for state in self.tables.values():
            state.has_pending_gradients = False
            state.has_stale_gradients = False

    def require_resumed(self) -> None:
        """Check that the row-wise state belongs to this run.

        Raises:
            StoreError: If a part is in existing files, and ``checkpoint.resume`` has not replaced
                it.
        """
        if self.awaits_resume:
            raise StoreError(
                f"{'; '.join(self._existing)} existed before the optimizer was made, and is "
                "unchanged; expected checkpoint.resume, which replaces the state, before the "
                "optimizer is used; to start with new state, give the table overwrite=True or "
                "remove the file"
            )

    def parameters(self) -> list[nn.Parameter]:
        """Return the rows of the current batch for each table, for example to clip gradients."""
        return [state.lent for state in self.tables.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse the group, because the constructor takes all tables.

        Raises:
            ArgumentError: If the optimizer is already constructed.
        """
        if hasattr(self, "param_groups") and self.param_groups:
            raise ArgumentError(
                "add_param_group: give a RowOptimizer all its tables at construction, "
                "or make a second one"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters and the state of whole tables.

        Row-wise state is in the stores. ``pinfeed.checkpoint`` saves both.
        """
        tables = []
        for state in self.tables.values():
            own = state.whole_table_state(self._state_of(state))
            tables.append({"begun": state.is_initialized, "state": own})
        groups = list(map(group_options, self.param_groups))
        attributes = {name: getattr(self.inner, name) for name in self._attributes}
        return {"tables": tables, "param_groups": groups, "attributes": attributes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore hyper-parameters and state that ``state_dict`` returned.

        Raises:
            ArgumentError: If ``state_dict`` is from an optimizer with other tables or groups.
        """
        try:
            tables = list(state_dict["tables"])
            groups = list(state_dict["param_groups"])
            attributes = {name: state_dict["attributes"][name] for name in self._attributes}
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                f"not a state of a RowOptimizer ({error!r}); expected what state_dict() returned"
            ) from None
        if (len(tables), len(groups)) != (len(self.tables), len(self.param_groups)):
            raise ArgumentError(
                f"a state of {len(tables)} tables in {len(groups)} groups; "
                f"expected {len(self.tables)} in {len(self.param_groups)}"
            )
        for state, saved in zip(self.tables.values(), tables, strict=True):
            state.is_initialized = bool(saved["begun"])
            current = self._state_of(state)
            rows = {row.key: current.get(row.key) for row in state.layout.rows}
            kept = {key: value for key, value in rows.items() if value is not None}
            self.inner.state[state.weight] = copy.deepcopy(dict(saved["state"])) | kept
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            group.update(saved_group)
        for name, value in attributes.items():
            setattr(self.inner, name, value)

    def close(self) -> None:
        """Flush and close the files of row-wise state. A second call does nothing.

        Raises:
            ClosedError: If a loop over the rows of a table runs, because its last changes would be
                lost.
        """
        for table in self.tables:
            table.require_not_lent()
        for state in self.tables.values():
            for store in state.stores:
                store.close()

    def bind(
        self,
        table: HostEmbedding,
        weight: nn.Parameter,
        rows: list[torch.Tensor],
        lent: nn.Parameter | None = None,
    ) -> None:
        """Continue with the rows of another batch.

        Args:
            table: The table.
            weight: The rows that the optimizer updates.
            rows: Their row-wise state, in the order of the layout.
            lent: The rows that the training step has, if they differ. The default is ``weight``.
        """
        lent = weight if lent is None else lent
        own = self._switch(table, weight, lent, rows)
        for key in self.tables[table].layout.tables:
            value = own.get(key)
            if not isinstance(value, torch.Tensor) or value.device == weight.device:
                continue
            # The state is from a checkpoint, or from a loop on another device. torch keeps state
            # that is a single number on the CPU, unless the optimizer needs it on the device.
            group, _ = self._places[table]
            if value.ndim or group.get("capturable") or group.get("fused"):
                own[key] = value.to(weight.device)

    def changed(self, table: HostEmbedding) -> list[torch.Tensor | None] | None:
        """Return row-wise state of the current batch; None if nothing has changed it.

        State that the optimizer does not keep yet is None in the list.

        Raises:
            ArgumentError: If the optimizer keeps state that the trial on a small table did not
                show.
        """
        state = self.tables[table]
        if not state.is_changed:
            return None
        return state.changed_rows(self._state_of(state), type(self.inner).__name__)

    def release(self, table: HostEmbedding) -> None:
        """Drop the rows of the batch, and keep the state of the whole table."""
        state = self.tables[table]
        self._switch(table, state.no_weight, state.no_weight, state.no_state)

    @property
    def _attributes(self) -> frozenset[str]:
        """Names of scalar attributes of the optimizer that ``step()`` changes."""
        layouts = [state.layout for state in self.tables.values()]
        return frozenset().union(*(layout.attributes for layout in layouts))

    def _state_of(self, state: TableState) -> dict[str, Any]:
        """Return the inner optimizer's state for the rows of a table."""
        found: dict[str, Any] = self.inner.state.get(state.weight, {})
        return found

    def _collect_gradients(self) -> None:
        """Move the gradients of the lent rows to the rows that are updated.

        Raises:
            ArgumentError: If ``train_rows`` was called without this optimizer.
            ClosedError: If the training step is inside ``evaluating()``.
        """
        lent: list[BatchRows] = []
        strange = []
        for table, state in self.tables.items():
            batch_rows = table._batch_rows
            if batch_rows is None:
                table._refuse_in_evaluation("step()")
                continue
            lent.append(batch_rows)
            if batch_rows.weight is not state.lent:
                strange.append(table.name)
        if strange:
            raise ArgumentError(
                f"the loop over rows of {', '.join(strange)} was made without this optimizer; "
                "give train_rows(..., optimizer=...)"
            )
        for kind in {type(batch_rows) for batch_rows in lent}:
            same = [batch_rows for batch_rows in lent if type(batch_rows) is kind]
            same[0].collect_gradients(same)

    def _put_in_group(self, table: HostEmbedding, parameter: nn.Parameter) -> None:
        """Make a parameter that of a table in its parameter group."""
        group, place = self._places[table]
        group["params"][place] = parameter

    def _switch(
        self,
        table: HostEmbedding,
        weight: nn.Parameter,
        lent: nn.Parameter,
        rows: list[torch.Tensor],
    ) -> dict[str, Any]:
        """Continue with other rows of a table, and return the state of the optimizer for them.

        After an interrupt, the next call finds either the old rows or the new ones, and the state
        of the whole table.
        """
        state = self.tables[table]
        states = self.inner.state
        next_state = state.next_state(states.get(state.weight, {}), rows)
        if next_state:
            states[weight] = next_state
        earlier = state.weight
        state.switch(weight, lent, rows)
        self._put_in_group(table, lent)
        if earlier is not weight:
            states.pop(earlier, None)
        if len(states) > len(self.tables):
            # An interrupt has cut off an earlier call.
            current = {id(other.weight) for other in self.tables.values()}
            for parameter in [one for one in states if id(one) not in current]:
                del states[parameter]
        return next_state


def check_optimizer_class(optimizer_class: Any) -> None:
    """Check that an argument can be the class of an optimizer.

    Raises:
        ArgumentError: If it is an optimizer, a module, or not callable.
    """
    if isinstance(optimizer_class, torch.optim.Optimizer):
        kind = type(optimizer_class).__name__
        raise ArgumentError(
            f"optimizer_class is an existing {kind}; expected the class, and its options as "
            f"arguments: RowOptimizer(torch.optim.{kind}, tables, lr=...)"
        )
    if isinstance(optimizer_class, nn.Module) or not callable(optimizer_class):
        raise ArgumentError(
            f"optimizer_class={optimizer_class!r}; expected the class of an optimizer, then the "
            "tables, then its options: RowOptimizer(torch.optim.SGD, tables, lr=...)"
        )


def table_groups(tables: Iterable[HostEmbedding | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups whose ``"params"`` are lists of trainable tables.

    Args:
        tables: Tables, or parameter groups with one or several tables as ``"params"``.

    Raises:
        ArgumentError: If no table is given, a table is given twice, or one cannot be trained.
    """
    groups = _as_groups(tables)
    every = [table for group in groups for table in group["params"]]
    if len(set(map(id, every))) < len(every):
        raise ArgumentError("tables has the same table twice; give each table once")
    for table in every:
        _check_trainable(table)
    return groups


def _as_groups(tables: Any) -> list[dict[str, Any]]:
    if not isinstance(tables, (HostEmbedding, Iterable)):
        raise ArgumentError(
            f"tables={tables!r}; expected HostEmbeddings, or parameter groups of HostEmbeddings"
        )
    given: list[Any] = [tables] if isinstance(tables, HostEmbedding) else list(tables)
    if not given:
        raise ArgumentError(
            "tables is empty; expected HostEmbeddings, or parameter groups of HostEmbeddings; give "
            "the tables themselves, such as [users], because parameters() of a table is empty"
        )
    if all(isinstance(table, HostEmbedding) for table in given):
        return [{"params": given}]
    try:
        groups = [dict(group) for group in given]
        for group in groups:
            params = group["params"]
            group["params"] = [params] if isinstance(params, HostEmbedding) else list(params)
    except (KeyError, TypeError, ValueError):
        kinds = ", ".join(sorted({type(table).__name__ for table in given}))
        raise ArgumentError(
            f"tables: got {kinds}; expected HostEmbeddings, or parameter groups: "
            '[{"params": [table], "lr": 0.1}, ...]'
        ) from None
    return groups


def _check_trainable(table: Any) -> None:
    if not isinstance(table, HostEmbedding):
        raise ArgumentError(
            f"tables: got {type(table).__name__}; expected HostEmbeddings "
            "(other parameters need a separate optimizer)"
        )
    if not table.trainable:
        raise ArgumentError(
            f"{table.name} is frozen; expected a trainable table; use "
            "from_pretrained(..., freeze=False), or requires_grad_()"
        )
    if not table.store.writable:
        raise ArgumentError(
            f"{table.name} is in a read-only store ({table.store!r}); expected a writable store: a "
            "file opened with mode='r+', or an array with separate memory for each element"
        )
