"""PlannedRows: the source and the rows of the feeder that ``pinfeed plan`` makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pinfeed.cli.orders import Numbers, OrderOptions
from pinfeed.cli.sources import (
    all_described,
    described,
    open_rows,
    open_sources,
    row_nbytes_of,
    source_of,
    source_values,
    sources_values,
    sparse_described,
    sparse_rows,
    usual_batch,
)
from pinfeed.errors import StoreError
from pinfeed.memory.units import human
from pinfeed.rows.bucketed import bucketed
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.mixtures import mixed
from pinfeed.rows.packed import packed
from pinfeed.rows.ragged_batches import element_batches
from pinfeed.stores.concat import concat
from pinfeed.stores.ragged import RaggedStore
from pinfeed.validation.wrapping import wrapped

if TYPE_CHECKING:
    from pinfeed.cli.sources import OpenedFile
    from pinfeed.stores.sparse import SparseStore

# Batches whose rows are sorted by length together, as many as in a window of ``bucketed``.
_WINDOW_BATCHES = 50
# Rows after which the count of padding ends.
_MOST_COUNTED = 1 << 20


@dataclass(frozen=True)
class PlannedRows:
    """Source and rows of a feeder, opened and described.

    Attributes:
        source: Source of the feeder.
        n_rows: Number of rows of an epoch, of all ranks.
        rows: The argument ``rows``.
        name: Row order for people.
        batch_size: Rows of a batch; None if the memory limits or ``rows`` choose it.
        row_nbytes: Bytes of a row of all sources, on average.
        longest_nbytes: Bytes of a row of the source with the largest rows.
        head: Description of the sources for people.
        values: Description of the sources for scripts.
        shares: Names and sentences about the rows of an epoch, such as the share of padding.
    """

    source: Any
    n_rows: int
    rows: Any
    name: str
    batch_size: int | None
    row_nbytes: int
    longest_nbytes: float
    head: str
    values: Mapping[str, Any]
    shares: Sequence[tuple[str, str]] = field(default=())

    @property
    def makes_batches(self) -> bool:
        """Whether ``rows`` decides the batches."""
        return isinstance(self.rows, LengthBatches)


@contextlib.contextmanager
def planned_rows(
    files: Sequence[str], others: Sequence[str], batch_size: int | None, options: OrderOptions
) -> Iterator[PlannedRows]:
    """Open the files until the context ends, and make the rows that the options select.

    Raises:
        click.UsageError: If options conflict.
        PinfeedError: If a file cannot be read, or the rows cannot be batched in this way.
    """
    options.check(files, others)
    if options.weights is not None:
        opened = _mixture(files, options.weights, batch_size, options)
    elif options.offsets is not None:
        opened = _ragged(files, others, options.offsets, batch_size, options)
    elif not options.windows and (matrix := sparse_rows(files)) is not None:
        opened = _sparse(matrix, files[0], others, batch_size, options)
    else:
        opened = _plain(files, others, batch_size, options)
    with opened as found:
        yield found


@contextlib.contextmanager
def _plain(
    files: Sequence[str], others: Sequence[str], batch_size: int | None, options: OrderOptions
) -> Iterator[PlannedRows]:
    """Open one source, or several with equally many rows."""
    windows = options.windows
    with open_sources(files, others, windows) as stores:
        values = sources_values(stores)
        shares = []
        if windows:
            values["windows"] = windows
            shares.append(("windows", _in_words(windows, sum(store.nbytes for store in stores))))
        yield PlannedRows(
            source_of(stores),
            stores[0].n_rows,
            options.order,
            options.order_name,
            batch_size,
            row_nbytes_of(stores),
            max(store.row_nbytes for store in stores),
            all_described(stores),
            values,
            shares,
        )


def _in_words(windows: Mapping[str, Numbers], nbytes: int) -> str:
    """Describe windows that are cut from ``nbytes`` bytes of rows."""
    words = [f"{name} {str(windows[name]).strip('()')}" for name in ("length", "stride", "step")]
    axes = windows["axis"]
    along = f"axis {axes}" if isinstance(axes, int) else f"axes {str(axes).strip('()')}"
    return f"along {along}: {', '.join(words)}, cut from {human(nbytes)}"


@contextlib.contextmanager
def _mixture(
    files: Sequence[str],
    weights: Sequence[float],
    batch_size: int | None,
    options: OrderOptions,
) -> Iterator[PlannedRows]:
    """Open each file as a source of its own, and mix their rows by weight."""
    with contextlib.ExitStack() as stack:
        stores: dict[str, OpenedFile] = {}
        for name in files:
            stores[name] = stack.enter_context(contextlib.closing(open_rows([name])))
        source = concat(stores)
        stack.callback(source.close)
        shares = dict(zip(stores, weights, strict=True))
        # Without blocks, the rows of each source are shuffled.
        order = None if options.block_rows is None else options.order
        rows = mixed(stores, shares, order=order, seed=options.seed or 0)
        n = rows.length(source.n_rows)
        lines = [
            f"{described(store)}, weight {weight:g}"
            for store, weight in zip(stores.values(), weights, strict=True)
        ]
        nbytes = max(store.row_nbytes for store in stores.values())
        inner = "shuffled" if order is None else options.order_name
        mixture = [
            source_values(store) | {"weight": weight}
            for store, weight in zip(stores.values(), weights, strict=True)
        ]
        values = {
            "source": {
                "files": [path for store in stores.values() for path in store.paths],
                "rows": source.n_rows,
                "row_shape": source.row_shape,
                "dtype": str(source.dtype),
                "row_bytes": nbytes,
                "bytes": source.n_rows * nbytes,
            },
            "with": [],
            "mixture": mixture,
            "epoch_rows": n,
        }
        yield PlannedRows(
            source,
            n,
            rows,
            f"mixed by weight, {inner}",
            batch_size,
            nbytes,
            nbytes,
            "\n".join(wrapped(line, rest="  ") for line in lines),
            values,
            [("epoch", f"{n:,} of {source.n_rows:,} rows, until a source has no more rows")],
        )


@contextlib.contextmanager
def _sparse(
    matrix: SparseStore,
    name: str,
    others: Sequence[str],
    batch_size: int | None,
    options: OrderOptions,
) -> Iterator[PlannedRows]:
    """Take the rows of a sparse matrix, and other sources with as many rows."""
    with contextlib.ExitStack() as stack:
        stack.callback(matrix.close)
        rest = _equally_long(stack, others, name, matrix.n_rows)
        nbytes = matrix.mean_row_nbytes + row_nbytes_of(rest)
        source = {
            "files": [name],
            "rows": matrix.n_rows,
            "row_shape": [matrix.n_columns],
            "dtype": str(matrix.parts[0].dtype),
            "row_bytes": round(matrix.mean_row_nbytes),
            "bytes": round(matrix.n_rows * matrix.mean_row_nbytes),
        }
        more = [wrapped(described(one), "with ", "  ") for one in rest]
        yield PlannedRows(
            (matrix, *rest) if rest else matrix,
            matrix.n_rows,
            options.order,
            options.order_name,
            batch_size,
            max(1, round(nbytes)),
            max(matrix.mean_row_nbytes, *(one.row_nbytes for one in rest), 0),
            "\n".join([wrapped(sparse_described(matrix, name), rest="  "), *more]),
            {"source": source, "with": [source_values(one) for one in rest]},
        )


def _equally_long(
    stack: contextlib.ExitStack, names: Sequence[str], first: str, n_rows: int
) -> list[OpenedFile]:
    """Open sources with as many rows as the first one."""
    found: list[OpenedFile] = []
    for name in names:
        one = stack.enter_context(contextlib.closing(open_rows([name])))
        if one.n_rows != n_rows:
            raise StoreError(
                f"{first} has the bounds of {n_rows:,} rows, but {one.paths[0]} has "
                f"{one.n_rows:,} rows; expected equal numbers, because each sample has one row "
                "of every source"
            )
        found.append(one)
    return found


@contextlib.contextmanager
def _ragged(
    files: Sequence[str],
    others: Sequence[str],
    offsets: str,
    batch_size: int | None,
    options: OrderOptions,
) -> Iterator[PlannedRows]:
    """Open the items of ragged rows, and other sources with as many rows."""
    layouts = {"": "offsets", "--packed": "packed"}
    with contextlib.ExitStack() as stack:
        items = stack.enter_context(contextlib.closing(open_rows(files)))
        layout: Any = layouts.get(options.by_length, "padded")
        store = RaggedStore(items, offsets, layout=layout)
        rest = _equally_long(stack, others, offsets, store.n_rows)
        lengths = store.lengths
        nbytes = store.mean_row_nbytes + row_nbytes_of(rest)
        rows, size, name = _by_length(lengths, nbytes, batch_size, options)
        shares, numbers = _shares(rows, lengths)
        facts = {"shortest": int(lengths.min()), "mean": float(lengths.mean())}
        longest = int(lengths.max())
        total = human(store.n_items * items.row_nbytes)
        head = (
            f"{items.label}: {store.n_rows:,} ragged rows of {facts['shortest']:,} to "
            f"{longest:,} items (mean {facts['mean']:,.1f}), {items.dtype}, {total}"
        )
        values = {
            "source": source_values(items),
            "with": [source_values(one) for one in rest],
            "ragged": {"rows": store.n_rows, "lengths": facts | {"longest": longest}},
            **numbers,
        }
        more = [wrapped(described(one), "with ", "  ") for one in rest]
        yield PlannedRows(
            (store, *rest) if rest else store,
            store.n_rows,
            rows,
            name,
            size,
            max(1, round(nbytes)),
            max(store.mean_row_nbytes, *(one.row_nbytes for one in rest), 0),
            "\n".join([wrapped(head, rest="  "), *more]),
            values,
            shares,
        )


def _by_length(
    lengths: Any, row_nbytes: float, batch_size: int | None, options: OrderOptions
) -> tuple[Any, int | None, str]:
    """Return the rows, the rows of a batch and the name of the order of ragged rows."""
    seed = options.seed or 0
    order = options.order
    inner = options.order_name
    if options.packed is not None:
        n = batch_size or 1
        made = packed(lengths, options.packed, batch_size=n, order=order, split="long", seed=seed)
        count = "1 sequence" if n == 1 else f"{n:,} sequences"
        return made, None, f"packed into {count} of {options.packed:,} elements, {inner}"
    if options.max_elements is not None:
        usual = max(1, int(options.max_elements / max(1.0, lengths.mean())))
        batches = element_batches(
            lengths,
            options.max_elements,
            batch_size=batch_size,
            order=order,
            padded=True,
            window=_WINDOW_BATCHES * usual,
            seed=seed,
        )
        return batches, None, f"up to {options.max_elements:,} elements with padding, {inner}"
    if options.bucketed:
        size = batch_size or usual_batch(round(row_nbytes))
        # The ranks have rows of similar lengths in each step.
        n = size * (options.world_size or 1)
        has_order = options.block_rows is not None
        base = order if has_order else None
        inner = inner if has_order else "shuffled"
        made_order = bucketed(
            lengths, batch_size=n, window_batches=_WINDOW_BATCHES, order=base, seed=seed
        )
        return made_order, size, f"in buckets of similar lengths, {inner}"
    return order, batch_size, inner


def _shares(rows: Any, lengths: Any) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return how full the batches of an epoch are, in words and as numbers."""
    if hasattr(rows, "fill"):
        fill = rows.fill(most_rows=_MOST_COUNTED)
        return [("fill", f"{fill:.1%} of the elements of sequences")], {"fill": fill}
    if hasattr(rows, "padding"):
        share = rows.padding(most_rows=_MOST_COUNTED)
        text = f"{share.bucketed:.1%} of the elements of batches ({share.unbucketed:.1%} without)"
        return [("padding", text)], {"padding": share._asdict()}
    if not isinstance(rows, LengthBatches):
        return [], {}
    n_rows = n_elements = n_padded = n_batches = 0
    for batch in rows:
        found = lengths[batch]
        n_rows += len(found)
        n_batches += 1
        n_elements += int(found.sum())
        n_padded += len(found) * int(found.max())
        if n_rows > _MOST_COUNTED:
            break
    padding = 1 - n_elements / n_padded if n_padded else 0.0
    mean = n_rows / max(1, n_batches)
    text = f"{padding:.1%} of the elements of batches, which have {mean:,.1f} rows on average"
    return [("padding", text)], {"padding": {"bucketed": padding}, "mean_batch_rows": mean}
