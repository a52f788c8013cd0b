"""Attributes, masks and missing parts of files that change what stored numbers mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pinfeed.errors import StoreError

# Attributes of the CF conventions and of MATLAB that change what the stored numbers mean.
_ATTRIBUTES = (
    *("scale_factor", "add_offset", "_FillValue", "missing_value"),
    *("valid_min", "valid_max", "valid_range", "_Unsigned", "MATLAB_empty"),
)
# Values of these attributes that change nothing.
_NEUTRAL = {"scale_factor": 1, "add_offset": 0, "_Unsigned": "false", "MATLAB_empty": 0}
# NaN as text in the attributes of Zarr arrays. xarray writes the second, its bytes in base64.
_NAN_TEXTS = ("NaN", "AAAAAAAA+H8=")


def require_plain_numbers(
    attributes: Mapping[str, Any],
    dtype: np.dtype[Any],
    label: str,
    *,
    column: Any = None,
    missing: str = "",
) -> None:
    """Check that the stored numbers of an array of h5py or zarr mean what they say.

    Args:
        attributes: Attributes of the array.
        dtype: Dtype of the array.
        label: Name of the array in errors.
        column: The group of the array, if it may be a nullable column of AnnData.
        missing: Part of the array in whose place its library returns other numbers; empty if all
            parts exist.

    Raises:
        StoreError: If an attribute changes what the numbers mean, or if a mask or a missing part
            means that numbers are missing.
    """
    present = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    found = [f"{name}={one}" for name, one in present.items() if _changes(name, one, dtype)]
    todo = "and convert the numbers in device_transform"
    if found:
        problem = f"attributes change what its numbers mean: {', '.join(found)}"
    elif missing:
        problem = f"its library returns other numbers in the place of {missing}"
        todo = "to read these"
    elif column is not None and nullable_values(column) is not None and np.any(column["mask"][...]):
        problem = "its mask of AnnData marks missing values"
        todo = "and the mask as a second source"
    else:
        return
    raise StoreError(
        f"{label}: {problem}; expected plain numbers, all of them; give as_stored=True to the "
        f"HDF5Store or ZarrStore, {todo}"
    )


def _changes(name: str, value: Any, dtype: np.dtype[Any]) -> bool:
    if name in ("_FillValue", "missing_value"):
        is_nan = value in _NAN_TEXTS if isinstance(value, str) else np.all(value != value)
        return not (is_nan and dtype.kind in "fcV")
    return bool(np.any(value != _NEUTRAL.get(name)))


def nullable_values(group: Any) -> Any:
    """Return the numbers of a nullable column that AnnData wrote as a group; else None."""
    kind = str(group.attrs.get("encoding-type", ""))
    return group["values"] if kind in ("nullable-integer", "nullable-boolean") else None
