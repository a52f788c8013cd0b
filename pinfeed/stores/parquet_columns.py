"""Columns of Parquet files as rows: one column, or a matrix of several, checked by the metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.stores.arrow import (
    RAGGED_ADVICE,
    nulls_error,
    ragged_error,
    rows_of_chunk,
)
from pinfeed.stores.columns import MatrixColumns, numeric_dtype
from pinfeed.stores.parquet_shards import (
    ParquetShard,
    label_of,
    partition_dtype,
    partition_values,
)
from pinfeed.stores.store import Array

# Rows of one column are decoded in pieces of this size. pyarrow needs up to 11 times the memory of
# the values that it decodes, because it adds four bytes for each number in a list, and grows its
# arrays.
_PIECE_BYTES = 128 << 10
# Rows of a matrix are decoded in pieces of this size, which the caches of a core hold while columns
# are copied into it.
_MATRIX_PIECE_BYTES = 1 << 20
# Each column of a piece takes some microseconds, whatever its length.
_LEAST_PIECE_ROWS = 1024


@dataclass(frozen=True)
class OneColumn:
    """A column of numbers or of (nested) lists of numbers, each of which is a row."""

    label: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    stored: tuple[str]
    """Name of the column."""

    @classmethod
    def of(cls, shards: Sequence[ParquetShard], column: str) -> OneColumn:
        """Return a column of files.

        Raises:
            StoreError: If pinfeed cannot read its rows.
        """
        label = label_of(shards, repr(column))
        _check_kinds(shards, column, label)
        groups = [(shard, group) for shard in shards for group in shard.groups]
        if not groups:
            raise StoreError(f"{label} has no rows; expected at least one")
        shard, group = groups[0]
        first = rows_of_chunk(next(shard.read(group, (column,), 1))[column], label)
        leaves = {shard.path: shard.leaves[column] for shard in shards}
        for shard, group in groups:
            found = shard.metadata.row_group(group)
            for leaf in leaves[shard.path]:
                _check_leaf(found.column(leaf), found.num_rows, first.shape[1:], label)
        return cls(label, first.dtype, first.shape[1:], (column,))

    @property
    def piece_rows(self) -> int:
        """Rows that are decoded at a time."""
        row_nbytes = self.dtype.itemsize * math.prod(self.row_shape)
        return max(1, _PIECE_BYTES // max(1, row_nbytes))

    def copy(self, batch: Any, names: Sequence[str], out: Array) -> None:
        """Copy decoded rows into ``out``."""
        (name,) = names
        rows = rows_of_chunk(batch[name], self.label)
        if rows.shape[1:] != self.row_shape:
            raise ragged_error(self.label, self.row_shape, rows.shape[1:])
        out[...] = rows

    def fill(self, shard: int, out: Array) -> None:
        """Do nothing, because all values are in the file."""


@dataclass(frozen=True)
class ParquetMatrix:
    """A matrix of columns of files and of keys of their folders."""

    label: str
    row_shape: tuple[int, ...]
    columns: MatrixColumns
    stored: tuple[str, ...]
    """Names of the columns that are in the files."""
    folders: dict[str, list[int | float | None]]
    """Number of each file, for the names of the columns that are keys of folders."""

    @classmethod
    def of(
        cls, shards: Sequence[ParquetShard], names: Sequence[str], dtype: Any, missing: Any
    ) -> ParquetMatrix:
        """Return a matrix of columns of files, with as many columns as names.

        Raises:
            StoreError: If pinfeed cannot read its rows.
            ArgumentError: If ``missing`` is not a number of the dtype.
        """
        label = label_of(shards, repr(names[0]) if len(names) == 1 else f"{len(names)} columns")
        dtypes: dict[str, np.dtype[Any] | None] = {}
        folders = {}
        for name in names:
            if any(name in shard.schema.names for shard in shards):
                dtypes[name] = _dtype_in_files(shards, name, label)
            else:
                folders[name] = partition_values(shards, name, label)
                dtypes[name] = partition_dtype(folders[name])
        columns = MatrixColumns.of_dtypes(dtypes, dtype, missing, label)
        stored = tuple(name for name in names if name not in folders)
        found = cls(label, (len(names),), columns, stored, folders)
        if missing is None:
            found._require_values(shards)
        return found

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the matrix."""
        return self.columns.dtype

    @property
    def piece_rows(self) -> int:
        """Rows that are decoded at a time."""
        row_nbytes = self.dtype.itemsize * len(self.columns.names)
        return max(_LEAST_PIECE_ROWS, _MATRIX_PIECE_BYTES // row_nbytes)

    def copy(self, batch: Any, names: Sequence[str], out: Array) -> None:
        """Copy columns of decoded rows into ``out``."""
        self.columns.copy(batch, names, out)

    def fill(self, shard: int, out: Array) -> None:
        """Fill the columns of the keys of folders with the numbers of a file."""
        matrix = out.reshape(len(out), len(self.columns.names))
        for name, values in self.folders.items():
            value = values[shard]
            column = matrix[:, self.columns.numbers[name]]
            column[...] = self.columns.missing if value is None else value

    def _require_values(self, shards: Sequence[ParquetShard]) -> None:
        """Check by the metadata that no value is missing, before anything is decoded."""
        for name in self.stored:
            n_missing = sum(
                shard.n_nulls(group, name) for shard in shards for group in shard.groups
            )
            self.columns.require_none_missing(name, n_missing)
        for name, values in self.folders.items():
            pairs = zip(shards, values, strict=True)
            n_missing = sum(shard.metadata.num_rows for shard, value in pairs if value is None)
            self.columns.require_none_missing(name, n_missing)


def _dtype_in_files(shards: Sequence[ParquetShard], name: str, label: str) -> np.dtype[Any] | None:
    """Return the smallest dtype that holds a column in all files; None if it is always missing."""
    kinds = {_kind_of(shard, name) for shard in shards}
    found = [numeric_dtype(kind, f"{label}: {name!r}") for kind in kinds]
    known = [dtype for dtype in found if dtype is not None]
    return np.result_type(*known) if known else None


def _kind_of(shard: ParquetShard, column: str) -> Any:
    """Return the Arrow type of a column.

    Raises:
        StoreError: If a file does not have exactly one column of this name.
    """
    names = shard.schema.names
    n = names.count(column)
    if n != 1:
        found = f"{n} columns" if n else "no column"
        raise StoreError(
            f"{shard.path} has {found} {column!r}; expected one of {', '.join(map(repr, names))}"
        )
    return shard.schema.field(column).type


def _check_kinds(shards: Sequence[ParquetShard], column: str, label: str) -> None:
    """Check that every file has one column of this name, always of the same type."""
    kinds = [_kind_of(shard, column) for shard in shards]
    for shard, kind in zip(shards, kinds, strict=True):
        if kind != kinds[0]:
            raise StoreError(
                f"{label}: shards do not match: {shards[0].path} has {kinds[0]}, {shard.path} "
                f"{kind}"
            )


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
