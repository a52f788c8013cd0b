"""The nested structure of a batch: tuples, lists, dicts, named tuples and dataclasses.

Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Rebuild = Callable[[Iterator[Any]], Any]

# Types whose objects have no ``to`` and are created from their contents alone.
_PLAIN = (tuple, list, dict)


def flatten(
    value: Any, path: str = "", *, is_leaf: Callable[[Any], bool] = lambda value: False
) -> tuple[list[tuple[str, Any]], Rebuild]:
    """Flatten a nested structure into its leaves.

    An object with its own ``to`` method is a leaf, because it can move itself to a device.

    Args:
        value: The structure.
        path: Prefix of the paths.
        is_leaf: Returns whether a dataclass is a leaf.

    Returns:
        The leaves, each with its path (``"[0]['x'].y"``), and a function that builds the structure
        from new leaves.
    """
    leaves: list[tuple[str, Any]] = []
    return leaves, _flatten(value, path, is_leaf, leaves)


def _flatten(
    value: Any, path: str, is_leaf: Callable[[Any], bool], leaves: list[tuple[str, Any]]
) -> Rebuild:
    """Add the leaves of a structure to ``leaves``; return the function that builds it again."""
    children = _children(value, is_leaf)
    if children is None:
        leaves.append((path, value))
        return next
    parts = [_flatten(child, path + name, is_leaf, leaves) for name, child in children]
    make = _maker(value)
    return lambda new: make([rebuild(new) for rebuild in parts])


def _children(value: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]] | None:
    kind = type(value)
    if kind not in _PLAIN:
        # Most values that are not plain are tensors, so this check is first.
        if callable(getattr(value, "to", None)):
            return None
        if dataclasses.is_dataclass(value) and is_leaf(value):
            return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", child) for name, child in zip(value._fields, value, strict=True)]
    if isinstance(value, (tuple, list)):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if kind is dict or isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{name}", getattr(value, name)) for name in _fields(value)]
    return None


def _fields(value: Any) -> list[str]:
    """Return the names of a dataclass's fields that are set."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _maker(value: Any) -> Callable[[list[Any]], Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind
    if kind is dict:
        keys = list(value)
        return lambda new: dict(zip(keys, new, strict=True))
    if isinstance(value, dict):
        return lambda new: _filled(copy.copy(value), zip(value, new, strict=True))
    if isinstance(value, Mapping):
        return lambda new: _like(value, dict(zip(value, new, strict=True)))
    if isinstance(value, list):
        return lambda new: _filled(copy.copy(value), [(slice(None), new)])
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return lambda new: value._make(new)
    if isinstance(value, tuple):
        return lambda new: _like(value, tuple(new))
    names = _fields(value)
    return lambda new: _with_fields(copy.copy(value), names, new)


def _filled(target: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Replace the values of a copy, which keeps extras of a subclass, such as a default factory."""
    for key, value in items:
        target[key] = value
    return target


def _like(value: Any, contents: Any) -> Any:
    """Return ``contents`` in the type of ``value``, if the type can be created from them alone."""
    try:
        return type(value)(contents)
    except (TypeError, ValueError):
        return contents


def _with_fields(target: Any, names: list[str], values: list[Any]) -> Any:
    """Replace fields of a copy, which keeps the fields that ``__init__`` does not take.

    ``object.__setattr__`` also works for frozen dataclasses.
    """
    for name, value in zip(names, values, strict=True):
        object.__setattr__(target, name, value)
    return target
