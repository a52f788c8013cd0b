"""concat(): rows of several sources, one after the other, as one source."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.mixtures import n_rows_of
from pinfeed.rows.runs import cut_run
from pinfeed.stores.array import ArrayStore, ConcatStore
from pinfeed.stores.chunked import ChunkedStore, ChunkedView, ChunkLayout
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.libraries import and_more
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.opened import leaves_of, open_store
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.store import Array, Store, is_store
from pinfeed.stores.text import TextStore
from pinfeed.stores.window_store import WindowStore
from pinfeed.tensors.argument_types import Source


def concat(sources: Mapping[str, Source] | Sequence[Source]) -> Source:
    """Return the rows of several sources, one after the other, as one read-only source.

    The first row of each source follows the last row of the source before it. Nothing is copied.
    ``pinfeed.rows.mixed`` takes the same sources, and draws rows from each by weight. Local files
    of NpyStores become the shards of one NpyStore, which a feeder reads as fast as each of them.
    Rows of arrays are gathered together. Other stores are read one after the other in each batch.

    Args:
        sources: The sources, a sequence or a dict with names. Each is a source as ``Feeder`` takes
            it: a path, an array, a tensor, a Store or a RaggedStore, or a structure of these. All
            have the same structure, and rows of the same shapes and dtypes.

    Returns:
        A store, or stores in the structure of the sources. They close the files that were opened
        from paths.

    Raises:
        StoreError: If a source cannot be read, or if sources differ in structure, or in the shape
            or dtype of their rows.
        ArgumentError: If ``sources`` is not a sequence or a dict of sources.

    Examples:
        >>> web = np.zeros((700, 8), "float32")
        >>> code = np.ones((300, 8), "float32")
        >>> with pinfeed.Feeder(pinfeed.concat([web, code]), batch_size=100) as feeder:
        ...     n_batches = len(list(feeder))
        >>> n_batches
        10
    """
    flat = [(name, *leaves_of(source, name)) for name, source in _named(sources)]
    with contextlib.ExitStack() as stack:
        for _, _, _, made in flat:
            for store in made:
                stack.callback(store.close)
        first_name, first_leaves, rebuild, _ = flat[0]
        paths = [path for path, _ in first_leaves]
        for name, leaves, _, _ in flat:
            if [path for path, _ in leaves] != paths:
                raise StoreError(
                    f"{name} has the parts {[path for path, _ in leaves]}, and {first_name} has "
                    f"{paths}; expected sources of the same structure"
                )
        joined = []
        columns = {id(store) for _, _, _, made in flat for store in made}
        for i, path in enumerate(paths):
            parts = [leaves[i][1] for _, leaves, _, _ in flat]
            made = [part for part in parts if id(part) in columns]
            store = _concat(parts, [f"{name}{path}" for name, *_ in flat], made)
            stack.callback(store.close)
            joined.append(store)
        stack.pop_all()
    return rebuild(iter(joined))


def source_ids(sources: Mapping[str, Source] | Sequence[Source]) -> Store:
    """Return the number of the source of each row of ``concat(sources)``, as a source.

    The rows are int64 numbers, counted from 0. They take no memory.

    Args:
        sources: As for ``concat``, but with stores or numbers of rows instead of paths.

    Raises:
        ArgumentError: If ``sources`` is not a sequence or a dict, or a number of rows is unknown.

    Examples:
        >>> sources = {"web": np.zeros((700, 8)), "code": np.ones((300, 8))}
        >>> batch_parts = {"x": pinfeed.concat(sources), "source": pinfeed.source_ids(sources)}
        >>> order = pinfeed.rows.mixed(sources, weights={"web": 1, "code": 1})
        >>> with pinfeed.Feeder(batch_parts, batch_size=100, rows=order) as feeder:
        ...     print(next(iter(feeder))["source"].bincount().tolist())
        [50, 50]
    """
    sizes = [n_rows_of(source, name) for name, source in _named(sources)]
    parts = [np.broadcast_to(np.int64(number), (n,)) for number, n in enumerate(sizes)]
    return ConcatStore([ArrayStore(part) for part in parts])


def _named(sources: Any) -> list[tuple[str, Any]]:
    """Return the sources, each with its name in errors."""
    if isinstance(sources, Mapping) and sources:
        return [(f"sources[{name!r}]", source) for name, source in sources.items()]
    if isinstance(sources, (tuple, list)) and sources:
        return [(f"sources[{i}]", source) for i, source in enumerate(sources)]
    raise ArgumentError(
        f"sources={sources!r}: expected a list or a dict of at least one source, such as "
        "[first, second]"
    )


def _concat(leaves: Sequence[Any], names: Sequence[str], made: Sequence[Any]) -> Any:
    """Return the rows of the leaves, one after the other, as one store.

    Args:
        leaves: Paths, arrays, tensors or stores.
        names: Name of each in errors.
        made: The leaves that the result closes.
    """
    if any(isinstance(leaf, RaggedStore) for leaf in leaves):
        return _concat_ragged(leaves, names)
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, TextStore):
            raise StoreError(
                f"{name} is text; expected numbers; join the columns of text before: "
                "pyarrow.concat_tables(tables), or give all files as one column"
            )
    with contextlib.ExitStack() as stack:
        parts: list[Store] = []
        owned = list(made)
        for leaf, name in zip(leaves, names, strict=True):
            if not is_store(leaf):
                leaf = open_store(leaf, name)
                stack.callback(leaf.close)
                owned.append(leaf)
            parts.append(leaf)
        for part, name in zip(parts, names, strict=True):
            if (part.row_shape, part.dtype) != (parts[0].row_shape, parts[0].dtype):
                raise StoreError(
                    f"{name} has rows of shape {part.row_shape}, {part.dtype}, and {names[0]} has "
                    f"rows of shape {parts[0].row_shape}, {parts[0].dtype}; expected equal shapes "
                    "and dtypes"
                )
        shards = _joined(parts, owned)
        if not isinstance(shards, NpyStore):
            # Others read from the parts, and close those that were opened here.
            stack.pop_all()
    return ConcatStore(parts, owned) if shards is None else shards


def _joined(parts: Sequence[Store], owned: Sequence[Store] = ()) -> Store | None:
    """Return rows of files as one store of files, which is read in longer runs; None if unlike."""
    if all(isinstance(part, WindowStore) for part in parts):
        return _joined_windows(cast(Sequence[WindowStore], parts))
    if all(isinstance(part, ChunkedStore) for part in parts):
        chunked = cast(Sequence[ChunkedStore], parts)
        if any(part.native is None for part in chunked):
            return ConcatChunks(chunked, owned)
        parts = [cast(Store, part.native) for part in chunked]
    return NpyStore.joined(parts)


def _joined_windows(parts: Sequence[WindowStore]) -> WindowStore | None:
    """Return the windows of several stores, if all windows have the same items."""
    first = parts[0]
    forms = [(part.axes, part.run_length, part.run_starts.tolist()) for part in parts]
    items = _joined([part.items for part in parts]) if forms.count(forms[0]) == len(forms) else None
    if not isinstance(items, FileStore):
        return None
    shapes = [shape for part in parts for shape in part.shapes]
    return WindowStore(items, shapes, first.axes, owned=True, row_shape=first.row_shape)


def _concat_ragged(leaves: Sequence[Any], names: Sequence[str]) -> RaggedStore:
    """Return ragged rows, one after the other, whose items are the items of all."""
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, RaggedStore):
            raise StoreError(f"{name} is not a RaggedStore, but others are; expected only these")
        if leaf.paths_of_parts != leaves[0].paths_of_parts:
            raise StoreError(
                f"{name} has the parts {leaf.paths_of_parts}, and {names[0]} has "
                f"{leaves[0].paths_of_parts}; expected the same"
            )
        if leaf.form != leaves[0].form:
            raise StoreError(
                f"{name} has {leaf.form}, and {names[0]} has {leaves[0].form}; expected the same"
            )
    for before, after, name in zip(leaves, leaves[1:], names[1:], strict=False):
        if before.offsets[-1] != before.n_items or after.offsets[0] != 0:
            raise StoreError(
                f"{name} or the RaggedStore before it has items that are in no row; expected "
                "offsets from 0 to the number of items; give the items of its rows alone"
            )
    begins = [0, *itertools.accumulate(leaf.n_items for leaf in leaves)]
    pairs = zip(leaves[1:], begins[1:], strict=False)
    offsets = np.concatenate([leaves[0].offsets, *(leaf.offsets[1:] + n for leaf, n in pairs)])
    parts = [
        _concat([leaf.parts[i] for leaf in leaves], [f"{name}{path}" for name in names], [])
        for i, path in enumerate(leaves[0].paths_of_parts)
    ]
    joined: RaggedStore = leaves[0].joined(parts, offsets)
    return joined


class ConcatChunks(ChunkedView):
    """Rows of several chunked stores, one after the other; read-only.

    Args:
        parts: Stores with rows of one shape and dtype, at least one; they must stay open.
        owned: The parts that this store closes.
    """

    def __init__(self, parts: Sequence[ChunkedStore], owned: Sequence[Store] = ()) -> None:
        self._ends = np.cumsum([part.n_rows for part in parts])
        begins = self._ends - [part.n_rows for part in parts]
        bounds = [part.bounds[:-1] + begin for part, begin in zip(parts, begins, strict=True)]
        layout = ChunkLayout(
            and_more(parts[0].label, len(parts)),
            parts[0].dtype,
            parts[0].row_shape,
            np.append(np.concatenate(bounds), self._ends[-1]),
            paths=tuple(path for part in parts for path in part.paths),
        )
        super().__init__(layout, parts, owned)

    @property
    def piece_rows(self) -> int:
        found = {part.piece_rows for part in self.parts}
        return found.pop() if len(found) == 1 else self.chunk_rows

    def _read_chunks(self, start: int, stop: int, out: Array) -> None:
        done = 0
        for number, first, n in cut_run(start, stop, self._ends):
            self.parts[number].read_chunks(first, first + n, out[done : done + n])
            done += n
