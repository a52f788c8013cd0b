"""What is written on the command line: sizes, lists of numbers, files, and how their rows become batches."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..config import human

if TYPE_CHECKING:
    from ..stores.sharded import AnyShardedStore

_UNITS = {"": 1, "b": 1, **{f"{k}ib": 1 << 10 * i for i, k in enumerate("kmgt", 1)}, **{f"{k}b": 1000**i for i, k in enumerate("kmgt", 1)}}
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 1024


def size(text: str) -> int:
    """Bytes, as ``2GiB``, ``512MiB``, ``1.5e9``."""
    found = _NUMBER.fullmatch(text.strip())
    nbytes = float(found[1]) * _UNITS.get(found[2].lower(), math.nan) if found else math.nan
    if not 1 <= nbytes < 1 << 63:
        raise click.BadParameter(f"{text!r} is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9")
    return int(nbytes)


def counts(text: str) -> tuple[int, ...]:
    """Numbers with commas between, as ``0,2``."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise click.BadParameter(f"{text!r} is not a list of numbers; expected such as 0 or 0,2,8")
    return tuple(map(int, text.split(",")))


def order_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How rows are put into batches, as ``Feeder`` takes it."""
    for option in (
        click.option("--seed", type=int, default=0, show_default=True, help="Of the random order."),
        click.option("--block-rows", type=click.IntRange(1), metavar="ROWS", help="Random order, in blocks of so many neighbouring rows."),
        click.option("--shuffle", is_flag=True, help="Rows in random order."),
        click.option("--batch-size", type=click.IntRange(1), metavar="ROWS", help="Rows of a batch."),
    ):
        command = option(command)
    return command


def order_of(shuffle: bool, block_rows: int | None, seed: int) -> tuple[Any, str]:
    """The order, and what it is called.

    Raises:
        click.UsageError: Two of them.
    """
    from ..rows import block_shuffled, sequential, shuffled

    if shuffle and block_rows is not None:
        raise click.UsageError("--shuffle and --block-rows: give one of them")
    if block_rows is not None:
        return block_shuffled(seed, block_rows=block_rows), f"shuffled in blocks of {block_rows:,}"
    return (shuffled(seed), "shuffled") if shuffle else (sequential(), "in sequence")


def expanded(files: Sequence[str]) -> list[str]:
    """Files, with those of each pattern in its place; a pattern that none matches stays."""
    names = []
    for name in files:
        is_pattern = glob.has_magic(name) and "://" not in name and not os.path.exists(name)
        names += (sorted(glob.glob(name)) if is_pattern else []) or [name]
    return names


def open_rows(files: Sequence[str]) -> AnyShardedStore:
    """The rows of files: one, or shards of one source; here, or elsewhere (``s3://…``). The caller closes it.

    Raises:
        PinfeedError: As ``MmapStore`` and ``RemoteStore`` do.
    """
    from ..stores import MmapStore, RemoteStore
    from ..stores.remote import has_protocol

    names = expanded(files)
    opened = RemoteStore if has_protocol(names[0]) else MmapStore
    return opened(names[0] if len(names) == 1 else names)  # a pattern that none matches is told apart there


def usual_batch(row_nbytes: int) -> int:
    """Rows of a batch where nobody says: a power of two, up to 1024 rows and 16 MiB."""
    return 1 << (max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_nbytes))).bit_length() - 1)


def described(store: AnyShardedStore) -> str:
    """A source in words."""
    files = store.paths[0] if len(store.paths) == 1 else f"{store.paths[0]} and {len(store.paths) - 1} more"
    return f"{files}: {store.n_rows:,} rows of shape {store.row_shape}, {store.dtype}, {human(store.n_rows * store.row_nbytes)}"


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
