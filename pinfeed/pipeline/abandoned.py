"""is_abandoned: detects loops that cannot continue, because only an error's traceback keeps them.

A notebook keeps the traceback of the last error, with every frame that the error passed through.
These frames keep the iterators of their loops. They have ended, so they never request another
batch.
"""

from __future__ import annotations

import gc
import sys
import weakref
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

# Types of objects that are kept only because another object needs them.
_KEPT_FOR_OTHERS = (GeneratorType, FunctionType, CellType, dict, tuple)


def is_abandoned(iterator: weakref.ref[Any]) -> bool:
    """Return whether only frames that have ended hold an iterator, directly or through others.

    Other objects that only such frames hold, such as ``tqdm(iterator)``, may hold it as well. The
    search looks at all objects of the process, which takes some tenths of a second. Therefore, call
    it before an error is raised, not in a loop.
    """
    if sys.version_info < (3, 11):
        # These versions cannot distinguish a suspended frame from one that has ended.
        return False
    gc.collect()
    alone = object()
    n_references_here = sys.getrefcount(alone)
    todo = [one for one in [iterator()] if one is not None]
    known = set()
    while todo:
        held = todo.pop()
        holder = None
        holders = gc.get_referrers(held)
        n_found = 0
        for holder in holders:
            n_found += [*map(id, gc.get_referents(holder))].count(id(held))
        # gc does not find the references of a running frame.
        if sys.getrefcount(held) - n_references_here != n_found:
            return False
        for holder in holders:
            if isinstance(holder, FrameType):
                continue
            if not (isinstance(holder, _KEPT_FOR_OTHERS) or _is_builtin_iterator(holder)):
                return False
            if id(holder) not in known:
                known.add(id(holder))
                todo.append(holder)
        # These names would count as references to the next object.
        del held, holder, holders
    return True


def _is_builtin_iterator(holder: Any) -> bool:
    return hasattr(holder, "__next__") and type(holder).__module__ in ("builtins", "itertools")
