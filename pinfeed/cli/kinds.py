"""kind_of(): the format of a file or folder, by what is in it."""

from __future__ import annotations

import glob
import os

from pinfeed.errors import FileMissing, StoreError
from pinfeed.stores.npy_header import MAGIC, strange
from pinfeed.stores.paths import pattern_hint, require_regular

_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZARR = ("zarr.json", ".zarray", ".zgroup")
_SUFFIXES = {
    ".npy": "npy",
    ".h5": "hdf5",
    ".h5ad": "hdf5",
    ".hdf5": "hdf5",
    ".parquet": "parquet",
    ".safetensors": "safetensors",
}
"""Kinds of files whose first bytes are damaged, so that the library of the kind explains it."""


def split_name(text: str) -> tuple[str, str | None]:
    """Return the path and the name in FILE:NAME; the name is None for FILE alone.

    A path may contain colons, so the path is the shortest one that exists.
    """
    # A shell completes the name of a folder with a slash.
    parts = text.rstrip("/").split(":")
    for n in range(1, len(parts)):
        path = ":".join(parts[:n])
        if path and (os.path.exists(path) or glob.glob(path)):
            return path, ":".join(parts[n:])
    return text.rstrip("/") or text, None


def kind_of(path: str) -> str:
    """Return ``npy``, ``hdf5``, ``zarr``, ``parquet``, ``safetensors`` or ``folder``.

    Args:
        path: A file, a folder, or a pattern, whose first file counts.

    Raises:
        FileMissing: If there is no such file.
        StoreError: If the file has another format.
    """
    if not os.path.exists(path):
        matches = sorted(glob.glob(path))
        if not matches:
            raise FileMissing(f"{path}: no such file (looked in {os.getcwd()}){pattern_hint(path)}")
        path = matches[0]
    if os.path.isdir(path):
        names = os.listdir(path)
        if any(name in names for name in _ZARR) or path.endswith(".zarr"):
            return "zarr"
        # Names of logs and of unfinished files begin with these characters.
        seen = [name for name in names if not name.startswith((".", "_"))]
        is_parquet = seen and all(_is_of_parquet(path, name) for name in seen)
        return "parquet" if is_parquet else "folder"
    require_regular(path)
    return _kind_of_file(path)


def _is_of_parquet(folder: str, name: str) -> bool:
    """Return whether this is a Parquet file, or a folder key=value of a partitioned data set."""
    is_key = "=" in name and os.path.isdir(os.path.join(folder, name))
    return is_key or name.lower().endswith(".parquet")


def _kind_of_file(path: str) -> str:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(16)
        if start.startswith(MAGIC):
            return "npy"
        if start.startswith(b"PAR1"):
            return "parquet"
        # Other data may precede the content of an HDF5 file, as in .mat files.
        offset = 0
        while offset < size:
            file.seek(offset)
            if file.read(len(_HDF5)) == _HDF5:
                return "hdf5"
            offset = max(512, 2 * offset)
    # The length of a header, which is an object of JSON.
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size:
        return "safetensors"
    if not start or (kind := _SUFFIXES.get(os.path.splitext(path)[1].lower())) is None:
        raise StoreError(strange(path, start))
    return kind
