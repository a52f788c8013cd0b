"""Checks of functions that the user gives."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from pinfeed.errors import ArgumentError


def check_function(value: Any, name: str) -> None:
    """Raise ArgumentError unless ``value`` is None, or a function that is no generator function."""
    if value is None:
        return
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise ArgumentError(
            f"{name}={value!r} is a generator function, so each call returns a generator; expected "
            "a function that takes a batch and returns one; replace yield by return"
        )
    if not callable(value):
        raise ArgumentError(
            f"{name}={value!r}: expected a function that takes a batch and returns one; leave it "
            "out to keep batches unchanged"
        )


def takes_generator(function: Any) -> bool:
    """Return whether a function has an unbound parameter named ``generator``."""
    if isinstance(function, functools.partial) and "generator" in function.keywords:
        return False
    # A torch module is called through its method forward.
    target = getattr(function, "forward", function)
    try:
        parameter = inspect.signature(target).parameters.get("generator")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )
