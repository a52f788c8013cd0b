"""Sources: files of the command line, opened and described."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pinfeed.errors import FileMissing, PinfeedError, StoreError
from pinfeed.memory.units import human
from pinfeed.validation.wrapping import wrapped

if TYPE_CHECKING:
    from pinfeed.stores.axis_windows import WindowStore
    from pinfeed.stores.chunked import ChunkedStore
    from pinfeed.stores.sharded_file import ShardedStore
    from pinfeed.stores.sparse import SparseStore

    OpenedFile = ShardedStore | ChunkedStore | WindowStore

# A file of another format, and the dataset or column to read, such as x.h5:/images.
_FORMAT = re.compile(
    r"(?P<path>.+\.(?P<format>h5|h5ad|hdf5|zarr|parquet))(:(?P<name>.+))?", re.IGNORECASE
)

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024


def expanded(files: Sequence[str]) -> list[str]:
    """Replace each pattern by the files that it matches; a pattern that matches none stays."""
    names = []
    for name in files:
        is_pattern = glob.has_magic(name) and "://" not in name and not os.path.exists(name)
        matches = sorted(glob.glob(name)) if is_pattern else []
        names += matches or [name]
    return names


def open_rows(files: Sequence[str]) -> OpenedFile:
    """Open one file, or the shards of one source; local, or remote (``s3://…``).

    The name of a dataset or column follows a colon: ``x.h5:/images``, ``x.parquet:embedding``.
    Several columns with commas are a matrix: ``x.parquet:age,income``.

    The caller closes the store.

    Raises:
        PinfeedError: If the store of the files refuses them.
    """
    from pinfeed.stores import NpyStore, RemoteStore
    from pinfeed.stores.paths import has_protocol

    if len(files) == 1 and (found := format_of(files[0])) is not None:
        path = found[0]
        try:
            return _open_format(*found)
        except FileMissing:
            raise
        except StoreError as error:
            # The error gives advice for Python programs.
            raise StoreError(
                f"{error}; on the command line, give {path}:NAME; pinfeed inspect {path} lists the "
                "names"
            ) from None
    names = expanded(files)
    kind = RemoteStore if has_protocol(names[0]) else NpyStore
    try:
        # A single name may be a pattern without matches. The store has a message for this case.
        return kind(names[0] if len(names) == 1 else names)
    except StoreError as error:
        if "shards do not match" not in str(error):
            raise
        raise StoreError(
            f"{error}; several files are shards of one source; give another source, such as "
            "labels, with --with FILE"
        ) from None


def sparse_rows(files: Sequence[str]) -> SparseStore | None:
    """Open a sparse matrix, such as ``x.h5ad:layers/counts``; None if the file has none there.

    The name of the matrix of an .h5ad file may be left out. The caller closes the store.
    """
    from pinfeed.stores import SparseStore

    found = format_of(files[0]) if len(files) == 1 else None
    if found is None:
        return None
    path, kind, name = found
    if kind == "parquet" or not os.path.exists(path):
        return None
    if name is None and not path.lower().endswith(".h5ad"):
        return None
    # The store of dense rows explains what is wrong.
    with contextlib.suppress(PinfeedError):
        return SparseStore(path, name)
    return None


def format_of(name: str) -> tuple[str, str, str | None] | None:
    """Return the path, the format and the dataset or column that a name such as x.h5:/a states.

    The format is ``hdf5``, ``zarr`` or ``parquet``; the result is None for files of another one.
    """
    # A shell completes the name of a folder with a slash.
    if (found := _FORMAT.fullmatch(name.rstrip("/"))) is None:
        return None
    kind = found["format"].lower()
    return found["path"], kind if kind in ("zarr", "parquet") else "hdf5", found["name"]


def _open_format(path: str, kind: str, name: str | None) -> ChunkedStore:
    from pinfeed.stores import HDF5Store, ParquetStore, ZarrStore

    if kind == "zarr":
        return ZarrStore(path, name)
    if kind != "parquet":
        return HDF5Store(path, name)
    if name is not None and "," in name:
        return ParquetStore(path, columns=name.split(","))
    if name is not None:
        return ParquetStore(path, name)
    columns = ParquetStore.columns(path)
    if len(columns) > 1:
        names = ", ".join(f"{path}:{column}" for column in columns)
        raise StoreError(
            f"{path} has {len(columns)} columns; expected one of them: {names}; or several with "
            "commas, as a matrix"
        )
    return next(iter(columns.values()))


@contextlib.contextmanager
def open_sources(
    files: Sequence[str], others: Sequence[str], windows: Mapping[str, Any] | None = None
) -> Iterator[list[OpenedFile]]:
    """Open the files of each source, until the context ends.

    Args:
        files: Files of the first source.
        others: A file or a pattern for each of the others.
        windows: Arguments of ``windows``, if the rows are windows of each source.

    Raises:
        PinfeedError: If ``open_rows`` refuses files.
        StoreError: If the sources have unequal numbers of rows.
    """
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(contextlib.closing(open_rows(names)))
            for names in (files, *([other] for other in others))
        ]
        if windows:
            stores = [
                stack.enter_context(contextlib.closing(_windows_of(store, windows)))
                for store in stores
            ]
        if any(store.n_rows != stores[0].n_rows for store in stores):
            counts = ", ".join(f"{_files_of(store)} has {store.n_rows:,}" for store in stores)
            raise StoreError(
                f"sources have unequal numbers of rows: {counts}; expected equal numbers, because "
                "each sample has one row of every source"
            )
        yield stores


def _windows_of(store: OpenedFile, windows: Mapping[str, Any]) -> OpenedFile:
    """Return windows along axes of a source, which must stay open."""
    from pinfeed.stores import NpyStore
    from pinfeed.stores.chunked_array import ChunkedArray

    if isinstance(store, ChunkedArray):
        return store.windows(**windows)
    if isinstance(store, NpyStore):
        return NpyStore.windows(store.paths, **windows)
    raise StoreError(
        f"{_files_of(store)} has no windows along axes; expected an HDF5, Zarr or local .npy file; "
        "leave out --length"
    )


def source_of(stores: Sequence[OpenedFile]) -> Any:
    """Return the source of a ``Feeder``: the one store, or a tuple of several."""
    return stores[0] if len(stores) == 1 else tuple(stores)


def row_nbytes_of(stores: Sequence[OpenedFile]) -> int:
    """Return the bytes of one row of all sources together."""
    return sum(store.row_nbytes for store in stores)


def usual_batch(row_nbytes: int) -> int:
    """Return the default rows per batch: a power of two, up to 1024 rows and 16 MiB."""
    most = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_nbytes)))
    return 1 << (most.bit_length() - 1)


def described(store: OpenedFile) -> str:
    """Describe a source in words."""
    nbytes = human(store.n_rows * store.row_nbytes)
    rows = f"{store.n_rows:,} rows of shape {store.row_shape}"
    return f"{_files_of(store)}: {rows}, {store.dtype}, {nbytes}"


def sparse_described(matrix: SparseStore, name: str) -> str:
    """Describe a sparse matrix in words."""
    nbytes = human(round(matrix.n_rows * matrix.mean_row_nbytes))
    elements = f"{matrix.row_lengths.mean:,.1f} elements on average, {matrix.parts[0].dtype}"
    rows = f"{matrix.n_rows:,} sparse rows of {matrix.n_columns:,} columns"
    return f"{name}: {rows} and {elements}, {nbytes}"


def all_described(stores: Sequence[OpenedFile]) -> str:
    """Describe sources in words, a paragraph each."""
    return "\n".join(
        wrapped(described(store), "with " if i else "", "  ") for i, store in enumerate(stores)
    )


def _files_of(store: OpenedFile) -> str:
    n_more = len(store.paths) - 1
    if not n_more:
        folder = os.path.dirname(store.paths[0])
        is_format = _FORMAT.fullmatch(store.paths[0]) is not None
        return os.path.join(folder, store.label) if is_format else store.paths[0]
    return f"{store.paths[0]} and {n_more} more shard{'s' * (n_more > 1)}"


def sources_values(stores: Sequence[OpenedFile]) -> dict[str, Any]:
    """Describe the first source, and the others, for scripts."""
    return {"source": source_values(stores[0]), "with": list(map(source_values, stores[1:]))}


def source_values(store: OpenedFile) -> dict[str, Any]:
    """Describe a source for scripts."""
    return {
        "files": store.paths,
        "rows": store.n_rows,
        "row_shape": store.row_shape,
        "dtype": str(store.dtype),
        "row_bytes": store.row_nbytes,
        "bytes": store.n_rows * store.row_nbytes,
    }
