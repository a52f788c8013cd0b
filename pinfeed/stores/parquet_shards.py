"""ParquetShard: a Parquet file on disk, its metadata, and the values that its folders name."""

from __future__ import annotations

import functools
import os
import re
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import FileMissing, ReadError, StoreError
from pinfeed.stores.libraries import and_more, imported, library_errors
from pinfeed.stores.paths import Path, file_size, file_version, local_paths

# Name of the folder of rows without a value, as Hive writes it.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# A number as Hive writes it. Python also takes others, such as "1_0" and "nan".
_NUMBER = re.compile(r"[+-]?(?=\.?\d)\d*(\.\d*)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# Bytes of each column that are read at a time.
_BUFFER_BYTES = 64 << 10
# Largest page, by default.
_PAGE_BYTES = 1 << 20


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
        self,
        group: int,
        names: Sequence[str],
        n_rows: int,
        *,
        use_threads: bool = False,
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
        file_size(name, "*.parquet")
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


def partition_values(
    shards: Sequence[ParquetShard], name: str, label: str
) -> list[int | float | None]:
    """Return the number that the folders of each file name; None if they name no value.

    Raises:
        StoreError: If the value of a file is missing, or is not a number.
    """
    return [_partition_value(shard, name, label) for shard in shards]


def partition_dtype(values: Sequence[int | float | None]) -> np.dtype[Any] | None:
    """Return the dtype of such numbers; None if there are none."""
    known = [value for value in values if value is not None]
    return np.array(known).dtype if known else None


def _partition_value(shard: ParquetShard, name: str, label: str) -> int | float | None:
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
