"""Suggestions to replace an object or file that pinfeed cannot read, or to install a package."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from numbers import Number
from typing import Any

_COPY = (
    "copy it in pieces into pinfeed.NpyStore.create(path, shape, dtype), "
    "as shown under 'Data of other libraries' in the guide, or write a Store for it"
)
_LOADER = "give pinfeed.wrap_loader(DataLoader(dataset, batch_size=...))"

_BY_TYPE = {
    ("pandas", "Series"): "give series.to_numpy()",
    ("polars", "LazyFrame"): "compute it, and give frame.collect()",
    ("polars", "Series"): "give series.to_arrow()",
    ("anndata", "AnnData"): "give pinfeed.SparseStore(adata.X), or adata.X if it is dense",
    ("zarr", "Group"): "give a dict of its arrays, dict(group.arrays())",
    ("cupy", "ndarray"): "it is already on the GPU; index it, or give array.get()",
    ("torch", "TensorDataset"): "give dataset.tensors",
    ("torch", "DataLoader"): "give pinfeed.wrap_loader(loader)",
    ("pinfeed", "HostEmbedding"): "give table.store",
    ("torch", "Module"): "give its parameter as a tensor on the CPU, or see pinfeed.HostEmbedding",
    ("datasets", "IterableDataset"): _LOADER,
    ("pinfeed", "RowDataset"): "give the source of the dataset",
    ("pinfeed", "BaseFeeder"): "it is already a feeder; iterate it",
    ("torch", "Dataset"): _LOADER,
}
"""Advice by the package and the name of a type; the first match counts."""

_BY_KIND: dict[Any, str] = {
    (Number, range): "for a list of numbers, give np.asarray(list)",
    Iterator: "an iterator gives its rows only once; for rows, give np.stack(list(rows)); for "
    "batches, give pinfeed.wrap_loader(list)",
    (bytes, bytearray, memoryview): "expected a path as a str; for raw numbers, give "
    "np.frombuffer(data, dtype)",
    (list, tuple): "for a list of rows, give np.asarray(list); for a list of arrays, give "
    "np.stack(list)",
    (Set, deque): "if these are rows, give np.stack(list(rows))",
}
"""Advice by the class of an object that has no entry above."""

_ZIP = (
    "a zip archive: for a .npz file, save each array alone, np.save(name, np.load(path)[name]); "
    "for a file of torch.save, np.save(name, tensor.numpy())"
)
BY_START = {
    b"PK\x03\x04": _ZIP,
    b"\x80": "a pickle: if you trust it, load it, and save plain arrays with np.save",
    b"\xff\xff\xff\xff": "a stream of Arrow tables: give datasets.Dataset.from_file(path), or "
    "pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all(), which stay on the disk",
    b"ARROW1": "an Arrow file: give pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all(), "
    "which stays on the disk",
}
"""Kinds of files by their first bytes, with advice; ``pinfeed.stores.formats`` adds others."""
_TORCH = (
    "a file of torch.save: load it with torch.load(path, weights_only=True), and give the tensor "
    "or save np.save(name, tensor.numpy())"
)
BY_SUFFIX = {
    ".npz": "a .npz archive: save each array alone, np.save(name, np.load(path)[name])",
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".tar": "samples in an archive: give pinfeed.wrap_dataset(pinfeed.TarDataset(path), decode)",
    ".csv": "a table as text: give pyarrow.csv.read_csv(path) if its first line names the columns; "
    "if it has only numbers, save np.save(name, np.loadtxt(path, delimiter=','))",
}
"""Kinds of files by suffix, if the suffix says more than the first bytes."""
BY_CONTENT = {
    "dataset_info.json": "a Hugging Face dataset: give datasets.load_from_disk(path)",
    "dataset_dict.json": "a DatasetDict: give datasets.load_from_disk(path)[split]",
}
"""Kinds of folders by a file in them."""


_OF_STORE = (
    *("n_rows", "row_shape", "dtype", "writable", "resident_bytes"),
    *("gather", "scatter", "flush", "close"),
)
"""Attributes of a ``pinfeed.Store``."""


def of_ids(dtype: Any) -> str:
    """Return the end of an error about row indices or ids of a dtype that has no integers."""
    kind = str(dtype).removeprefix("torch.")
    if kind == "bool":
        return "; for a mask, give ids[mask]"
    if "float" in kind:
        return "; convert them where they are made, with ids.long() or ids.astype('int64')"
    return ""


def is_array_like(value: Any) -> bool:
    """Return whether a value has rows by index, like arrays of unknown libraries."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def of_object(value: Any) -> str:
    """Return advice on what to give instead of an object that is not a source."""
    kinds = [(kind.__module__.split(".")[0], kind.__name__) for kind in type(value).__mro__]
    if isinstance(value, type):
        return f"{value.__name__} is a class; give an instance"
    if found := next((hint for key, hint in _BY_TYPE.items() if key in kinds), None):
        return found
    missing = [name for name in _OF_STORE if not hasattr(value, name)]
    if len(missing) < len(_OF_STORE) // 2:
        return f"a Store also needs {', '.join(missing)}, as pinfeed.Store describes"
    if any(package == "scipy" for package, _ in kinds):
        return (
            "a sparse matrix has no dense rows; give pinfeed.SparseStore(matrix.tocsr()), or "
            "matrix.toarray() if that fits in memory"
        )
    if found := next((hint for kinds, hint in _BY_KIND.items() if isinstance(value, kinds)), None):
        return found
    if is_array_like(value):
        return _COPY
    is_sized = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if is_sized and not isinstance(value, Mapping):
        return f"for a Dataset of samples, {_LOADER}"
    return "for several sources, give a tuple, a list or a dict"


def of_file(path: str, start: bytes = b"") -> str:
    """Return the kind of a file that is not a .npy file, with advice; empty if it is unknown.

    Args:
        path: Path of the file.
        start: First bytes of the file.
    """
    by_start = next((found for magic, found in BY_START.items() if start.startswith(magic)), "")
    by_name = BY_SUFFIX.get(os.path.splitext(path)[1].lower(), "")
    return by_name if by_name and by_start in ("", _ZIP) else by_start


def of_folder(path: str) -> str:
    """Return the kind of a folder, with advice; empty if it is unknown."""
    found = (hint for name, hint in BY_CONTENT.items() if os.path.exists(os.path.join(path, name)))
    return next(found, "") or of_file(os.path.normpath(path))


REQUIREMENTS = {
    "cuda12": "cupy-cuda12x>=14",
    "cuda13": "cupy-cuda13x>=14",
    "plot": "matplotlib>=3.9",
}
"""The package of each extra in pyproject.toml, with its oldest version.

``pinfeed.stores.formats`` adds the packages of formats.
"""


def install_line(*packages: str) -> str:
    """Return the command that installs packages of extras, with their oldest versions.

    It names the packages, not ``pinfeed[extra]``, because pip would look for pinfeed in an index.
    """
    wanted = (one for one in REQUIREMENTS.values() if one.partition(">")[0] in packages)
    return "pip install " + " ".join(f'"{one}"' for one in wanted)
