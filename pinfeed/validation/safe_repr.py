"""A decorator for ``__repr__``, which must not raise while a debugger shows a broken object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def safe_repr(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a ``__repr__`` that never raises of a method that may.

    An object that is half made or broken shows the name of its class.
    """

    @functools.wraps(describe)
    def shown(self: Any) -> str:
        try:
            return describe(self)
        except Exception:
            return f"<{type(self).__name__}>"

    return shown
