"""Checks of the arguments of embedding tables, and advice for arguments that do not exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pinfeed.errors import RowIndexError, described
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
