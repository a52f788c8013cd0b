"""StoreTree: opens, checks and closes the stores of a feeder, in the structure of the source.

It also finds which objects of the source are stores, and which lists of them may be mistakes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Tensor
from pinfeed.errors import StoreError, VerificationError, logger
from pinfeed.native.library import library
from pinfeed.pipeline.write_check import WriteCheck
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.stores.file_store import FileStore, only_reads_files
from pinfeed.stores.host_rows import memory_rows_of
from pinfeed.stores.opened import leaves_of, open_store
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.store import is_store, row_nbytes
from pinfeed.stores.text import TextStore, is_text
from pinfeed.stores.window_store import WindowStore
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import Rebuild, flatten

# Number of stores that the representation shows.
_N_SHOWN = 4
# A list with more arrays than this, and more arrays than rows in each, is a list of rows.
_MANY = 16

CopyToHost = Callable[[Tensor, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Returns the values of a tensor on the device, given its shape and dtype."""


class StoreTree:
    """Stores with equally many rows, in the structure that the user gave.

    A batch has one part for each store in ``stores``, followed by those of each one in
    ``ragged``: one for each part of its items, and one for the bounds of its rows. Lists of the
    rows of each one in ``texts`` follow.

    Args:
        source: Source as ``Feeder`` takes it. The tree opens leaves that are not stores, and
            ``close`` closes these.
        name: Name of the source in errors.

    Raises:
        StoreError: If a leaf cannot be opened, or stores have unequal numbers of rows.
    """

    def __init__(self, source: Any, name: str = "source") -> None:
        found, self.structure, self._owned = leaves_of(source, name)
        if not found:
            raise StoreError(
                f"{name}={source!r} contains no arrays; expected at least one path, array, tensor "
                "or Store"
            )
        try:
            # All leaves, in the order of the structure.
            self._leaves = [
                (f"{name}{path}", self._open(leaf, f"{name}{path}")) for path, leaf in found
            ]
            self.leaves = [leaf for _, leaf in self._leaves]
            self.texts = [leaf for leaf in self.leaves if isinstance(leaf, TextStore)]
            self.stores = [
                leaf for leaf in self.leaves if not isinstance(leaf, (RaggedStore, TextStore))
            ]
            self.ragged: Sequence[RaggedStore] = [
                leaf for leaf in self.leaves if isinstance(leaf, RaggedStore)
            ]
            self.n_rows = self.leaves[0].n_rows
            given_as_path = [
                store
                for (_, leaf), store in zip(found, self.leaves, strict=True)
                if isinstance(leaf, (str, os.PathLike))
            ]
            self._require_equal_lengths(given_as_path)
            if not self.ragged and not self.texts:
                _require_columns(source, self.stores)
                if len(given_as_path) > 1:
                    from_paths = frozenset(map(id, given_as_path))
                    _note_possible_shards(self.structure(iter(self.stores)), from_paths)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        """Describe the stores, for the ``repr`` of a feeder."""
        stores = [text for name, leaf in self._leaves for text in _described(name, leaf)]
        more = f", and {len(stores) - _N_SHOWN} more" if len(stores) > _N_SHOWN else ""
        return f"{self.n_rows:,} rows of {', '.join(stores[:_N_SHOWN])}{more}"

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row of all stores together, on average."""
        ragged = sum(store.mean_row_nbytes for store in self.ragged)
        texts = sum(store.mean_row_nbytes for store in self.texts)
        return sum(map(row_nbytes, self.stores)) + math.ceil(ragged + texts)

    @property
    def parts_of_ragged(self) -> list[Store]:
        """Stores of the items of all ragged rows."""
        return [part for store in self.ragged for part in store.parts]

    @property
    def made_row_nbytes(self) -> int:
        """Bytes per row of new memory that ``rebuild`` takes; 0 if it only arranges tensors."""
        return sum(store.made_row_nbytes for store in self.ragged)

    @property
    def only_reads_files(self) -> bool:
        """Whether all rows are in files that are open for reading, by code of pinfeed."""
        return not self.texts and all(map(only_reads_files, (*self.stores, *self.parts_of_ragged)))

    def may_have_engine(self, *, is_limited: bool) -> bool:
        """Return whether an engine can gather the rows of all stores, if all files are in memory.

        Args:
            is_limited: Whether host memory has a limit, which may not hold the files.
        """
        if library() is None or self.ragged or self.texts:
            return False
        return all(
            store.can_be_memory_rows and not is_limited
            if isinstance(store, FileStore)
            else memory_rows_of(store) is not None
            for store in self.stores
        )

    @property
    def rebuild(self) -> Rebuild:
        """Function that builds a batch, in the structure of the source, from its parts."""
        return self._rebuild if self.ragged or self.texts else self.structure

    def close(self) -> None:
        """Close all stores that the tree opened, and raise the first error."""
        with contextlib.ExitStack() as stack:
            for store in reversed(self._owned):
                stack.callback(store.close)

    @functools.cached_property
    def write_check(self) -> WriteCheck:
        """Check of the values that are to be written back."""
        items = {name: leaf.parts for name, leaf in self._leaves if isinstance(leaf, RaggedStore)}
        items.update({name: [] for name, leaf in self._leaves if isinstance(leaf, TextStore)})
        names = [name for name, _ in self._leaves if name not in items]
        return WriteCheck(names, self.stores, items)

    def require_equal(self, data: Any, rows: Rows, batch: int, copy_to_host: CopyToHost) -> None:
        """Compare a batch with its rows in the stores, before the loop receives it.

        Args:
            data: Tensors in the structure of the source.
            rows: Row indices of the batch.
            batch: Number of the batch in its epoch.
            copy_to_host: Returns the values of a tensor, given its shape and dtype.

        Raises:
            VerificationError: If a row differs.
        """
        tensors = (tensor for _, tensor in flatten(data)[0])
        for name, store in self._leaves:
            if isinstance(store, TextStore):
                differs = np.array([next(tensors) != text for text in store.read(rows)], np.bool_)
            elif isinstance(store, RaggedStore):
                differs = _ragged_differences(store, rows, tensors, copy_to_host)
            else:
                expected = np.empty((len(rows), *store.row_shape), store.dtype)
                store.gather(rows, expected)
                differs = _differences(next(tensors), expected, copy_to_host)
            wrong = np.flatnonzero(differs)
            if len(wrong):
                raise VerificationError(
                    f"batch {batch}: {len(wrong)} of {len(rows)} rows of {name} differ from the "
                    f"store, beginning with row {rows[wrong[0]]}, because something other than "
                    "write_back has changed them after the batch was prefetched; while a loop "
                    "runs, change rows by write_back only, or give depth=0"
                )

    def _require_equal_lengths(self, given_as_path: Sequence[object]) -> None:
        """Check that all stores have equally many rows.

        Args:
            given_as_path: Stores that the user gave as paths, which may be file shards.
        """
        if all(store.n_rows == self.n_rows for _, store in self._leaves):
            return
        counts = ", ".join(f"{name} has {store.n_rows}" for name, store in self._leaves)
        hint = ""
        if len(given_as_path) > 1:
            kind = type(given_as_path[0]).__name__
            hint = f"; give shards of one source as a pattern, 'x-*.npy', or as {kind}([...])"
        if any(isinstance(store, WindowStore) for store in self.stores):
            hint = "; give windows of one series the same span=, for equally many rows"
        raise StoreError(
            f"sources have unequal numbers of rows: {counts}; expected equally many, because a "
            f"sample is one row of each source{hint}"
        )

    def _rebuild(self, parts: Iterator[Any]) -> Any:
        """Build a batch from its parts: those of each store, ragged store and text store."""
        fixed = iter([next(parts) for _ in self.stores])
        ragged = iter([store.batch(parts) for store in self.ragged])

        def part_of(leaf: Store | RaggedStore | TextStore) -> Any:
            if isinstance(leaf, RaggedStore):
                return next(ragged)
            return next(parts if isinstance(leaf, TextStore) else fixed)

        return self.structure(map(part_of, self.leaves))

    def _open(self, leaf: Any, name: str) -> Store | RaggedStore | TextStore:
        """Return the store of a leaf, which is checked if it is a store itself."""
        if isinstance(leaf, (RaggedStore, TextStore)):
            return leaf
        if is_text(leaf):
            return TextStore(leaf, name=name)
        if is_store(leaf):
            return _checked(leaf, name)
        store = open_store(leaf, name)
        self._owned.append(store)
        return store


def _described(name: str, leaf: Store | RaggedStore | TextStore) -> list[str]:
    """Return the name, shape and dtype of the rows of each part, as the representation shows it."""
    if isinstance(leaf, TextStore):
        return [f"{name} text"]
    if not isinstance(leaf, RaggedStore):
        return [f"{name} {leaf.row_shape} {leaf.dtype}"]
    return [
        f"{name}{path} {('ragged', *part.row_shape)} {part.dtype}"
        for path, part in zip(leaf.paths_of_parts, leaf.parts, strict=True)
    ]


def _differences(
    tensor: Tensor, expected: npt.NDArray[Any], copy_to_host: CopyToHost
) -> npt.NDArray[np.bool_]:
    """Return whether each row of a tensor differs from the expected row, shape (n,)."""
    from pinfeed.tensors.numpy_torch import bytes_by_row

    lent = copy_to_host(tensor, expected.shape, expected.dtype)
    differs: npt.NDArray[np.bool_] = (bytes_by_row(lent) != bytes_by_row(expected)).any(axis=1)
    return differs


def _ragged_differences(
    store: RaggedStore, rows: Rows, leaves: Iterator[Tensor], copy_to_host: CopyToHost
) -> npt.NDArray[np.bool_]:
    """Return whether each ragged row of a batch differs from the row in the store, shape (n,).

    Args:
        store: The store.
        rows: Row indices of the batch.
        leaves: Remaining tensors of the batch; this takes those of the store, which are first.
        copy_to_host: As for ``StoreTree.require_equal``.
    """
    *items, bounds = store.tensors(leaves)
    *expected, expected_bounds = store.read_parts(rows)
    pairs = zip(items, expected, strict=True)
    found = [_differences(one, other, copy_to_host) for one, other in pairs]
    differs: npt.NDArray[np.bool_] = np.logical_or.reduce(found)
    if store.layout != "padded":
        # Positions of items, as rows of the batch.
        wrong = np.searchsorted(expected_bounds, np.flatnonzero(differs), side="right") - 1
        differs = np.isin(np.arange(len(rows)), wrong)
    # Offsets and lengths never change, unless the loop has received those of another batch.
    different_bounds = _differences(bounds, expected_bounds, copy_to_host)
    return differs | different_bounds[-len(rows) :] if len(rows) else differs


def _checked(store: Store, name: str) -> Store:
    """Return a user's store, if it has rows, and a dtype that devices support."""
    if store.n_rows < 1:
        raise StoreError(
            f"{name}: {type(store).__name__} has n_rows={store.n_rows}; expected at least one row"
        )
    if check_dtype(np.dtype(store.dtype), name) != store.dtype:
        raise StoreError(
            f"{name}: {type(store).__name__} has dtype {store.dtype}; expected the byte order of "
            f"this machine; give dtype {np.dtype(store.dtype).newbyteorder('=')}"
        )
    return store


def _require_columns(source: Any, stores: Sequence[Store]) -> None:
    """Refuse a list of rows, each of which would be a source of its own.

    Args:
        source: The user's source.
        stores: Stores that were opened for it, with equally many rows.
    """
    n_rows = stores[0].n_rows
    n = len(stores)
    if not isinstance(source, list) or n <= max(_MANY, n_rows):
        return
    if len({(store.row_shape, store.dtype) for store in stores}) == 1:
        raise StoreError(
            f"source is a list of {n} arrays of shape {(n_rows, *stores[0].row_shape)}, which "
            f"means {n} sources of {n_rows} rows; expected one array; if each array is a row, give "
            f"np.stack(source); if you mean {n} sources, give a tuple"
        )


def _note_possible_shards(value: Any, from_paths: frozenset[int]) -> None:
    """Warn of lists of files with rows of one shape and dtype, at any depth of a structure.

    Each file is a source of its own, but the user may have meant shards of one source.

    Args:
        value: Stores in the structure of the source.
        from_paths: The ``id`` of each store that was given as a path.
    """
    if isinstance(value, list) and len(value) > 1 and from_paths.issuperset(map(id, value)):
        is_alike = len({(store.row_shape, store.dtype) for store in value}) == 1
        if is_alike and all(len(store.paths) == 1 for store in value):
            paths = tuple(store.paths[0] for store in value)
            _warn_of_possible_shards(type(value[0]).__name__, paths)
    elif isinstance(value, (list, tuple, Mapping)):
        for child in value.values() if isinstance(value, Mapping) else value:
            _note_possible_shards(child, from_paths)


@functools.cache
def _warn_of_possible_shards(store: str, paths: tuple[str, ...]) -> None:
    named = paths if len(paths) < 4 else paths[:2]
    shown = ", ".join([*map(repr, named), *["..."] * (len(named) < len(paths))])
    logger.warning(
        "source=[%s] is a list of %d files with equally many rows of one shape and dtype, so each "
        "batch is a list of %d tensors, one per file; if the files are shards of one source, give "
        "%s([...]) or a pattern; if they are separate sources, give a tuple, which avoids this "
        "warning",
        shown,
        len(paths),
        len(paths),
        store,
    )
