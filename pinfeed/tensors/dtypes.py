"""Dtypes of rows: the dtypes that both numpy (with ml_dtypes for bfloat16) and torch have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pinfeed.errors import StoreError, described

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

_NAMES = (
    "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 "
    "complex128 bool"
)
DTYPES: dict[str, np.dtype[Any]] = {"bfloat16": BFLOAT16} | {
    name: np.dtype(name) for name in _NAMES.split()
}
"""Dtypes by name, which numpy and torch share."""
_NATIVE = frozenset(DTYPES.values())


def dtype_of(value: Any, name: str) -> np.dtype[Any]:
    """Return the dtype that ``value`` names.

    Args:
        value: A dtype of torch, ``"bfloat16"``, or anything but None that numpy accepts as a dtype.
        name: Name of the source in error messages.

    Raises:
        StoreError: If numpy or torch has no such dtype.
    """
    return check_dtype(numpy_dtype_of(value, name), name)


def numpy_dtype_of(value: Any, name: str) -> np.dtype[Any]:
    """Return the dtype that ``value`` names, in its byte order, even if torch does not have it.

    The arguments are those of ``dtype_of``.

    Raises:
        StoreError: If numpy has no such dtype.
    """
    # torch is not imported here, because a value that is a dtype of torch has imported it.
    kind = type(value)
    spelled: Any = value
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        spelled = str(value).removeprefix("torch.")
    if isinstance(spelled, str) and spelled in DTYPES:
        return DTYPES[spelled]
    try:
        # numpy takes None for float64.
        if spelled is None:
            raise TypeError("None is not a dtype")
        dtype: np.dtype[Any] = np.dtype(spelled)
    except (TypeError, ValueError, SyntaxError) as error:
        raise StoreError(
            f"{name}: dtype={value!r} is unknown ({described(error)}); "
            f"expected one of {', '.join(sorted(DTYPES))}"
        ) from None
    return dtype


def check_dtype(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """Return ``dtype`` in this machine's byte order.

    Raises:
        StoreError: If torch does not have the dtype; the message says what to do.
    """
    # The name of a dtype takes longer to make.
    if dtype in _NATIVE:
        return dtype
    if dtype.names is None and dtype.name in DTYPES:
        return DTYPES[dtype.name]
    if dtype.hasobject:
        todo = (
            "Python objects are never unpickled; give plain numbers, np.stack(list(array)) if "
            "each object is a row"
        )
    elif dtype.names:
        todo = "a structured dtype: save each field as a separate array, and give a dict of them"
    elif dtype.kind in "mM":
        todo = 'dates: convert with .view("int64")'
    elif dtype.kind in "SUT":
        todo = "text: convert it, np.unique(array, return_inverse=True)[1]"
    else:
        todo = "convert with .astype()"
    raise StoreError(
        f"{name}: dtype {dtype} has no torch counterpart ({todo}); "
        f"expected one of {', '.join(sorted(DTYPES))}"
    )
