"""Sparse matrices for tests, their dense rows, and files of them as AnnData writes them."""

from pathlib import Path
from typing import Any

import numpy as np


class Sparse:
    """A sparse matrix in CSR format, some of whose rows are empty, and its dense rows.

    It has the attributes of a matrix of ``scipy.sparse``.

    Args:
        n_rows: Number of rows.
        n_columns: Number of columns.
        dtype: Dtype of the values.
        columns: Dtype of the columns.
        most: Most elements of a row.
        repeats: Whether rows have several elements in one column, in any order.
    """

    format = "csr"

    def __init__(
        self,
        n_rows: int = 60,
        n_columns: int = 17,
        dtype: Any = np.float32,
        columns: Any = np.int32,
        most: int = 9,
        repeats: bool = False,
    ) -> None:
        rng = np.random.default_rng(n_rows + n_columns)
        lengths = rng.integers(0, min(most, n_columns) + 1, n_rows)
        rows = [
            rng.integers(0, n_columns, n) if repeats else np.sort(rng.permutation(n_columns)[:n])
            for n in lengths
        ]
        self.shape = (n_rows, n_columns)
        self.indptr = np.concatenate(([0], np.cumsum(lengths))).astype(columns)
        self.indices = np.concatenate(rows).astype(columns)
        self.data = rng.integers(1, 12, len(self.indices)).astype(dtype)
        self.dense = np.zeros(self.shape, dtype)
        for row, (begin, end) in enumerate(zip(self.indptr[:-1], self.indptr[1:], strict=True)):
            for i in range(begin, end):
                self.dense[row, self.indices[i]] += self.data[i]

    def write_hdf5(self, path: Path, key: str = "X", **options: Any) -> Path:
        """Write the matrix as a group of an HDF5 file, and the mean of each row next to it."""
        import h5py

        with h5py.File(path, "a") as file:
            self._write(file.create_group(key), options)
            labels = file.require_group("obs").create_group("kind")
            labels.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0"})
            labels["codes"] = np.arange(self.shape[0], dtype=np.int8) % 3
            labels["categories"] = ["a", "b", "c"]
        return path

    def write_zarr(self, path: Path, key: str = "X", **options: Any) -> Path:
        """Write the matrix as a group of a Zarr store."""
        import zarr

        self._write(zarr.open_group(path, mode="a").create_group(key), options)
        return path

    def _write(self, group: Any, options: Any) -> None:
        group.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": self.shape}
        )
        for name in ("data", "indices", "indptr"):
            array = getattr(self, name)
            chosen = {} if name == "indptr" else options
            if hasattr(group, "create_array"):
                group.create_array(name, data=array, **chosen)
            else:
                group.create_dataset(name, data=array, **chosen)
