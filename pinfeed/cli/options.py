"""What is written on the command line: sizes, lists of numbers, files, and how their rows become batches."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from pinfeed.cli.output import wrapped
from pinfeed.errors import StoreError
from pinfeed.memory.limits import human

if TYPE_CHECKING:
    from pinfeed.stores.sharded_file import AnyShardedStore

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{k}ib": 1 << 10 * i for i, k in enumerate("kmgt", 1)},
    **{f"{k}b": 1000**i for i, k in enumerate("kmgt", 1)},
}
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 1024


def size(text: str) -> int:
    """Bytes, as ``2GiB``, ``512MiB``, ``1.5e9``."""
    found = _NUMBER.fullmatch(text.strip())
    nbytes = float(found[1]) * _UNITS.get(found[2].lower(), math.nan) if found else math.nan
    if not 1 <= nbytes < 1 << 63:
        raise click.BadParameter(
            f"{text!r} is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9"
        )
    return int(nbytes)


def counts(text: str) -> tuple[int, ...]:
    """Numbers with commas between, as ``0,2``."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise click.BadParameter(f"{text!r} is not a list of numbers; expected such as 0 or 0,2,8")
    return tuple(map(int, text.split(",")))


def order_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How rows are put into batches, as ``Feeder`` takes it."""
    for option in (
        click.option(
            "--seed", type=int, default=None, show_default="0", help="Of the random order."
        ),
        click.option(
            "--block-rows",
            type=click.IntRange(1),
            metavar="ROWS",
            help="Random order, in blocks of so many neighbouring rows.",
        ),
        click.option("--shuffle", is_flag=True, help="Rows in random order."),
        click.option(
            "--batch-size", type=click.IntRange(1), metavar="ROWS", help="Rows of a batch."
        ),
    ):
        command = option(command)
    return command


def order_of(shuffle: bool, block_rows: int | None, seed: int | None) -> tuple[Any, str]:
    """The order, and what it is called.

    Raises:
        click.UsageError: Two of them, or a seed that shuffles nothing.
    """
    from pinfeed.rows.orders import block_shuffled, sequential, shuffled

    if shuffle and block_rows is not None:
        raise click.UsageError("--shuffle and --block-rows: give one of them")
    if seed is not None and not shuffle and block_rows is None:
        raise click.UsageError(
            f"--seed {seed} was given, and neither --shuffle nor --block-rows, which use it: give one of them"
        )
    seed = seed or 0
    if block_rows is not None:
        return block_shuffled(seed, block_rows=block_rows), f"shuffled in blocks of {block_rows:,}"
    return (shuffled(seed), "shuffled") if shuffle else (sequential(), "in sequence")


def with_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Sources side by side, as ``Feeder`` takes them in a tuple."""
    words = "Another source, whose rows go with those of FILE, as labels with images: a file or a quoted pattern. May be repeated."
    return click.option("--with", "others", multiple=True, metavar="FILE", help=words)(command)


def expanded(files: Sequence[str]) -> list[str]:
    """Files, with those of each pattern in its place; a pattern that none matches stays."""
    names = []
    for name in files:
        is_pattern = glob.has_magic(name) and "://" not in name and not os.path.exists(name)
        names += (sorted(glob.glob(name)) if is_pattern else []) or [name]
    return names


def open_rows(files: Sequence[str]) -> AnyShardedStore:
    """The rows of files: one, or shards of one source; here, or elsewhere (``s3://…``).

    The caller closes it.

    Raises:
        PinfeedError: As ``MmapStore`` and ``RemoteStore`` do.
    """
    from pinfeed.stores import MmapStore, RemoteStore
    from pinfeed.stores.paths import has_protocol

    names = expanded(files)
    opened = RemoteStore if has_protocol(names[0]) else MmapStore
    try:
        # A pattern that none matches is told apart there.
        return opened(names[0] if len(names) == 1 else names)
    except StoreError as error:
        if "shards do not match" not in str(error):
            raise
        raise StoreError(
            f"{error}; several files are shards of one source: give what goes with them, such as labels, as --with FILE"
        ) from None


@contextlib.contextmanager
def open_sources(files: Sequence[str], others: Sequence[str]) -> Iterator[list[AnyShardedStore]]:
    """The rows of files, and of each other source beside them, until the context ends.

    Raises:
        PinfeedError: As ``open_rows`` does.
        StoreError: If the sources have unequal numbers of rows.
    """
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(contextlib.closing(open_rows(names)))
            for names in (files, *([other] for other in others))
        ]
        if any(store.n_rows != stores[0].n_rows for store in stores):
            counts = ", ".join(f"{_files_of(store)} has {store.n_rows:,}" for store in stores)
            raise StoreError(
                f"sources have unequal numbers of rows: {counts}; expected equally many, as a sample has one row of each"
            )
        yield stores


def source_of(stores: Sequence[AnyShardedStore]) -> Any:
    """Return the source of a ``Feeder``: the one store, or a tuple of several."""
    return stores[0] if len(stores) == 1 else tuple(stores)


def row_nbytes_of(stores: Sequence[AnyShardedStore]) -> int:
    """Bytes of one row of all sources together."""
    return sum(store.row_nbytes for store in stores)


def usual_batch(row_nbytes: int) -> int:
    """Rows of a batch where nobody says: a power of two, up to 1024 rows and 16 MiB."""
    return 1 << (max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_nbytes))).bit_length() - 1)


def described(store: AnyShardedStore) -> str:
    """A source in words."""
    size = human(store.n_rows * store.row_nbytes)
    return f"{_files_of(store)}: {store.n_rows:,} rows of shape {store.row_shape}, {store.dtype}, {size}"


def all_described(stores: Sequence[AnyShardedStore]) -> str:
    """Sources in words, a paragraph each."""
    return "\n".join(
        wrapped(described(store), "with " if i else "", "  ") for i, store in enumerate(stores)
    )


def _files_of(store: AnyShardedStore) -> str:
    n_more = len(store.paths) - 1
    return (
        f"{store.paths[0]} and {n_more} more shard{'s' * (n_more > 1)}"
        if n_more
        else store.paths[0]
    )


def sources_values(stores: Sequence[AnyShardedStore]) -> dict[str, Any]:
    """Sources for scripts: the first one, and those beside it."""
    return {"source": values_of(stores[0]), "with": [values_of(store) for store in stores[1:]]}


def values_of(store: AnyShardedStore) -> dict[str, Any]:
    """A source for scripts."""
    return {
        "files": store.paths,
        "rows": store.n_rows,
        "row_shape": store.row_shape,
        "dtype": str(store.dtype),
        "row_bytes": store.row_nbytes,
        "bytes": store.n_rows * store.row_nbytes,
    }
