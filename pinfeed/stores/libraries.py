"""Libraries of file formats: their imports, their errors, and what their numbers mean."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, PinfeedError, StoreError, described
from pinfeed.validation.suggestions import install_line


def imported(name: str, place: str, release: str = "") -> Any:
    """Return a module of an optional library.

    Args:
        name: Name of the module.
        place: The file, store or column that needs it, for the error.
        release: Oldest release of the library, if older ones fail.

    Raises:
        MissingDependency: If it is not.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        needed = f"{package}{release} is needed; {install_line(package)}"
        raise MissingDependency(f"{place}: {needed}") from error


def is_of(value: Any, library: str, *names: str) -> bool:
    """Return whether an object is of one of some classes of a library, which is not imported."""
    # If a library is not loaded, no object can be of its classes.
    module = sys.modules.get(library)
    return module is not None and isinstance(value, tuple(getattr(module, one) for one in names))


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the names that an error lists, and the number of those that it does not."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + more


def and_more(first: str, n: int) -> str:
    """Return the name of the first of ``n`` files or stores, and the number of the others."""
    return f"{first} and {n - 1} more" if n > 1 else first


def check_names(names: Sequence[Any], place: str, advice: str) -> None:
    """Check that a table has columns with different names.

    Raises:
        StoreError: If several columns have the same name.
    """
    if len(set(names)) < len(names):
        raise StoreError(
            f"{place}: several columns have the same name: {', '.join(map(str, names))}; {advice}"
        )


@contextlib.contextmanager
def library_errors(place: str, library: str, expected: str) -> Iterator[None]:
    """Raise any error of a library that opens a file as ``StoreError``, with its cause.

    Libraries raise errors of many kinds for damaged files, most of them without the path.

    Args:
        place: The file, and the dataset or column, as the user named them.
        library: Name of the library.
        expected: End of the message: what is expected, and what to do.
    """
    try:
        yield
    except PinfeedError:
        raise
    except Exception as error:
        raise StoreError(
            f"{place}: {library} cannot open it ({described(error)}); expected {expected}"
        ) from error


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
