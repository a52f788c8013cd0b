"""Rows over the link with a cache of table rows, and the cost of the cache's policy.

Rows are counted, not timed, so no GPU is needed. Run it from the root:

    # two minutes
    python -m benchmarks.cache
    # small tables; saves nothing
    python -m benchmarks.cache --quick

Figures are relative to a loop without a cache, which copies each distinct row of a batch to the
device and back:

- *first tenth*: rows to the device in the first tenth of the batches, with an empty cache and no
  counts
- *late*: rows to the device in the last quarter of the batches
- *all*: rows to the device in the whole loop; as many come back, some of them at its end
- *later*: the same in a second loop over the same batches
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from benchmarks.environment import environment, save
from examples import word2vec
from pinfeed.pipeline.cache_policy import CachePolicy

SHARES = (0.01, 0.05, 0.1)

Record = dict[str, Any]


class Size(NamedTuple):
    """Size of a random stream: rows of the table, row indices of a batch, and batches."""

    n_rows: int = 10_000_000
    n_ids: int = 65_536
    n_batches: int = 2000


class Stream(NamedTuple):
    """Batches of row indices of one table.

    Attributes:
        name: Name of the stream.
        n_rows: Rows of the table.
        n_ids: Row indices of a batch, repeated ones too; a mean where batches differ.
        batches: Distinct rows of each batch, ascending.
    """

    name: str
    n_rows: int
    n_ids: float
    batches: list[np.ndarray]


def zipf(exponent: float, size: Size) -> Stream:
    """Draw rows whose probability falls with a power of their rank.

    The ranks are scattered over the table at random.
    """
    rng = np.random.default_rng(1)
    cumulated = np.cumsum(np.arange(1, size.n_rows + 1) ** -exponent)
    rows_of_ranks = rng.permutation(size.n_rows).astype(np.int32)
    batches = []
    for _ in range(size.n_batches):
        # Sorted numbers are found many times faster.
        drawn = np.sort(rng.random(size.n_ids)) * cumulated[-1]
        ranks = np.minimum(np.searchsorted(cumulated, drawn), size.n_rows - 1)
        batches.append(np.unique(rows_of_ranks[ranks]))
    return Stream(f"Zipf({exponent})", size.n_rows, size.n_ids, batches)


def uniform(size: Size) -> Stream:
    """Draw rows that all have the same probability."""
    rng = np.random.default_rng(1)
    batches = [
        np.unique(rng.integers(size.n_rows, size=size.n_ids, dtype=np.int32))
        for _ in range(size.n_batches)
    ]
    return Stream("uniform", size.n_rows, size.n_ids, batches)


def word2vec_stream(key: str, size: Size) -> Stream:
    """Return the rows of one table of the example, in the order of its batches."""
    words, text = word2vec.read_words(word2vec.MAX_BYTES)
    pairs = word2vec.Pairs(text, 8192, size.n_batches)
    ids = [pairs[number][key].numpy().ravel() for number in range(size.n_batches)]
    n_ids = sum(map(len, ids)) / len(ids)
    batches = [np.unique(one).astype(np.int32) for one in ids]
    return Stream(f"word2vec, {key}", len(words), n_ids, batches)


# Random streams have as many batches as it takes until their misses change little.
STREAMS: list[tuple[Callable[[Size], Stream], int]] = [
    (partial(zipf, 1.05), 2000),
    (partial(zipf, 1.2), 4000),
    (uniform, 400),
    (partial(word2vec_stream, "center"), 1000),
    (partial(word2vec_stream, "others"), 1000),
]


def figures(stream: Stream, capacity: int) -> Record:
    """Run two loops over a stream, and return their figures.

    Raises:
        AssertionError: If more rows are copied than without a cache.
    """
    policy = CachePolicy(stream.n_rows, capacity)
    n = len(stream.batches)
    n_read, cpu_ns = counted(policy, stream)
    late = slice(n * 3 // 4, n)
    found = {
        "first": link_share(stream, n_read, slice(0, n // 10)),
        "late": link_share(stream, n_read, late),
        "loop": link_share(stream, n_read, slice(0, n)),
        "later": link_share(stream, counted(policy, stream)[0], slice(0, n)),
        "ns": float(np.median(cpu_ns[late])) / stream.n_ids,
        "nbytes": policy.nbytes,
    }
    assert max(found["loop"], found["later"]) <= 1
    return found


def counted(policy: CachePolicy, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """Run a loop; return for each batch the rows to the device, and the time of the decision."""
    policy.begin()
    n_read, cpu_ns = (np.zeros(len(stream.batches), np.int64) for _ in range(2))
    for number, batch in enumerate(stream.batches):
        rows = batch.astype(np.int64)
        begin = time.thread_time_ns()
        moves = policy.decide(rows)
        cpu_ns[number] = time.thread_time_ns() - begin
        policy.note_done(moves)
        n_read[number] = len(moves.gathered)
    return n_read, cpu_ns


def link_share(stream: Stream, n_rows: np.ndarray, batches: slice) -> float:
    """Return the rows in one direction, relative to those without a cache."""
    return float(n_rows[batches].sum() / sum(len(rows) for rows in stream.batches[batches]))


def measure(stream: Stream) -> list[Record]:
    """Return a record for each size of the cache."""
    records = []
    for share in SHARES:
        found = figures(stream, int(share * stream.n_rows))
        records.append({"stream": stream.name, "cache": share, **found})
        print(f"{stream.name}, {share:.0%}", flush=True)
    return records


def report(records: list[Record]) -> str:
    """Return the figures as a table in Markdown."""
    rows = []
    for record in records:
        cells = [f"{record[key]:.3f}" for key in ("first", "late", "loop", "later")]
        costs = [f"{record['ns']:.1f}", f"{record['nbytes'] / 2**20:.1f}"]
        rows.append([record["stream"], f"{record['cache']:.0%}", *cells, *costs])
    heads = ["ids", "cache", "first tenth", "late", "all", "later"]
    heads += ["ns per id", "policy, MiB"]
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small tables; saves nothing")
    quick = parser.parse_args().quick
    print(environment())
    records: list[Record] = []
    # One stream at a time is in memory.
    for make, n_batches in STREAMS:
        size = Size(500_000, 8192, n_batches // 10) if quick else Size(n_batches=n_batches)
        records += measure(make(size))
    print(report(records))
    if not quick:
        path = save("cache", records)
        path.with_suffix(".md").write_text(report(records) + "\n")
        print(path)


if __name__ == "__main__":
    main()
