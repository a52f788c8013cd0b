"""Parameter groups of tables, as a RowOptimizer takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.table import HostEmbedding


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


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its tables."""
    return {key: value for key, value in group.items() if key != "params"}


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
