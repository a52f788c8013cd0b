"""The dtypes of rows: those that numpy (with ml_dtypes, for bfloat16) and torch both have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .errors import StoreError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype[Any]] = {"bfloat16": BFLOAT16} | {
    name: np.dtype(name)
    for name in "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128".split()
}
"""By name, which is the same in both."""


def check_dtype(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """``dtype``, in this machine's byte order, if torch has it too.

    Raises:
        StoreError: It has not; the message names ``name`` and says what to do.
    """
    if dtype.names is None and dtype.name in DTYPES:
        return DTYPES[dtype.name]
    if dtype.hasobject:
        todo = "Python objects are never unpickled; save plain numbers"
    elif dtype.names:
        todo = "a structured dtype: save each field as an array of its own and give a dict of them"
    elif dtype.kind in "mM":
        todo = 'dates: convert with .view("int64")'
    else:
        todo = "convert with .astype()"
    raise StoreError(f"{name}: dtype {dtype} has no torch counterpart ({todo}); expected one of {', '.join(sorted(DTYPES))}")
