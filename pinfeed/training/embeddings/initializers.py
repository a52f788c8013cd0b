"""Initializers: functions that fill a new table, by their names in torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError

Init = str | Callable[[torch.Tensor], Any]
Fill = Callable[[torch.Tensor], Any]
"""Function that fills a tensor in place."""


def find_initializer(init: Init | None) -> Fill:
    """Return the function that fills a table.

    Args:
        init: Name of a function of ``torch.nn.init``, with or without the final underscore, or a
            user's function. None is ``"normal"``.

    Raises:
        ArgumentError: If no function has this name, or it needs arguments other than a tensor.
    """
    if callable(init):
        return functools.partial(_fill_in_place, init)
    name = "normal" if init is None else str(init).removesuffix("_")
    names = [
        key[:-1]
        for key, value in vars(nn.init).items()
        if key.endswith("_") and not key.startswith("_") and _needs_only_a_tensor(value)
    ]
    if name not in names:
        raise ArgumentError(
            f"init={init!r} is not a function of torch.nn.init with a tensor as its only argument; "
            f"expected one of {', '.join(sorted(names))}, "
            "or a function that fills a tensor (functools.partial(nn.init.constant_, val=0.5))"
        )
    found: Fill = getattr(nn.init, f"{name}_")
    return found


def _fill_in_place(init: Fill, tensor: torch.Tensor) -> None:
    """Call a user's function to fill a tensor.

    Raises:
        ArgumentError: If the function returns a tensor with other memory, which would be lost.
    """
    returned = init(tensor)
    if not isinstance(returned, torch.Tensor):
        return
    if returned.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        raise ArgumentError(
            f"init={init!r} returned a new tensor; expected a function that fills the given tensor "
            "in place; give lambda tensor: tensor.copy_(values), or use "
            "HostEmbedding.from_pretrained(values, freeze=False)"
        )


def _needs_only_a_tensor(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with a tensor as its only argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True
