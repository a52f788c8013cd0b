"""Default and with_options(): keyword options that several public functions share.

A group of options is a ``TypedDict`` with one key per option. A function takes a group as
``**options: Unpack[Group]``, and type checkers then know each key. ``Default`` in the annotation of
a key gives its default::

    class LoopOptions(TypedDict, total=False):
        progress: Annotated[bool, Default(False)]
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Default:
    """Default of an option, as metadata of its annotation."""

    value: Any


def with_options(signature: inspect.Signature, group: Any) -> inspect.Signature:
    """Return ``signature`` with one keyword parameter for each option instead of ``**options``.

    Args:
        signature: Signature of a function that takes ``**options: Unpack[group]``.
        group: ``TypedDict`` whose annotations are ``Annotated[type, Default(value)]``.
    """
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    hints = get_type_hints(group, include_extras=True)
    return signature.replace(parameters=[*own, *(_parameter(*item) for item in hints.items())])


def defaults_of(group: Any) -> dict[str, Any]:
    """Return the default of each option of a group, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {name: _parameter(name, hint).default for name, hint in hints.items()}


def _parameter(name: str, hint: Any) -> inspect.Parameter:
    """Return the keyword parameter of one option."""
    kind, default = get_args(hint)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default.value, annotation=kind
    )
