"""ParquetStore: rows of one column, or of a matrix of columns, of Parquet files, by pyarrow."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pinfeed.errors import ArgumentError, ReadError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores.chunked import DECODED_BYTES, ChunkedStore, ChunkLayout, even_bounds
from pinfeed.stores.formats import FileFormat, Part, register
from pinfeed.stores.libraries import and_more, check_names
from pinfeed.stores.matrix import checked_columns
from pinfeed.stores.parquet_files import (
    OneColumn,
    ParquetMatrix,
    ParquetShard,
    open_shards,
    pyarrow_errors,
    read_texts,
)
from pinfeed.stores.paths import Path, has_protocol
from pinfeed.stores.store import Array
from pinfeed.stores.text import TextStore
from pinfeed.tensors.argument_types import DTypeLike
from pinfeed.validation.arguments import explain_arguments

# Larger row groups are kept in pieces, so that a store need not keep them whole.
_CHUNK_BYTES = 16 << 20


class ParquetStore(ChunkedStore):
    """Read-only rows of Parquet files: one column, or a matrix of several; decoded with pyarrow.

    One column contains numbers, booleans, or (nested) lists of numbers that all have the same
    length. Each of several columns contains numbers or booleans, and is a column of the matrix, so
    that a row has the shape ``(len(columns),)``.

    A chunk of the store is a row group, or a piece of a large one. Several decoded chunks are in
    memory at a time. If you shuffle the rows, write files with small row groups, such as
    ``row_group_size=10_000``.

    Args:
        path: A file, a pattern (``"part-*.parquet"``, in sorted order), a folder, or a sequence of
            these. Several files are shards of one store. A folder has the files in it and in its
            folders whose names end in ``.parquet``, sorted by their paths.
        column: Name of one column. ``ParquetStore.columns(path)`` opens all columns of the files.
        columns: Names of the columns of a matrix. A name, like ``column``, may also be a key of
            folders ``key=value`` of a partitioned data set, if the values are numbers.
        dtype: Dtype of the rows, by default the smallest one that holds all columns. Numbers are
            rounded to the nearest float, as by numpy; integers must fit.
        missing: Number in place of nulls, such as ``float("nan")``. By default, nulls are an error.
            NaN is a number, and stays as it is.

    Raises:
        MissingDependency: If pyarrow is not installed.
        FileMissing: If a file, or every file of a pattern or a folder, is missing.
        StoreError: If a file is not a Parquet file or does not contain a column, or if a column has
            no rows, nulls, lists of different lengths, or anything but numbers.
        ArgumentError: If ``path`` is not a path, if not exactly one of ``column`` and ``columns``
            is given, or if ``missing`` is not a number of the dtype.

    Examples:
        >>> import pyarrow.parquet
        >>> table = pyarrow.table({"age": np.arange(1000), "price": np.zeros(1000)})
        >>> pyarrow.parquet.write_table(table, "part-0.parquet", row_group_size=500)
        >>> names = ["age", "price"]
        >>> with (
        ...     pinfeed.ParquetStore("part-*.parquet", columns=names, dtype="float32") as store,
        ...     pinfeed.Feeder(store, batch_size=100) as feeder,
        ... ):
        ...     shapes = {tuple(batch.shape) for batch in feeder}
        >>> shapes
        {(100, 2)}
    """

    # The encoded row group, one of its pages, and a piece that is being decoded.
    _decoding_chunks = 3
    _PROCESS_STATE: ClassVar[tuple[str, ...]] = (*ChunkedStore._PROCESS_STATE, "_cursor")
    # Row groups are decoded one after the other, in the same memory.
    _run_bytes = sys.maxsize

    @explain_arguments({})
    def __init__(
        self,
        path: Path | Sequence[Path],
        column: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        dtype: DTypeLike | None = None,
        missing: float | None = None,
    ) -> None:
        if (column is None) == (columns is None):
            raise ArgumentError(
                f"column={column!r} and columns={columns!r}; expected one of them: the name of one "
                "column, or the names of the columns of a matrix"
            )
        if column is not None and not isinstance(column, str):
            raise ArgumentError(f"column={column!r}; expected the name of a column")
        names = checked_columns([column] if columns is None else columns)
        shards = open_shards(path)
        with pyarrow_errors(f"{and_more(shards[0].path, len(shards))}, column {names[0]!r}"):
            is_key = not any(names[0] in shard.schema.names for shard in shards)
            if column is not None and dtype is None and missing is None and not is_key:
                self._open(shards, OneColumn.of(shards, column))
                return
            matrix = ParquetMatrix.of(shards, names, dtype, missing)
            # One column with a dtype, or a key of folders, is an array of numbers, not a matrix.
            self._open(shards, matrix if column is None else replace(matrix, row_shape=()))

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
        shards = open_shards(path)
        with pyarrow_errors(shards[0].path):
            names: list[str] = shards[0].schema.names
        check_names(names, shards[0].path, "write the file with different names")
        stores = {}
        for name in names:
            store = cls.__new__(cls)
            with pyarrow_errors(f"{and_more(shards[0].path, len(shards))}, column {name!r}"):
                store._open(shards, OneColumn.of(shards, name))
            stores[name] = store
        return stores

    @classmethod
    def text(cls, path: Path | Sequence[Path], column: str) -> TextStore:
        """Read a column of text of Parquet files into memory.

        Args:
            path: As for the class.
            column: Name of the column.

        Returns:
            The texts, whose batches are lists of ``str``.

        Raises:
            MissingDependency: As for the class.
            FileMissing: As for the class.
            StoreError: If a file is not a Parquet file, or the column is missing, has no rows or is
                not text.
        """
        texts = read_texts(open_shards(path), column)
        store = TextStore(texts, name=f"column {column!r}")
        store.resident_bytes = texts.nbytes
        return store

    def _open(self, shards: Sequence[ParquetShard], form: OneColumn | ParquetMatrix) -> None:
        self._shards = shards
        self._form = form
        # The file and the row group of each part of the rows that is stored together.
        self._groups = [(i, group) for i, shard in enumerate(shards) for group in shard.groups]
        counts = [n_rows for shard in shards for n_rows in shard.groups.values()]
        self._group_bounds = np.array([0, *itertools.accumulate(counts)], np.int64)
        # Most memory of all decoders of a row group, if they are open at the same time.
        self._decoders_nbytes = max(map(self._decoder_nbytes, range(len(counts))), default=0)
        row_nbytes = form.dtype.itemsize * int(np.prod(form.row_shape))
        # In pieces, a row group needs the decoders of all columns, which may be larger than itself.
        most = max(_CHUNK_BYTES, self._decoders_nbytes)
        parts = [
            first + even_bounds(n, -(-n // -(-n * row_nbytes // _CHUNK_BYTES)))[:-1]
            if n * row_nbytes > most
            else [first]
            for first, n in zip(self._group_bounds.tolist(), counts, strict=False)
        ]
        bounds = np.concatenate([*parts, self._group_bounds[-1:]]).astype(np.int64)
        self._is_split = len(bounds) > len(self._group_bounds)
        if self._is_split:
            # The cursor is at one place.
            self._max_decodes = 1
        paths = tuple(shard.path for shard in shards)
        super().__init__(ChunkLayout(form.label, form.dtype, form.row_shape, bounds, paths))

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._cursor: _Cursor | None = None

    @property
    def load_bounds(self) -> Rows:
        return self._group_bounds

    @property
    def _decoding_nbytes(self) -> int:
        if isinstance(self._form, OneColumn):
            return super()._decoding_nbytes
        decoders = self._decoders_nbytes
        if not self._is_split:
            decoders = min(decoders, self._pass_nbytes)
        return decoders + self._form.piece_rows * self.row_nbytes

    @property
    def _pass_nbytes(self) -> int:
        """Memory of the decoders that are open at the same time to decode a whole row group."""
        return DECODED_BYTES // self._n_decodes

    def close(self) -> None:
        super().close()
        # A gather that is running still decodes.
        with self._decodes:
            self._drop_cursor()

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        from pyarrow import default_memory_pool

        first = start
        number = int(np.searchsorted(self._group_bounds, start, side="right")) - 1
        while first < stop:
            begin, end = self._group_bounds[number : number + 2].tolist()
            last = min(stop, end)
            part = out[first - start : last - start]
            if last - first == end - begin:
                self._read_group(number, part)
            else:
                self._read_piece(number, first - begin, part)
            shard, _ = self._groups[number]
            self._form.fill(shard, part)
            first = last
            number += 1
        # Otherwise, each decoding thread would keep memory that no limit counts.
        default_memory_pool().release_unused()

    def _read_group(self, number: int, out: Array) -> None:
        """Decode a whole row group, some columns at a time."""
        self._drop_cursor()
        for names in self._passes(number):
            done = 0
            for batch in self._batches(number, names):
                self._form.copy(batch, names, out[done : done + len(batch)])
                done += len(batch)
            if done < len(out):
                raise ReadError(f"{self!r}: a row group has {done:,} of its {len(out):,} rows")

    def _passes(self, number: int) -> Iterator[list[str]]:
        """Yield columns that are decoded together, in limited memory."""
        names: list[str] = []
        nbytes = 0
        for name in self._form.stored:
            more = self._decoder_nbytes(number, (name,))
            if names and nbytes + more > self._pass_nbytes:
                yield names
                names = []
                nbytes = 0
            names.append(name)
            nbytes += more
        if names:
            yield names

    def _read_piece(self, number: int, start: int, out: Array) -> None:
        """Decode rows of a row group from ``start`` on.

        pyarrow can decode a row group only from its beginning on, so the store continues where the
        last piece ended, if that is possible.
        """
        names = self._form.stored
        cursor = self._cursor
        self._cursor = None
        if cursor is None or cursor.group != number or cursor.position > start:
            if cursor is not None:
                cursor.close()
            cursor = _Cursor(number, self._batches(number, names))
        shard, _ = self._groups[number]
        self._shards[shard].require_unchanged()
        for _ in cursor.read(start):
            pass
        done = 0
        for batch in cursor.read(start + len(out)):
            self._form.copy(batch, names, out[done : done + len(batch)])
            done += len(batch)
        if not self._closed:
            self._cursor = cursor

    def _batches(self, number: int, names: Sequence[str]) -> Generator[Any, None, None]:
        shard, group = self._groups[number]
        # pyarrow decodes several columns at a time in its own threads, unless those of pinfeed
        # already decode several row groups.
        use_threads = self._n_decodes == 1 and len(names) > 1
        return self._shards[shard].read(
            group, names, self._form.piece_rows, use_threads=use_threads
        )

    def _decoder_nbytes(self, number: int, names: Sequence[str] | None = None) -> int:
        """Return the memory of the decoders of some columns of a row group; by default, of all."""
        if isinstance(self._form, OneColumn):
            return 0
        shard, group = self._groups[number]
        wanted = self._form.stored if names is None else names
        return sum(self._shards[shard].decoder_nbytes(group, name) for name in wanted)

    def _drop_cursor(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


@register
class ParquetFormat(FileFormat):
    """Parquet files, alone or in folders."""

    kind = "parquet"
    usage = "ParquetStore(path, name) reads a column, and columns=[...] a matrix of several"
    advice = "a Parquet file: give pinfeed.ParquetStore.columns(path)"
    table = "ParquetStore(path, columns=[...])"
    magic = b"PAR1"
    suffixes = (".parquet",)
    requirement = "pyarrow>=15"

    def open(self, path: Any, name: str = "") -> ParquetStore:
        names = name.split(",")
        return ParquetStore(path, name) if len(names) == 1 else ParquetStore(path, columns=names)

    def is_folder(self, path: str, names: list[str]) -> bool:
        # Names of logs and of unfinished files begin with these characters.
        seen = [name for name in names if not name.startswith((".", "_"))]
        # A partitioned data set has folders key=value.
        return bool(seen) and all(
            name.lower().endswith(self.suffixes)
            or ("=" in name and os.path.isdir(os.path.join(path, name)))
            for name in seen
        )

    def columns_of(self, source: Any) -> dict[str, ParquetStore] | None:
        if not isinstance(source, (str, os.PathLike)) or has_protocol(source):
            return None
        path = os.fspath(source)
        is_ours = isinstance(path, str) and path.lower().endswith(self.suffixes)
        return ParquetStore.columns(path) if is_ours else None

    def parts(self, path: str, name: str | None) -> list[Part]:
        if name is not None and "," in name:
            return [self.described(path, name)]
        shards = open_shards(path)
        n_rows = sum(sum(shard.groups.values()) for shard in shards)
        found = []
        with pyarrow_errors(path):
            schema = shards[0].schema
            for column in schema.names if name is None else [name]:
                try:
                    # The metadata does not contain the shape of lists, so this reads one row.
                    one = OneColumn.of(shards, column)
                except StoreError as error:
                    dtype = str(schema.field(column).type) if column in schema.names else ""
                    problem = str(error)
                    part = Part(path, self.kind, column, (n_rows,), dtype, problem=problem)
                else:
                    shape = (n_rows, *one.row_shape)
                    nbytes = math.prod(shape) * one.dtype.itemsize
                    part = Part(path, self.kind, column, shape, str(one.dtype), nbytes)
                found.append(part)
        return found


class _Cursor:
    """Decoders of a row group, and the row that they decode next.

    Args:
        group: Number of the row group in the store.
        batches: Decoded rows, from the first row of the row group on.
    """

    def __init__(self, group: int, batches: Generator[Any, None, None]) -> None:
        self.group = group
        self.position = 0
        self._batches = batches
        self._rest: Any = None

    def read(self, stop: int) -> Iterator[Any]:
        """Decode rows up to ``stop``."""
        while self.position < stop:
            batch = next(self._batches) if self._rest is None else self._rest
            n_rows = min(len(batch), stop - self.position)
            self._rest = batch.slice(n_rows) if n_rows < len(batch) else None
            self.position += n_rows
            yield batch.slice(0, n_rows)

    def close(self) -> None:
        """Close the file."""
        self._batches.close()
