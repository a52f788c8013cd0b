"""Parquet files, and their columns as rows: one column, or a matrix of several."""

from __future__ import annotations

import functools
import math
import os
import re
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import FileMissing, ReadError, StoreError
from pinfeed.stores.arrow import (
    RAGGED_ADVICE,
    is_text_type,
    nulls_error,
    numeric_dtype,
    ragged_error,
    rows_of_chunk,
)
from pinfeed.stores.libraries import and_more, imported, library_errors
from pinfeed.stores.matrix import MatrixColumns
from pinfeed.stores.paths import Path, file_size, file_version, local_paths
from pinfeed.stores.store import Array

# Name of the folder of rows without a value, as Hive writes it.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# A number as Hive writes it. Python also takes others, such as "1_0" and "nan".
_NUMBER = re.compile(r"[+-]?(?=\.?\d)\d*(\.\d*)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# Bytes of each column that are read at a time.
_BUFFER_BYTES = 64 << 10
# Largest page, by default.
_PAGE_BYTES = 1 << 20
# Rows of one column are decoded in pieces of this size. pyarrow needs up to 11 times the memory of
# the values that it decodes, because it adds four bytes for each number in a list, and grows its
# arrays.
_PIECE_BYTES = 128 << 10
# Rows of a matrix are decoded in pieces of this size, which the caches of a core hold while columns
# are copied into it.
_MATRIX_PIECE_BYTES = 1 << 20
# Rows of text that are decoded at a time.
_TEXT_PIECE_ROWS = 1 << 14
# Each column of a piece takes some microseconds, whatever its length.
_LEAST_PIECE_ROWS = 1024


@dataclass(frozen=True)
class ParquetShard:
    """A Parquet file, which is opened for each row group that is read.

    An open file of pyarrow belongs to one thread, and opening it again takes a few microseconds.
    """

    path: str
    metadata: Any
    version: tuple[int, ...]
    """Device, inode, size and time of change of the file."""

    def require_unchanged(self) -> None:
        """Check that the file is the one that was opened.

        Raises:
            ReadError: If it is not.
        """
        if file_version(self.path) != self.version:
            raise ReadError(f"{self.path} has changed since it was opened; open it again")

    def read(
        self, group: int, names: Sequence[str], n_rows: int, *, use_threads: bool = False
    ) -> Generator[Any, None, None]:
        """Decode columns of a row group, ``n_rows`` rows at a time, as ``pyarrow.RecordBatch``.

        Args:
            group: Number of the row group in the file.
            names: Columns. They may also be the beginning of the names of others, which are decoded
                with them.
            n_rows: Most rows of a batch.
            use_threads: Whether threads of pyarrow decode the columns.
        """
        from pyarrow.parquet import ParquetFile

        self.require_unchanged()
        # By default, pyarrow reads the columns of the row group whole before it decodes them.
        options = {
            "buffer_size": _BUFFER_BYTES,
            "pre_buffer": False,
            "page_checksum_verification": True,
        }
        with ParquetFile(self.path, metadata=self.metadata, **options) as file:
            yield from file.iter_batches(
                n_rows, row_groups=[group], columns=list(names), use_threads=use_threads
            )

    @functools.cached_property
    def schema(self) -> Any:
        """The columns, as ``pyarrow.Schema``."""
        return self.metadata.schema.to_arrow_schema()

    @functools.cached_property
    def groups(self) -> dict[int, int]:
        """Number of rows of each row group that has rows, by its number."""
        counts = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
        return {group: n_rows for group, n_rows in enumerate(counts) if n_rows}

    def decoder_nbytes(self, group: int, name: str) -> int:
        """Return the memory that a decoder of a column of numbers needs, in bytes."""
        column = self._column(group, name)
        # A data page, and perhaps a page of the dictionary and the decoded dictionary.
        n_pages = 3 if column.has_dictionary_page else 1
        nbytes: int = column.total_uncompressed_size
        return n_pages * min(nbytes, _PAGE_BYTES) + _BUFFER_BYTES

    def n_nulls(self, group: int, name: str) -> int:
        """Return how many nulls a column of numbers has; 0 if the metadata does not show it."""
        statistics = self._column(group, name).statistics
        is_known = statistics is not None and statistics.has_null_count
        return statistics.null_count if is_known else 0

    def _column(self, group: int, name: str) -> Any:
        return self.metadata.row_group(group).column(self._flat_leaves[name])

    @functools.cached_property
    def _flat_leaves(self) -> dict[str, int]:
        """Number in the file of each column that is neither a list nor a struct, by name."""
        schema = self.metadata.schema
        leaves = map(schema.column, range(len(schema)))
        # The path of a field of a struct may be equal to the name of a column.
        return {
            leaf.path: number
            for number, leaf in enumerate(leaves)
            if leaf.max_definition_level < 2 and not leaf.max_repetition_level
        }

    @functools.cached_property
    def leaves(self) -> dict[str, list[int]]:
        """Numbers of the columns in the file that contain the values of each column, by name."""
        schema = self.metadata.schema
        found: dict[str, list[int]] = {name: [] for name in self.schema.names}
        for number in range(len(schema)):
            name = schema.column(number).path
            # A name may contain a dot, which also separates the levels of a path.
            while name and name not in found:
                name = name.rpartition(".")[0]
            if name in found:
                found[name].append(number)
        return found

    @property
    def partition(self) -> dict[str, str | None]:
        """Values that the folders of the file name, as in ``year=2024/month=5/x.parquet``."""
        found: dict[str, str | None] = {}
        for folder in os.path.dirname(self.path).split(os.sep):
            key, equals, text = folder.partition("=")
            if equals and key:
                value = urllib.parse.unquote(text)
                found[urllib.parse.unquote(key)] = None if value == _NO_VALUE else value
        return found


def open_shards(path: Path | Sequence[Path]) -> list[ParquetShard]:
    """Open files and read their metadata.

    Raises:
        MissingDependency: If pyarrow is not installed.
        FileMissing: If there are no files.
        StoreError: If a file is not a Parquet file.
    """
    parquet = imported("pyarrow.parquet", "ParquetStore")
    shards: list[ParquetShard] = []
    for name in map(os.path.abspath, _files(path)):
        file_size(name, ".parquet")
        version = file_version(name)
        with pyarrow_errors(name):
            metadata = parquet.read_metadata(name)
        shards.append(ParquetShard(name, metadata, version))
    return shards


def _files(path: Path | Sequence[Path]) -> list[str]:
    """Return the files of paths, and those in folders, in sorted order."""
    found: list[str] = []
    for name in local_paths(path):
        if not os.path.isdir(name):
            found.append(name)
            continue
        inside = sorted(_files_inside(name))
        if not inside:
            raise FileMissing(
                f"{name} is a directory without .parquet files; expected at least one in it or in "
                "its folders"
            )
        found += inside
    return found


def _files_inside(folder: str) -> Iterator[str]:
    """Yield the Parquet files in a folder and its folders, without those that are hidden."""
    for place, folders, names in os.walk(folder):
        # Writers keep logs and unfinished files under such names.
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            if name.lower().endswith(".parquet") and not name.startswith((".", "_")):
                yield os.path.join(place, name)


def pyarrow_errors(place: str) -> AbstractContextManager[None]:
    """Raise errors of pyarrow for a damaged file as ``StoreError``."""
    return library_errors(place, "pyarrow", "an undamaged Parquet file; write it again")


def label_of(shards: Sequence[ParquetShard], columns: str) -> str:
    """Return a short name of the files and their columns, for messages."""
    return f"{and_more(os.path.basename(shards[0].path), len(shards))}[{columns}]"


def _partition_value(shard: ParquetShard, name: str, label: str) -> int | float | None:
    """Return the number that the folders of a file name; None if they name no value.

    Raises:
        StoreError: If the value of the file is missing, or is not a number.
    """
    if name not in shard.partition:
        names = [*shard.schema.names, *shard.partition]
        raise StoreError(
            f"{shard.path} has no column {name!r}; expected one of {', '.join(map(repr, names))}"
        )
    text = shard.partition[name]
    if text is None:
        return None
    if found := _NUMBER.fullmatch(text):
        value = float(text) if found[1] or found[2] else int(text)
        if abs(value) < 1 << 63:
            return value
    raise StoreError(
        f"{label}: the folders of {shard.path} have {name}={text}; expected a number; leave "
        f"{name!r} out, or write it as a numbered column of the files"
    )


def read_texts(shards: Sequence[ParquetShard], column: str) -> Any:
    """Return a column of text of files, as one ``pyarrow.Array`` in memory.

    Raises:
        StoreError: If a file does not have the column, or it is not text.
    """
    import pyarrow

    pieces = []
    # Joined texts may have more than 2 GiB.
    kind = pyarrow.large_string()
    for shard in shards:
        with pyarrow_errors(f"{shard.path}, column {column!r}"):
            found = _kind_of(shard, column)
            if not is_text_type(found):
                raise StoreError(
                    f"{shard.path}: column {column!r} has {found}; expected text; give "
                    "pinfeed.ParquetStore(path, column) for numbers"
                )
            for group in shard.groups:
                batches = shard.read(group, [column], _TEXT_PIECE_ROWS)
                pieces += [batch.column(column).cast(kind) for batch in batches]
    return pyarrow.chunked_array(pieces, kind).combine_chunks()


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
                values = [_partition_value(shard, name, label) for shard in shards]
                known = [value for value in values if value is not None]
                folders[name] = values
                dtypes[name] = np.array(known).dtype if known else None
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
    """Check that every file has one column of this name, always of the same type, and no text."""
    kinds = [_kind_of(shard, column) for shard in shards]
    if is_text_type(kinds[0]):
        raise StoreError(
            f"{label}: a column of {kinds[0]}; expected numbers or booleans, or lists of them; "
            "give pinfeed.ParquetStore.text(path, name), or leave the column out (a dict of the "
            "stores of the other columns)"
        )
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
