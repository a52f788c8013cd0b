"""Rows over the link with a cache of table rows, and the cost of the cache's policy.

Rows are counted, not timed, so no GPU is needed. Run it from the root:

    python -m benchmarks.cache            (six minutes)
    python -m benchmarks.cache --quick    (small tables; saves nothing)

The policy, Belady's offline optimum and a loop without a cache see the same batches; a checksum
asserts it. Four figures are relative to a loop without a cache, which copies each distinct row of a
batch to the device and back:

- *first tenth*: rows to the device in the first tenth of the batches, with an empty cache and no
  counts
- *late, in* and *late, out*: rows to the device and back in the last quarter of the batches
- *all*: rows both ways in the whole loop, with the write-back of the cached rows at its end

Misses in the last quarter are compared with three others: Belady's, those of a cache that always
holds the most probable rows, and those of the same policy with probabilities instead of counts. If
draws are independent and no batch is known ahead, no policy misses fewer rows than the cache of the
most probable rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from benchmarks.cache_optimum import InformedPolicy, belady_misses, fixed_misses
from benchmarks.cache_streams import Size, Stream, uniform, word2vec_streams, zipf
from benchmarks.environment import environment, save
from pinfeed.pipeline.cache_policy import CachePolicy

SIZE = (10_000_000, 65_536)
"""Rows of the tables of random streams, and row indices of a batch."""
QUICK_SIZE = (500_000, 8192)
RANDOM_STREAMS: list[tuple[Callable[[Size], Stream], int]] = [
    (partial(zipf, 1.05), 2000),
    (partial(zipf, 1.2), 4000),
    (uniform, 400),
]
"""Random streams, and the batches after which their misses change little."""
N_WORD2VEC = 1000
QUICK_PART = 10
SHARES = (0.01, 0.05, 0.1)
DEFAULT_LOOK_AHEAD = 2
LOOK_AHEADS = (0, DEFAULT_LOOK_AHEAD, 8, 256)
INFORMED_LOOK_AHEADS = (0, 8, 32, 128, 256)
GOAL_LINK = {("Zipf(1.05)", 0.1): 0.3, ("Zipf(1.2)", 0.1): 0.1}
GOAL_MISSES = 1.15
GOAL_NS = 20

Record = dict[str, Any]


class Run(NamedTuple):
    """Figures of each batch of a loop with a cache.

    Attributes:
        n_in: Rows to the device.
        n_out: Rows back from the device.
        n_held: Rows in the cache at the end of the loop.
        cpu_ns: CPU time of the policy.
        checksum: Checksum of all rows.
    """

    n_in: np.ndarray
    n_out: np.ndarray
    n_held: int
    cpu_ns: np.ndarray
    checksum: int


def checksum(stream: Stream) -> int:
    """Return the checksum of all batches."""
    found = 0
    for rows in stream.batches:
        found = zlib.crc32(rows, found)
    return found


def run(policy: CachePolicy, stream: Stream, n_ahead: int) -> Run:
    """Run a loop over a stream, with ``n_ahead`` later batches announced."""
    policy.begin()
    n = len(stream.batches)
    n_in = np.empty(n, np.int64)
    n_out = np.empty(n, np.int64)
    cpu_ns = np.zeros(n, np.int64)
    seen = 0
    n_announced = 0
    for number, batch in enumerate(stream.batches):
        for announced in stream.batches[n_announced : number + n_ahead + 1]:
            rows = announced.astype(np.int64)
            begin = time.thread_time_ns()
            policy.announce(rows)
            cpu_ns[n_announced] += time.thread_time_ns() - begin
            n_announced += 1
        rows = batch.astype(np.int64)
        begin = time.thread_time_ns()
        moves = policy.decide(rows)
        cpu_ns[number] += time.thread_time_ns() - begin
        n_in[number] = len(moves.bypassed) + len(moves.admitted)
        n_out[number] = len(moves.bypassed) + len(moves.evicted_rows)
        assert n_in[number] + len(moves.hits) == len(batch)
        seen = zlib.crc32(batch, seen)
    n_held = int(np.count_nonzero(policy.rows_of_slots >= 0))
    return Run(n_in, n_out, n_held, cpu_ns, seen)


def measure(stream: Stream) -> list[Record]:
    """Return a record for each size of the cache."""
    records = []
    for share in SHARES:
        capacity = int(share * stream.n_rows)
        optimum = belady_misses(stream.batches, stream.n_rows, capacity)
        fixed = fixed_misses(stream.batches, stream.probabilities, capacity)
        late = slice(len(stream.batches) * 3 // 4, None)
        record: Record = {
            "stream": stream.name,
            "cache": share,
            "capacity": capacity,
            "n_ids": stream.n_ids,
            "n_distinct": float(np.mean([len(rows) for rows in stream.batches])),
            "belady": link_share(stream, optimum, late),
            "fixed_ratio": ratio(fixed, optimum, late),
            "nbytes": CachePolicy.nbytes_for(stream.n_rows, capacity),
            "look_aheads": {},
            "informed_ratios": {},
        }
        for n_ahead in LOOK_AHEADS:
            found = run(CachePolicy(stream.n_rows, capacity), stream, n_ahead)
            record["look_aheads"][n_ahead] = figures(stream, found, optimum)
        for n_ahead in INFORMED_LOOK_AHEADS:
            found = run(InformedPolicy(stream.probabilities, capacity), stream, n_ahead)
            assert found.checksum == checksum(stream)
            record["informed_ratios"][n_ahead] = ratio(found.n_in, optimum, late)
        print(f"{stream.name}, {share:.0%}", flush=True)
        records.append(record)
    return records


def figures(stream: Stream, found: Run, optimum: np.ndarray) -> Record:
    """Return the figures of a loop.

    Raises:
        AssertionError: If the policy saw other rows, or if more rows were copied than without a
            cache.
    """
    n = len(stream.batches)
    everything = slice(0, n)
    late = slice(n * 3 // 4, n)
    assert found.checksum == checksum(stream)
    # A missed row is copied back once: when it is bypassed, when it is evicted, or at the end.
    assert found.n_in.sum() == found.n_out.sum() + found.n_held
    assert link_share(stream, found.n_in, everything) <= 1
    return {
        "first": link_share(stream, found.n_in, slice(0, n // 10)),
        "late_in": link_share(stream, found.n_in, late),
        "late_out": link_share(stream, found.n_out, late),
        "loop": link_share(stream, found.n_in, everything),
        "ratio": ratio(found.n_in, optimum, late),
        "loop_ratio": ratio(found.n_in, optimum, everything),
        "ns": float(np.median(found.cpu_ns[late])) / stream.n_ids,
        "ns_best_quarter": float(np.quantile(found.cpu_ns[late], 0.25)) / stream.n_ids,
        "ns_of_distinct": statistics.median(
            cpu_ns / max(1, len(rows))
            for cpu_ns, rows in zip(found.cpu_ns[late], stream.batches[late], strict=True)
        ),
    }


def link_share(stream: Stream, n_rows: np.ndarray, batches: slice) -> float:
    """Return the rows in one direction, relative to those without a cache."""
    return float(n_rows[batches].sum() / sum(len(rows) for rows in stream.batches[batches]))


def ratio(misses: np.ndarray, optimum: np.ndarray, batches: slice) -> float:
    """Return the ratio of misses to those of the optimum."""
    return float(misses[batches].sum() / max(1, optimum[batches].sum()))


def report(records: list[Record]) -> str:
    """Return the figures as tables in Markdown."""
    rows = []
    for record in records:
        for n_ahead, found in record["look_aheads"].items():
            cells = [found[key] for key in ("first", "late_in", "late_out", "loop")]
            ratios = [found["ratio"], found["loop_ratio"]]
            cells = [f"{cell:.3f}" for cell in cells] + [f"{one:.2f}" for one in ratios]
            costs = [f"{found['ns']:.1f}", f"{record['nbytes'] / 2**20:.1f}"]
            rows.append([record["stream"], f"{record['cache']:.0%}", n_ahead, *cells, *costs])
    heads = ["ids", "cache", "look-ahead", "first tenth", "late, in", "late, out", "all"]
    heads += ["late misses / Belady", "all misses / Belady", "ns per id", "policy, MiB"]
    policy = tabulate(rows, heads, tablefmt="github", disable_numparse=True)

    rows = []
    for record in records:
        ratios = [record["fixed_ratio"], *record["informed_ratios"].values()]
        cells = [f"{record['belady']:.3f}", *(f"{one:.2f}" for one in ratios)]
        rows.append([record["stream"], f"{record['cache']:.0%}", *cells])
    heads = ["ids", "cache", "Belady", "most probable rows"]
    heads += [f"look-ahead {n}" for n in INFORMED_LOOK_AHEADS]
    optima = tabulate(rows, heads, tablefmt="github", disable_numparse=True)
    lines = "\n".join(f"- {line}" for line in goals(records))
    return (
        "<!-- --8<-- [start:tables] -->\n"
        "Rows that are copied to the device (in) and back (out), relative to a loop without a "
        "cache. *Late* is the last quarter of the loop. The CPU time and the memory are those of "
        f"the cache's policy.\n\n{policy}\n\n"
        "The last quarter of the loop: the share of rows that Belady's optimum misses, and the "
        "misses of policies that know the probabilities of all rows, divided by the misses of the "
        "optimum:\n\n"
        f"{optima}\n<!-- --8<-- [end:tables] -->\n\n"
        f"Goals, with a look-ahead of {DEFAULT_LOOK_AHEAD} batches, or of {max(LOOK_AHEADS)} for "
        f"misses / Belady:\n\n{lines}"
    )


def goals(records: list[Record]) -> Iterator[str]:
    """Yield a line for each goal."""
    for record in records:
        found = record["look_aheads"][DEFAULT_LOOK_AHEAD]
        longest = record["look_aheads"][max(LOOK_AHEADS)]
        name = f"{record['stream']}, {record['cache']:.0%}"
        limits = [
            ("late rows over the link", found["late_in"], GOAL_LINK.get(key_of(record), 1.0)),
            ("late misses / Belady", longest["ratio"], GOAL_MISSES),
            ("ns per id", found["ns"], GOAL_NS),
        ]
        for what, value, limit in limits:
            verdict = "met" if value <= limit else "missed"
            yield f"{name}: {what}: {value:.2f}, goal {limit}: {verdict}"


def key_of(record: Record) -> tuple[str, float]:
    return record["stream"], record["cache"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small tables; saves nothing")
    arguments = parser.parse_args()
    print(environment())
    size, part = (QUICK_SIZE, QUICK_PART) if arguments.quick else (SIZE, 1)
    records: list[Record] = []
    # One random stream at a time is in memory.
    for make, n_batches in RANDOM_STREAMS:
        records += measure(make(Size(*size, n_batches // part)))
    for stream in word2vec_streams(N_WORD2VEC // part):
        records += measure(stream)
    print(report(records))
    if not arguments.quick:
        path = save("cache", records)
        path.with_suffix(".md").write_text(report(records) + "\n")
        print(path)


if __name__ == "__main__":
    main()
