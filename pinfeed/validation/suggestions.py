"""Suggestions for what to give instead of an object or file that pinfeed cannot read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from numbers import Number
from typing import Any

_COPY = (
    "copy it in pieces into pinfeed.MmapStore.create(path, shape, dtype), "
    "as shown under 'Other files' in the guide, or write a Store for it"
)
_LOADER = "give pinfeed.wrap_loader(DataLoader(dataset, batch_size=...))"
_FEEDER = "it is a feeder already: iterate it"

_BY_TYPE = {
    ("pandas", "Series"): "give series.to_numpy()",
    ("pandas", "Index"): "give index.to_numpy()",
    ("polars", "LazyFrame"): "compute it, and give frame.collect()",
    ("polars", "Series"): "give series.to_arrow()",
    ("zarr", "Group"): "give a dict of its arrays, dict(group.arrays())",
    ("cupy", "ndarray"): "it is on the GPU already: index it, or give array.get()",
    ("torch", "TensorDataset"): "give dataset.tensors",
    ("torch", "DataLoader"): "give pinfeed.wrap_loader(loader)",
    ("pinfeed", "HostEmbedding"): "give table.store",
    ("torch", "Module"): "give its parameter as a tensor on the CPU, or see pinfeed.HostEmbedding",
    ("datasets", "IterableDataset"): _LOADER,
    ("pinfeed", "RowDataset"): "give the source that it was made of",
    ("pinfeed", "Feeder"): _FEEDER,
    ("pinfeed", "LoaderFeeder"): _FEEDER,
    ("pinfeed", "ReaderFeeder"): _FEEDER,
    ("pinfeed", "Restartable"): _FEEDER,
    ("torch", "Dataset"): _LOADER,
}
"""Advice by the package and the name of a type; the first that fits counts."""

_ZIP = "a zip archive"
_KINDS = {
    b"PK\x03\x04": (
        _ZIP,
        (
            "of a .npz save each array alone, np.save(name, np.load(path)[name]); "
            "of torch.save, np.save(name, tensor.numpy())"
        ),
    ),
    b"\x80": ("a pickle", "load it where you trust it, and save plain arrays with np.save"),
    b"\x89HDF": ("an HDF5 file", "give pinfeed.HDF5Store(path, name), with the name of a dataset"),
    b"PAR1": (
        "a Parquet file",
        "give pinfeed.ParquetStore.columns(path), or a path that ends with .parquet",
    ),
    b"ARROW1": (
        "an Arrow file",
        "give pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all(), which stays on the disk",
    ),
    b"\x1f\x8b": ("a file that gzip compressed", "decompress it"),
    b"(\xb5/\xfd": ("a file that zstd compressed", "decompress it"),
    b"\xff\xd8\xff": (
        "a JPEG image",
        "read it with wrap_readers, or save decoded images with np.save",
    ),
    b"\x89PNG": ("a PNG image", "read it with wrap_readers, or save decoded images with np.save"),
}
"""Kinds of files by their first bytes, with advice."""
_TORCH = (
    "a file of torch.save",
    (
        "load it with torch.load(path, weights_only=True), "
        "and give the tensor or save np.save(name, tensor.numpy())"
    ),
)
_TEXT = (
    "a table as text",
    "give pyarrow.csv.read_csv(path), or save np.save(name, np.loadtxt(path, delimiter=','))",
)
_SUFFIXES = {
    ".npz": ("a .npz archive", "save each array alone, np.save(name, np.load(path)[name])"),
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".safetensors": (
        "a safetensors file",
        "give pinfeed.MmapStore.safetensors(path, name), with the name of a tensor",
    ),
    ".csv": _TEXT,
    ".tsv": _TEXT,
    ".json": ("JSON", "save its numbers as an array, np.save(name, np.array(json.load(file)))"),
    ".jsonl": ("JSON by lines", "give pyarrow.json.read_json(path), a table in memory"),
    ".h5": _KINDS[b"\x89HDF"],
    ".hdf5": _KINDS[b"\x89HDF"],
    ".zarr": ("a Zarr array", "give pinfeed.ZarrStore(path), or ZarrStore(path, name) of a group"),
}
"""Kinds of files by the end of their names, where that says more than their first bytes."""


def is_array_like(value: Any) -> bool:
    """Return whether a value has rows by index, as arrays of unknown libraries have."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def of_object(value: Any) -> str:
    """Return advice on what to give instead of an object that is no source."""
    kinds = [(kind.__module__.split(".")[0], kind.__name__) for kind in type(value).__mro__]
    if isinstance(value, type):
        return f"{value.__name__} is a class: give an object of it"
    if found := next((hint for key, hint in _BY_TYPE.items() if key in kinds), None):
        return found
    if any(package == "scipy" for package, _ in kinds):
        return (
            "a sparse matrix has no dense rows: give matrix.toarray() where that fits into memory"
        )
    if isinstance(value, (Number, range)):
        return "numbers in a list are given as np.asarray(list)"
    if isinstance(value, Iterator):
        return (
            "an iterator gives its rows once: "
            "give np.stack(list(rows)) of rows, or pinfeed.wrap_loader(list) of batches"
        )
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "a path is a str; raw numbers are given as np.frombuffer(data, dtype)"
    if is_array_like(value):
        return _COPY
    if isinstance(value, (list, tuple)):
        return (
            "rows in a list are given as np.asarray(list), rows that are arrays as np.stack(list)"
        )
    if isinstance(value, (Set, deque)):
        return "give np.stack(list(rows)) where these are rows"
    if (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, Mapping)
    ):
        return f"samples by index are a Dataset: {_LOADER}"
    return "several of these go into a tuple, a list or a dict"


def of_file(path: str, start: bytes = b"") -> tuple[str, str] | None:
    """Return the kind of a file that is no .npy file, with advice; None if it is unknown.

    Args:
        path: Path of the file.
        start: First bytes of the file.
    """
    by_start = next((found for magic, found in _KINDS.items() if start.startswith(magic)), None)
    by_name = _SUFFIXES.get(os.path.splitext(path)[1].lower())
    if by_start is None or (by_start[0] == _ZIP and by_name is not None):
        return by_name
    return by_start
