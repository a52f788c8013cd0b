"""What files state about their numbers beside them: attributes of netCDF, masks of AnnData."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pinfeed.errors import StoreError

AS_STORED = "give as_stored=True to HDF5Store or ZarrStore"
"""Advice for numbers that a store refuses, because they do not mean what they say."""
# Attributes of the CF conventions and of MATLAB that change what the stored numbers mean.
_ATTRIBUTES = (
    *("scale_factor", "add_offset", "_FillValue", "missing_value"),
    *("valid_min", "valid_max", "valid_range", "_Unsigned", "MATLAB_empty"),
)
# Values of these attributes that change nothing.
_NEUTRAL = {"scale_factor": 1, "add_offset": 0, "_Unsigned": "false", "MATLAB_empty": 0}
# NaN as text in the attributes of Zarr arrays. xarray writes the second, its bytes in base64.
_NAN_TEXTS = ("NaN", "AAAAAAAA+H8=")


def require_plain_numbers(attributes: Mapping[str, Any], dtype: np.dtype[Any], label: str) -> None:
    """Check that no attribute changes what the stored numbers of an array mean.

    Raises:
        StoreError: If one does.
    """
    present = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    found = [f"{name}={one}" for name, one in present.items() if _changes(name, one, dtype)]
    if found:
        raise StoreError(
            f"{label}: attributes change what its stored numbers mean: {', '.join(found)}; "
            f"expected plain numbers; {AS_STORED}, and convert the numbers in device_transform"
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


def require_no_missing(group: Any, label: str) -> None:
    """Check that no number of a nullable column of AnnData is missing.

    Args:
        group: The group of h5py or zarr that contains the numbers.
        label: Name of the numbers in errors.

    Raises:
        StoreError: If the mask of the group marks a number.
    """
    if nullable_values(group) is None:
        return
    n_missing = int(np.count_nonzero(group["mask"][...]))
    if n_missing:
        raise StoreError(
            f"{label} has {n_missing:,} missing values, which {group.name.lstrip('/')}/mask "
            f"marks; expected none; {AS_STORED}, and the mask as a second source"
        )
