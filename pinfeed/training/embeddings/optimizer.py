"""RowOptimizer: any torch optimizer, whose state rows travel with the rows of their tables."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores import MmapStore, PinnedStore, Store
from pinfeed.stores.file import open_created
from pinfeed.tensors.numpy_torch import NUMPY, TORCH
from pinfeed.training.embeddings.optimizer_state import RowState, StateLayout, discover, sparse_rows
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_file import row_chunks

StateStore = Callable[[HostEmbedding, str, tuple[int, ...], np.dtype[Any]], Store]
"""Given a table, the key of its state, its shape and dtype: where to keep it."""


class TableState:
    """What an optimizer keeps for one table.

    Args:
        table: The table.
        layout: What there is.
        stores: Where the row-wise part is, in the order of ``layout.rows``.
    """

    def __init__(self, table: HostEmbedding, layout: StateLayout, stores: list[Store]) -> None:
        self.table = table
        self.layout = layout
        self.stores = stores
        self.weight = nn.Parameter(
            torch.empty(
                0, table.embedding_dim, dtype=TORCH[np.dtype(table.store.dtype)], device="cpu"
            )
        )
        """What is stepped on."""
        self.lent = self.weight
        """What the loop has, and the parameter groups: other rows than those, where a table is shared by several processes."""
        self.begun = False
        """Whether the optimizer has made the state that comes with its first step."""
        self.stepped = False
        """Whether the batch that is lent has been updated."""
        self.unapplied = False
        """Whether there are gradients that no step has used yet."""
        self.left_behind = False
        """Whether there were, when their batch ended."""
        self.unused = False
        """Whether the batch that is lent has had gradients that no step has used, be it that they were dropped."""


class RowOptimizer(torch.optim.Optimizer):
    """A torch optimizer for tables on the host: it updates the rows of the batch, with the state of these very rows.

    With rows ``R`` looked up in a batch, and ``U(w, s, g, t)`` the update of ``optimizer_class``
    (weights, row-wise state, gradient, state of the whole table such as the number of steps), a
    step is

        w[R], s[R], t = U(w[R], s[R], gradient of w[R], t)

    and all other rows stay as they are: weights, state and weight decay alike (*lazy*). There is
    one ``t`` for the table. For optimizers that leave a row alone whose gradient is zero (SGD
    without momentum and weight decay, Adagrad) this is what they do to the whole table. For others
    it is the rule of ``torch.optim.SparseAdam``: Adam, say, moves a row that is absent on by its
    momentum when it is dense. What an optimizer does in its first step alone (SGD takes the first
    gradient as the momentum, undamped) it does in the table's first step alone: a row that comes
    later begins with state of zeros.

    Which state is row-wise, and what a row begins with, is found out by running the optimizer on a
    small table. Gradients live as long as their batch: a step has to come before the next batch is
    asked for.

    It is an optimizer like any other to learning-rate schedulers, ``GradScaler`` and gradient
    clipping (``optimizer.parameters()``).

    Args:
        optimizer_class: A class of ``torch.optim``, or one like these.
        tables: ``HostEmbedding`` s, or parameter groups: ``[{"params": [users], "lr": 0.1},
            {"params": [items]}]``.
        state: Where row-wise state is kept: a function of table, key, shape and dtype. By default
            beside the table: in the same kind of memory, or for ``users.npy`` in
            ``users.exp_avg.npy`` and so on. As for tables, such a file that is there already stays
            as it is, and can be used when ``checkpoint.resume`` has replaced what is in it.
        options: Of ``optimizer_class``.

    Raises:
        ArgumentError: No tables, frozen ones, one that is there twice, or an optimizer that cannot
            train rows.
        StoreError: A store of another shape or dtype, or another file that is there already.
    """

    def __init__(
        self,
        optimizer_class: Any,
        tables: Iterable[HostEmbedding | Mapping[str, Any]],
        *,
        state: StateStore | None = None,
        **options: Any,
    ) -> None:
        if isinstance(optimizer_class, torch.optim.Optimizer):
            raise ArgumentError(
                f"optimizer_class is a {type(optimizer_class).__name__} that is made already; expected the class, its options beside it: "
                f"RowOptimizer(torch.optim.{type(optimizer_class).__name__}, tables, lr=...)"
            )
        if isinstance(optimizer_class, nn.Module) or not callable(optimizer_class):
            raise ArgumentError(
                f"optimizer_class={optimizer_class!r}: give the class of an optimizer, then the tables, then its options: "
                "RowOptimizer(torch.optim.SGD, tables, lr=...)"
            )
        groups = _groups(tables)
        for table in (table for group in groups for table in group["params"]):
            _check_table(table)
        found = {
            table: discover(optimizer_class, options, *_kind(table), _own(group))
            for group in groups
            for table in group["params"]
        }
        self._found: list[str] = []
        with contextlib.ExitStack() as undo:
            stores = {
                table: _stores(table, layout, state or _beside, undo, self._found)
                for table, layout in found.items()
            }
            self.tables = {
                table: TableState(table, layout, stores[table]) for table, layout in found.items()
            }
            self.inner: torch.optim.Optimizer = optimizer_class(
                [
                    {**group, "params": [self.tables[table].weight for table in group["params"]]}
                    for group in groups
                ],
                **options,
            )
            undo.pop_all()
        self.awaits_resume = bool(self._found)
        """Whether state is in files that were there already, and ``checkpoint.resume`` has not replaced it yet."""
        super().__init__([nn.Parameter(torch.empty(0, device="cpu"))], self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def __repr__(self) -> str:
        return f"RowOptimizer({self.inner!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows of the batch that have gradients.

        Args:
            closure: Evaluated first, with gradients enabled; its loss is returned.

        Raises:
            ArgumentError: Gradients of an earlier batch were never applied: their rows are not here
                any more. Or the loop that runs was not given this optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        late = [state.table.name for state in self.tables.values() if state.left_behind]
        if late:
            raise ArgumentError(
                f"gradients of an earlier batch of {', '.join(late)} were neither applied nor dropped; call step(), or zero_grad(), before "
                "the next batch is taken (to accumulate gradients, give train_rows the larger batches and split them in the loop)"
            )
        blocks = {table: table._block for table in self.tables if table._block is not None}
        if strange := [
            table.name
            for table, block in blocks.items()
            if block.weight is not self.tables[table].lent
        ]:
            raise ArgumentError(
                f"the loop over rows of {', '.join(strange)} was made without this optimizer; give it to train_rows"
            )
        for kind in {type(block) for block in blocks.values()}:
            same = [block for block in blocks.values() if type(block) is kind]
            same[0].collect(same)
        for state in self.tables.values():
            gradient = state.weight.grad
            state.stepped |= gradient is not None
            state.unapplied = state.unused = False
            if gradient is not None and state.layout.sparse and not gradient.is_sparse:
                state.weight.grad = sparse_rows(gradient)
        self._put([state.weight for state in self.tables.values()])
        try:
            self.inner.step()
        finally:
            self._put([state.lent for state in self.tables.values()])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch's optimizers do."""
        super().zero_grad(set_to_none)
        for state in self.tables.values():
            state.unapplied = state.left_behind = False

    def require_resumed(self) -> None:
        """Check that the row-wise state is that of this run.

        Raises:
            StoreError: If some is in files that were there before the optimizer, and
                ``checkpoint.resume`` has not replaced it.
        """
        if self.awaits_resume:
            raise StoreError(
                f"{'; '.join(self._found)} was there already when the optimizer was made, and is as it was; expected checkpoint.resume "
                "with this optimizer before it is used, which replaces the state; or give the table overwrite=True to begin anew, remove "
                "the file, or give state=a function that opens it: MmapStore(..., mode='r+')"
            )

    def parameters(self) -> list[nn.Parameter]:
        """The rows of the batch that is lent, table by table: for gradient clipping, and the like."""
        return [state.lent for state in self.tables.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all tables are given at construction.

        Raises:
            ArgumentError: Always, once this is made.
        """
        if hasattr(self, "param_groups") and self.param_groups:
            raise ArgumentError(
                "add_param_group: give a RowOptimizer all its tables at construction, or make a second one"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, and the state that is not row-wise; row-wise state is in the stores (``pinfeed.checkpoint`` saves both)."""
        tables = []
        for state in self.tables.values():
            rows = {row.key for row in state.layout.rows}
            own = {
                key: value
                for key, value in self.inner.state.get(state.weight, {}).items()
                if key not in rows
            }
            tables.append({"begun": state.begun, "state": own})
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        return {"tables": tables, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave.

        Raises:
            ArgumentError: It is of an optimizer with other tables or groups.
        """
        try:
            tables, groups = list(state_dict["tables"]), list(state_dict["param_groups"])
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                f"not a state of a RowOptimizer ({error!r}); expected what state_dict() returned"
            ) from None
        if (len(tables), len(groups)) != (len(self.tables), len(self.param_groups)):
            raise ArgumentError(
                f"a state of {len(tables)} tables in {len(groups)} groups; expected {len(self.tables)} in {len(self.param_groups)}"
            )
        for state, saved in zip(self.tables.values(), tables, strict=True):
            state.begun = bool(saved["begun"])
            kept = {
                row.key: self.inner.state.get(state.weight, {}).get(row.key)
                for row in state.layout.rows
            }
            own = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in saved["state"].items()
            }
            self.inner.state[state.weight] = own | {
                key: value for key, value in kept.items() if value is not None
            }
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            group.update(saved_group)

    def close(self) -> None:
        """Flush and close the files of row-wise state. Idempotent."""
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
        """Work on another batch's rows of a table.

        Args:
            table: The table.
            weight: The rows.
            rows: Their row-wise state, in the order of the layout.
            lent: What the loop has, where these are other rows.
        """
        lent = weight if lent is None else lent
        self._switch(table, weight, lent, rows)
        group = next(
            group
            for group in self.param_groups
            if any(parameter is self.tables[table].lent for parameter in group["params"])
        )
        on_device = group.get("capturable") or group.get("fused")
        own = self.inner.state.get(weight, {})
        for key, value in own.items():
            if (
                isinstance(value, torch.Tensor)
                and value.device != weight.device
                and (value.ndim or on_device)
            ):
                # Of a checkpoint, or of a loop on another device; numbers are on the CPU by custom.
                own[key] = value.to(weight.device)

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put these parameters, one for each table, into the groups: the groups have the tables in their order."""
        left = iter(parameters)
        for group in self.param_groups:
            group["params"] = [next(left) for _ in group["params"]]

    def _switch(
        self,
        table: HostEmbedding,
        weight: nn.Parameter,
        lent: nn.Parameter,
        rows: list[torch.Tensor],
    ) -> None:
        """Work on other rows.

        An interrupt leaves the old ones or the new ones, and what the table as a whole has, for the
        next call.
        """
        state = self.tables[table]
        own = self.inner.state.get(state.weight, {})
        keys = {row.key for row in state.layout.rows}
        kept = {key: value for key, value in own.items() if key not in keys}
        for row, tensor in zip(state.layout.rows, rows, strict=True):
            if state.begun or row.key in state.layout.born:
                kept[row.key] = tensor
        if kept:
            self.inner.state[weight] = kept
        state.left_behind |= state.unapplied
        state.weight = weight
        state.lent = lent
        state.stepped = False
        state.unapplied = False
        state.unused = False
        self._put([other.lent for other in self.tables.values()])
        current = {id(other.weight) for other in self.tables.values()}
        for gone in [parameter for parameter in self.inner.state if id(parameter) not in current]:
            del self.inner.state[gone]
        if lent.requires_grad:
            lent.register_post_accumulate_grad_hook(
                functools.partial(_note_gradient, weakref.ref(state))
            )

    def changed(self, table: HostEmbedding) -> list[torch.Tensor | None] | None:
        """Row-wise state of the batch after a step, None for what the optimizer does not keep yet; None as a whole without a step.

        Raises:
            ArgumentError: The optimizer keeps something that it did not keep when it was tried.
        """
        state = self.tables[table]
        if not state.stepped:
            return None
        own = self.inner.state.get(state.weight, {})
        keys = {row.key for row in state.layout.rows}
        if unknown := set(own) - keys - state.layout.tables:
            raise ArgumentError(
                f"{type(self.inner).__name__} keeps {sorted(unknown)}, which it did not keep when it was tried on a small table"
            )
        state.begun = True
        return [
            self._checked(own.get(row.key), row, len(state.weight)) for row in state.layout.rows
        ]

    def release(self, table: HostEmbedding) -> None:
        """The batch's rows have gone: keep what is one for the table."""
        none = torch.empty(
            0, table.embedding_dim, dtype=self.tables[table].weight.dtype, device="cpu"
        )
        empty = [
            torch.empty(0, *row.row_shape, dtype=TORCH[row.dtype], device="cpu")
            for row in self.tables[table].layout.rows
        ]
        weight = nn.Parameter(none)
        self._switch(table, weight, weight, empty)

    def _checked(self, value: torch.Tensor | None, row: RowState, n: int) -> torch.Tensor | None:
        if value is not None and (tuple(value.shape), NUMPY.get(value.dtype)) != (
            (n, *row.row_shape),
            row.dtype,
        ):
            raise ArgumentError(
                f"{type(self.inner).__name__} keeps {row.key!r} of shape {tuple(value.shape)}, {value.dtype}; "
                f"expected {(n, *row.row_shape)}, {row.dtype}, as when it was tried on a small table"
            )
        return value


def _note_gradient(state: weakref.ref[TableState], weight: torch.Tensor) -> None:
    """A gradient has been added.

    The garbage collector cannot see what a hook holds, so it holds nothing.
    """
    if (found := state()) is None:
        return
    if found.lent is weight:
        found.unapplied = found.unused = True
    else:
        # backward() of a loss that was kept: its rows have gone.
        found.left_behind = True


def _groups(tables: Iterable[HostEmbedding | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups, each with a list of tables."""
    if not isinstance(tables, (HostEmbedding, Iterable)):
        raise ArgumentError(
            f"tables={tables!r}: expected HostEmbeddings, or parameter groups of them"
        )
    given = [tables] if isinstance(tables, HostEmbedding) else list(tables)
    if not given:
        raise ArgumentError("tables is empty; expected HostEmbeddings, or parameter groups of them")
    if all(isinstance(table, HostEmbedding) for table in given):
        groups: list[dict[str, Any]] = [{"params": given}]
    else:
        try:
            groups = [dict(group) for group in given]  # type: ignore[arg-type]
            for group in groups:
                params = group["params"]
                group["params"] = [params] if isinstance(params, HostEmbedding) else list(params)
        except (KeyError, TypeError, ValueError):
            kinds = ", ".join(sorted({type(table).__name__ for table in given}))
            raise ArgumentError(
                f'tables: got {kinds}; expected HostEmbeddings, or parameter groups: [{{"params": [table], "lr": 0.1}}, ...]'
            ) from None
    every = [table for group in groups for table in group["params"]]
    if len(set(map(id, every))) < len(every):
        raise ArgumentError("a table stands twice among the tables; give each once")
    return groups


def _check_table(table: Any) -> None:
    if not isinstance(table, HostEmbedding):
        raise ArgumentError(
            f"tables: got {type(table).__name__}; expected HostEmbeddings (other parameters need an optimizer of their own)"
        )
    if not table.trainable or not table.store.writable:
        why = (
            "frozen; expected one that can be trained: from_pretrained(..., freeze=False), or requires_grad_()"
            if not table.trainable
            else f"in a read-only store ({table.store!r}); expected one that can be written: a file opened with mode='r+', "
            "or an array with memory for each element"
        )
        raise ArgumentError(f"{table.name} is {why}")


def _own(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _kind(table: HostEmbedding) -> tuple[int, torch.dtype]:
    return table.embedding_dim, TORCH[np.dtype(table.store.dtype)]


def _stores(
    table: HostEmbedding,
    layout: StateLayout,
    make: StateStore,
    undo: contextlib.ExitStack,
    found: list[str],
) -> list[Store]:
    """A store for each row-wise state, with what a row begins with.

    Args:
        table: The table.
        layout: What there is.
        make: Makes a store.
        undo: Removes the files that were made.
        found: Descriptions of the files that were there already are added; they stay as they are.
    """
    stores: list[Store] = []
    for row in layout.rows:
        shape = (table.store.n_rows, *row.row_shape)
        path = _path_beside(table, row.key) if make is _beside else None
        if path is not None and os.path.lexists(path) and not table.overwrite:
            stores.append(open_created(path, shape, row.dtype))
            undo.callback(stores[-1].close)
            found.append(f"state {row.key!r} of {table.name}: {path}")
            continue
        store = make(table, row.key, shape, row.dtype)
        if make is _beside:
            undo.callback(_remove, store)
        if (
            (store.n_rows, *store.row_shape) != shape
            or store.dtype != row.dtype
            or not store.writable
        ):
            raise StoreError(
                f"state {row.key!r} of {table.name}: a store of shape {(store.n_rows, *store.row_shape)}, {store.dtype}; "
                f"expected {shape}, {row.dtype}, writable"
            )
        if row.initial != 0 or make is not _beside:
            _begin(store, row, table.store)
        stores.append(store)
    return stores


def _remove(store: Store) -> None:
    """Close a store that was made here, and remove its file: it would be refused at the next attempt."""
    store.close()
    if isinstance(store, MmapStore):
        os.remove(store.paths[0])


def _begin(store: Store, row: RowState, weights: Store) -> None:
    """Fill state piece by piece."""
    for start, stop in row_chunks(store):
        rows = np.arange(start, stop)
        if row.initial is None:
            values = np.empty((len(rows), *weights.row_shape), weights.dtype)
            weights.gather(rows, values)
            store.scatter(rows, values.astype(store.dtype))
        else:
            store.scatter(rows, np.full((len(rows), *store.row_shape), row.initial, store.dtype))


def _beside(table: HostEmbedding, key: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Store:
    """A store of zeros of the kind that the table's is."""
    store, beside = table.store, _path_beside(table, key)
    if beside is not None:
        return MmapStore.create(beside, shape, dtype, overwrite=table.overwrite)
    return PinnedStore.zeros(shape, dtype, pin=isinstance(store, PinnedStore) and store.page_locked)


def _path_beside(table: HostEmbedding, key: str) -> pathlib.Path | None:
    """The file for state of a table that is in a file; None for one that is in memory."""
    if not isinstance(table.store, MmapStore):
        return None
    path = pathlib.Path(table.store.paths[0])
    return path.with_name(f"{path.stem}.{key}.npy")
