"""Loops that nobody can go on with, because only an error's traceback keeps them.

In a notebook, the traceback of the last error is kept, with every frame that it went through, and
these keep the iterators of their loops. Such a frame has ended: it never asks for the next batch.
"""

from __future__ import annotations

import gc
import sys
import weakref
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

_KEPT_FOR_OTHERS = (GeneratorType, FunctionType, CellType, dict, tuple)


def is_abandoned(iterator: weakref.ref[Any]) -> bool:
    """Whether nothing holds an iterator but frames that have ended, and objects that only they hold, such as ``tqdm(iterator)``.

    It looks at all objects of the process, which takes some tenths of a second: ask before an
    error, not in a loop.
    """
    if sys.version_info < (3, 11):
        # There, a frame that waits for its turn cannot be told from one that has ended.
        return False
    gc.collect()
    alone = object()
    n_here = sys.getrefcount(alone)
    todo, known = [one for one in [iterator()] if one is not None], set()
    while todo:
        held, holder = todo.pop(), None
        holders = gc.get_referrers(held)
        n_found = 0
        for holder in holders:
            n_found += [*map(id, gc.get_referents(holder))].count(id(held))
        # Frames that run hold objects without being found.
        if sys.getrefcount(held) - n_here != n_found:
            return False
        for holder in holders:
            if isinstance(holder, FrameType):
                continue
            if not (isinstance(holder, _KEPT_FOR_OTHERS) or _is_builtin_iterator(holder)):
                return False
            if id(holder) not in known:
                known.add(id(holder))
                todo.append(holder)
        del held, holder, holders
    return True


def _is_builtin_iterator(holder: Any) -> bool:
    return hasattr(holder, "__next__") and type(holder).__module__ in ("builtins", "itertools")
