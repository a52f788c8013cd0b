"""ParquetStore: rows of one column of Parquet files, read with pyarrow."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError, ReadError, StoreError
from pinfeed.stores.arrow import (
    RAGGED_ADVICE,
    copy_run,
    nulls_error,
    ragged_error,
    rows_of_chunk,
)
from pinfeed.stores.chunked import ChunkedStore, ChunkLayout
from pinfeed.stores.libraries import check_names, imported, library_errors
from pinfeed.stores.paths import Path, file_size, file_version, local_paths
from pinfeed.stores.store import Array
from pinfeed.validation.arguments import explain_arguments
from pinfeed.validation.requirements import install_line

_HINTS = {
    "name": "the name of the column is column=",
    "columns": "a ParquetStore has one column; give a dict of several stores, {name: "
    "ParquetStore(path, name), ...}, or ParquetStore.columns(path) for all columns",
}

# Rows are decoded in pieces of this size. pyarrow needs up to 11 times the memory of the values
# that it decodes, because it adds four bytes for each number in a list, and grows its arrays.
_PIECE_BYTES = 128 << 10


class ParquetStore(ChunkedStore):
    """Read-only rows of one column of Parquet files, decoded with pyarrow.

    The column contains numbers, booleans, or (nested) lists of numbers that all have the same
    length. A chunk of the store is a row group. Several decoded row groups are in memory at a time.
    If you shuffle the rows, write files with small row groups, such as ``row_group_size=10_000``.

    Args:
        path: A file, a pattern (``"part-*.parquet"``, in sorted order) or a sequence of files.
            Several files are shards of one store.
        column: Name of the column. ``ParquetStore.columns(path)`` opens all columns.

    Raises:
        MissingDependency: If pyarrow is not installed.
        FileMissing: If a file, or every file of a pattern, is missing.
        StoreError: If a file is not a Parquet file or does not contain the column, or if the column
            has no rows, nulls, lists of different lengths, or anything but numbers.
        ArgumentError: If ``path`` is not a path.

    Examples:
        >>> import pyarrow.parquet
        >>> table = pyarrow.table({"price": np.zeros(1000)})
        >>> pyarrow.parquet.write_table(table, "part-0.parquet", row_group_size=500)
        >>> with (
        ...     pinfeed.ParquetStore("part-*.parquet", "price") as store,
        ...     pinfeed.Feeder(store, batch_size=100) as feeder,
        ... ):
        ...     n_batches = len(list(feeder))
    """

    # The encoded row group, one of its pages, and a piece that is being decoded.
    _decoding_chunks = 3

    @explain_arguments(_HINTS)
    def __init__(self, path: Path | Sequence[Path], column: str) -> None:
        if not isinstance(column, str):
            raise ArgumentError(f"column={column!r}; expected the name of a column")
        self._open(_files(path), column)

    @classmethod
    def columns(cls, path: Path | Sequence[Path]) -> dict[str, ParquetStore]:
        """Open every column of Parquet files.

        Args:
            path: As for the class.

        Returns:
            A dict from column names to stores.

        Raises:
            MissingDependency: As for the class.
            FileMissing: As for the class.
            StoreError: As for the class, or if two columns have the same name.
        """
        files = _files(path)
        with _pyarrow_errors(files[0].path):
            names: list[str] = files[0].metadata.schema.to_arrow_schema().names
        check_names(names, files[0].path, "write the file with different names")
        stores = {}
        for name in names:
            store = cls.__new__(cls)
            store._open(files, name)
            stores[name] = store
        return stores

    def _open(self, files: Sequence[_ParquetFile], column: str) -> None:
        self._files = files
        self._column = column
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        with _pyarrow_errors(f"{files[0].path}{more}, column {column!r}"):
            # The file and the row group of each chunk.
            self._groups = [
                (number, group)
                for number, file in enumerate(files)
                for group in range(file.metadata.num_row_groups)
                if file.metadata.row_group(group).num_rows
            ]
            layout = _layout(files, self._groups, column)
        super().__init__(layout)

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        from pyarrow import default_memory_pool

        first = int(np.searchsorted(self.bounds, start))
        last = int(np.searchsorted(self.bounds, stop))
        for chunk in range(first, last):
            number, group = self._groups[chunk]
            begin = int(self.bounds[chunk]) - start
            step = max(1, _PIECE_BYTES // max(1, self.row_nbytes))
            for part in self._files[number].read(group, self._column, step):
                rows = rows_of_chunk(part, self.label)
                if rows.shape[1:] != self.row_shape:
                    raise ragged_error(self.label, self.row_shape, rows.shape[1:])
                end = begin + rows.shape[0]
                copy_run(rows, 0, out[begin:end])
                begin = end
        # Otherwise, each decoding thread would keep memory that no limit counts.
        default_memory_pool().release_unused()


@dataclass(frozen=True)
class _ParquetFile:
    """A Parquet file, which is opened for each row group that is read.

    An open file of pyarrow belongs to one thread, and opening it again takes a few microseconds.
    """

    path: str
    metadata: Any
    version: tuple[int, ...]
    """Device, inode, size and time of change of the file."""

    def read(self, group: int, column: str, n_rows: int) -> Iterator[Any]:
        """Decode one column of a row group, ``n_rows`` rows at a time, as ``pyarrow.Array``."""
        from pyarrow.parquet import ParquetFile

        if file_version(self.path) != self.version:
            raise ReadError(f"{self.path} has changed since it was opened; open it again")
        with ParquetFile(self.path, metadata=self.metadata) as file:
            for batch in file.iter_batches(
                n_rows, row_groups=[group], columns=[column], use_threads=False
            ):
                # The name may also be the beginning of the names of other columns.
                yield batch[column]


def _files(path: Path | Sequence[Path]) -> list[_ParquetFile]:
    """Open files and read their metadata.

    Raises:
        MissingDependency: If pyarrow is not installed.
        StoreError: If a file is not a Parquet file, or its columns differ from those of the first.
    """
    parquet = imported(
        "pyarrow.parquet", f"ParquetStore: pyarrow is needed; {install_line('parquet')}"
    )
    files: list[_ParquetFile] = []
    for name in map(os.path.abspath, local_paths(path)):
        file_size(name, "*.parquet")
        version = file_version(name)
        with _pyarrow_errors(name):
            metadata = parquet.read_metadata(name)
        files.append(_ParquetFile(name, metadata, version))
    return files


def _pyarrow_errors(place: str) -> AbstractContextManager[None]:
    """Raise errors of pyarrow for a damaged file as ``StoreError``."""
    return library_errors(place, "pyarrow", "an undamaged Parquet file; write it again")


def _layout(
    files: Sequence[_ParquetFile], groups: Sequence[tuple[int, int]], column: str
) -> ChunkLayout:
    """Return the rows and row groups of a column.

    Raises:
        StoreError: If pinfeed cannot read its rows.
    """
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    label = f"{os.path.basename(files[0].path)}{more}[{column!r}]"
    _check_kinds(files, column, label)
    if not groups:
        raise StoreError(f"{label} has no rows; expected at least one")
    number, group = groups[0]
    first = rows_of_chunk(next(files[number].read(group, column, 1)), label)
    row_shape = first.shape[1:]
    leaves = [_leaves_of(file, column) for file in files]
    counts = []
    for number, group in groups:
        found = files[number].metadata.row_group(group)
        for leaf in leaves[number]:
            _check_leaf(found.column(leaf), found.num_rows, row_shape, label)
        counts.append(found.num_rows)
    bounds = np.array([0, *itertools.accumulate(counts)], np.int64)
    paths = tuple(file.path for file in files)
    return ChunkLayout(label, first.dtype, row_shape, bounds, paths)


def _check_kinds(files: Sequence[_ParquetFile], column: str, label: str) -> None:
    """Check that every file has one column of this name, always of the same type."""
    kinds = []
    for file in files:
        schema = file.metadata.schema.to_arrow_schema()
        n = schema.names.count(column)
        if n != 1:
            found = f"{n} columns" if n else "no column"
            raise StoreError(
                f"{file.path} has {found} {column!r}; expected one of "
                f"{', '.join(map(repr, schema.names))}"
            )
        kinds.append(schema.field(column).type)
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise StoreError(
                f"{label}: shards do not match: {files[0].path} has {kinds[0]}, {file.path} {kind}"
            )


def _leaves_of(file: _ParquetFile, column: str) -> list[int]:
    """Return the numbers of the columns in the file that contain the values of a column."""
    schema = file.metadata.schema
    names = schema.to_arrow_schema().names

    def owner(path: str) -> str:
        # A name may contain a dot, which also separates the levels of a path.
        owners = [name for name in names if path == name or path.startswith(f"{name}.")]
        return max(owners, key=len, default="")

    return [i for i in range(len(schema)) if owner(schema.column(i).path) == column]


def _check_leaf(chunk: Any, n_rows: int, row_shape: tuple[int, ...], label: str) -> None:
    """Check the metadata of a row group before anything is decoded.

    Raises:
        StoreError: If the column has nulls, or lists of different lengths.
    """
    if chunk.num_values != n_rows * math.prod(row_shape):
        mean = chunk.num_values / n_rows
        raise StoreError(
            f"{label}: lists of different lengths, or null lists: the first has "
            f"{math.prod(row_shape)} values, those of a row group have {mean:.4g} on average; "
            f"{RAGGED_ADVICE}"
        )
    statistics = chunk.statistics
    if statistics is not None and statistics.has_null_count and statistics.null_count:
        raise nulls_error(label)
