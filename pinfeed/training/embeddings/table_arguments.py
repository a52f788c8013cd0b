"""The arguments of embedding tables: checks, initializers, and advice for unknown arguments."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, RowIndexError, described
from pinfeed.memory.units import parse_size
from pinfeed.validation.arguments import whole_number

_WEIGHT_HINT = "give the rows to HostEmbedding.from_pretrained(rows, freeze=False)"
_FREEZE_HINT = (
    "give it to HostEmbedding.from_pretrained(rows, freeze=...), or call requires_grad_(False)"
)
_PATH_HINT = "give the file of the rows as store="

HINTS = {
    "sparse": (
        "pinfeed always moves and trains only the rows of a batch; leave it out, and train the "
        "table with pinfeed.RowOptimizer; if the optimizer needs sparse gradients, use "
        'RowOptimizer(..., gradients="sparse")'
    ),
    "device": (
        "the table stays in host memory or in a file; the device of the loop is "
        "train_rows(..., device=...)"
    ),
    "_weight": _WEIGHT_HINT,
    "weight": _WEIGHT_HINT,
    "freeze": _FREEZE_HINT,
    "_freeze": _FREEZE_HINT,
    "mode": "for bags of rows, use HostEmbeddingBag(num_embeddings, embedding_dim, mode=...)",
    "path": _PATH_HINT,
    "filename": _PATH_HINT,
    **dict.fromkeys(
        ("cache", "cache_size", "cache_ratio", "cache_load_factor", "gpu_cache"),
        "give the size of a cache on the device as device_cache=",
    ),
}
"""Advice for arguments of torch or other libraries that HostEmbedding does not have."""


def integer_tensor(values: Any, name: str) -> torch.Tensor:
    """Return integers as a tensor. A tensor is returned unchanged.

    Args:
        values: A tensor, an array or a list.
        name: Name of the values in errors.

    Raises:
        RowIndexError: If the values are not integers, or are lists of different lengths.
    """
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise RowIndexError(
            f"{name}: {described(error)}; expected integers in a tensor, an array or a list"
        ) from None
    # numpy makes an array of floats from an empty list.
    if array.size and array.dtype.kind not in "iu":
        raise RowIndexError(
            f"{name}: a {type(values).__name__} of {array.dtype}; "
            "expected integers in a tensor, an array or a list"
        )
    return torch.from_numpy(array.astype(np.int64))


def checked_padding(padding: int | None, n_rows: int) -> int | None:
    """Return the index of the padding row, at least 0. A negative index counts from the end."""
    if padding is None:
        return None
    note = f" (a row of {n_rows:,})"
    return whole_number(padding, "padding_idx", least=-n_rows, most=n_rows - 1, note=note) % n_rows


DeviceCacheSize = int | float | str
"""Bytes as an int or as text such as ``"4GiB"``, a share of the rows as a float, or ``"auto"``.

``"auto"`` fits the memory limits.
"""


def check_device_cache(size: Any) -> int | float | Literal["auto"] | None:
    """Return the size of a cache as an int, a float or ``"auto"``, or None for no cache.

    Raises:
        ArgumentError: If it is something else, is not above 0, or is a share above 1.
    """
    if size is None:
        return None
    if isinstance(size, str) and size == "auto":
        return "auto"
    is_share = isinstance(size, numbers.Real) and not isinstance(size, numbers.Integral)
    if is_share and 0 < float(size) <= 1:
        return float(size)
    note = ", or a share of the rows as a float above 0 and up to 1.0 (0.1), 'auto' or None"
    return parse_size(size, "device_cache", note=note)


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
