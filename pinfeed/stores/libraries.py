"""Libraries of file formats: their imports, their errors, and what their numbers mean."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
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


def missing_part(dataset: Any) -> str:
    """Return which part of a dataset does not exist; empty if HDF5 hides no missing part.

    HDF5 returns the fill value for a source of a virtual dataset that it cannot open, zeros after
    the end of an external file, and anything for chunks that were never written, if the dataset has
    no fill value. In files of netCDF, the fill value of these chunks stands for missing numbers.
    HDF5 reports external files that do not exist.
    """
    if dataset.is_virtual:
        # A source may have several parts.
        sources = {(part.file_name, part.dset_name) for part in dataset.virtual_sources()}
        missing = (f"{path}:{name}" for path, name in sources if not _exists(dataset, path, name))
        return next((f"the source {source} of the dataset" for source in missing), "")
    access = dataset.id.get_access_plist()
    left = dataset.nbytes
    for path, offset, nbytes in dataset.external or ():
        place = os.path.join(os.fsdecode(access.get_efile_prefix()), path)
        nbytes = min(nbytes, left)
        left -= nbytes
        if os.path.exists(place) and os.path.getsize(place) < offset + nbytes:
            return f"the end of the external file {place}"
    is_whole = dataset.external or _has_fill_value(dataset) or _is_written(dataset)
    return "" if is_whole else "chunks that were never written"


def _exists(dataset: Any, path: str, name: str) -> bool:
    """Return whether HDF5 finds a source of a virtual dataset, with all of its parts."""
    import h5py

    folder = os.path.dirname(os.path.abspath(os.fsdecode(dataset.file.filename)))
    given = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())
    prefixes = [*os.environ.get("HDF5_VDS_PREFIX", "").split(":"), given, folder, ""]
    # If the folder of an absolute path has moved, HDF5 looks for the name of the file.
    names = dict.fromkeys((path, os.path.basename(path) if os.path.isabs(path) else path))
    for prefix, name_of_file in itertools.product(prefixes, names):
        place = os.path.join(prefix.replace("${ORIGIN}", folder), name_of_file)
        own = contextlib.nullcontext(dataset.file)
        # If h5py cannot open a file, HDF5 cannot do so, either.
        with contextlib.suppress(OSError), own if path == "." else h5py.File(place, "r") as file:
            if name in file:
                return not missing_part(file[name])
    return False


def _has_fill_value(dataset: Any) -> bool:
    """Return whether HDF5 fills chunks that were never written, with a value that is a number."""
    from h5py import h5d

    properties = dataset.id.get_create_plist()
    is_defined = properties.fill_value_defined() != h5d.FILL_VALUE_UNDEFINED
    # In files of netCDF, the fill value stands for missing numbers.
    is_number = "_NCProperties" not in dataset.file.attrs
    return bool(is_defined and is_number and properties.get_fill_time() != h5d.FILL_TIME_NEVER)


def _is_written(dataset: Any) -> bool:
    """Return whether the file contains all chunks of a dataset."""
    if dataset.chunks is None:
        return bool(dataset.id.get_storage_size() >= dataset.nbytes)
    pairs = zip(dataset.shape, dataset.chunks, strict=True)
    n_chunks = math.prod(-(-size // chunk) for size, chunk in pairs)
    return bool(dataset.id.get_num_chunks() >= n_chunks)
