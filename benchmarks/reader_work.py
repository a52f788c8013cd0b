"""The time that reader threads need for the row indices of a batch, per core.

Run it from the root:

    python -m benchmarks.reader_work                       (one minute)
    python -m benchmarks.reader_work --before CHECKOUT     (an earlier pinfeed, too, in turn)

Every function runs alone in one thread, and its CPU time is measured. The table compares it with
the time in which the link to a GPU moves the batch's rows of 512 B.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.earlier import Earlier, add_before, opened
from benchmarks.environment import environment
from pinfeed.pipeline import recent_rows
from pinfeed.pipeline.cache_policy import CachePolicy
from pinfeed.rows.indices import distinct_rows, first_occurrences
from pinfeed.rows.orders import shuffled

SIZES = (8192, 65_536)
N_TABLE_ROWS = 1 << 24
N_REPEATS = 100
N_ROUNDS = 3
# Bytes per second of the link, and bytes of a row.
LINK_RATE = 50e9
ROW_NBYTES = 512

Work = Iterator[Callable[[], object]]
"""Calls to measure, one per batch."""


def compared(n_rows: int, share: float, n_batches: int, in_order_only: bool) -> Work:
    """Compare the rows of each batch with those of the ``n_batches`` batches before it.

    Args:
        n_rows: Rows of a batch.
        share: Share of its rows that are also in the previous batch.
        n_batches: Number of batches before it that may be written.
        in_order_only: Whether to measure only the work that readers do in the order of batches.
    """
    rng = np.random.default_rng(0)
    step = round(n_rows * (1 - share))
    pool = rng.choice(N_TABLE_ROWS, 40 * n_rows, replace=False)
    recent = recent_rows.RecentRows(n_batches)
    for number in range(N_REPEATS):
        rows = rng.permutation(pool[(step * number + np.arange(n_rows)) % len(pool)])
        if not hasattr(recent_rows, "hash_groups"):
            # An earlier pinfeed does everything in order.
            yield lambda number=number, rows=rows: recent.add(number, [rows], ())
        elif in_order_only:
            hashed = recent_rows.hash_groups([rows])
            yield lambda number=number, hashed=hashed: recent.add(number, hashed, ())
        else:
            yield lambda number=number, rows=rows: recent.add(
                number, recent_rows.hash_groups([rows]), ()
            ).find()


def made_distinct(n_rows: int, is_skewed: bool, keeps_order: bool) -> Work:
    """Find the distinct rows among uniform ids, or among ids of Zipf's distribution."""
    function = first_occurrences if keeps_order else distinct_rows
    for rows in _ids(n_rows, is_skewed):
        yield lambda rows=rows: function(rows)


def drawn(n_rows: int, n_table_rows: int) -> Work:
    """Draw shuffled rows of a table."""
    at = shuffled(0).bind(n_table_rows, 0)
    for number in range(N_REPEATS):
        positions = (number * n_rows + np.arange(n_rows)) % n_table_rows
        yield lambda positions=positions: at(positions)


def cached(n_rows: int, n_ahead: int) -> Work:
    """Announce and decide the rows of each batch in a cache of 10% of the table."""
    policy = CachePolicy(N_TABLE_ROWS, N_TABLE_ROWS // 10)
    batches = [np.unique(ids) for ids in _ids(n_rows, is_skewed=True)]
    for rows in batches[:n_ahead]:
        policy.announce(rows)
    for rows, announced in zip(batches, batches[n_ahead:], strict=False):
        yield lambda rows=rows, announced=announced: (
            policy.announce(announced),
            policy.decide(rows),
        )


def _ids(n_rows: int, is_skewed: bool) -> list[np.ndarray]:
    """Return the ids of batches, uniform or with Zipf's distribution with exponent 1.05."""
    rng = np.random.default_rng(0)
    if not is_skewed:
        return [rng.integers(N_TABLE_ROWS, size=n_rows) for _ in range(N_REPEATS)]
    cumulated = np.cumsum(np.arange(1, N_TABLE_ROWS + 1) ** -1.05)
    rows_of_ranks = rng.permutation(N_TABLE_ROWS)
    return [
        rows_of_ranks[np.searchsorted(cumulated, rng.random(n_rows) * cumulated[-1])]
        for _ in range(N_REPEATS)
    ]


def cells(sizes: list[int]) -> dict[str, list[Any]]:
    """Return the work of each line of the table: a function, and its arguments."""
    found: dict[str, list[Any]] = {}
    for n in sizes:
        for share in (0, 0.5, 1):
            for n_batches in (1, 2, 4):
                name = f"{n:,} rows: compare with {n_batches} batches, {share:.0%} shared"
                found[name] = ["compared", n, share, n_batches, False]
            found[f"{name}: in order"] = ["compared", n, share, n_batches, True]
        for is_skewed, ids in ((False, "uniform"), (True, "Zipf(1.05)")):
            found[f"{n:,} {ids} ids: distinct rows"] = ["made_distinct", n, is_skewed, False]
            found[f"{n:,} {ids} ids: first occurrences"] = ["made_distinct", n, is_skewed, True]
        for n_table_rows in (10**5, 10**6, 10**8):
            name = f"{n:,} rows: draw from {n_table_rows:,} shuffled rows"
            found[name] = ["drawn", n, n_table_rows]
        found[f"{n:,} Zipf(1.05) ids: announce and decide, cache of 10%"] = ["cached", n, 2]
    return found


def measure(work: str, *arguments: Any) -> dict[str, float]:
    """Return the CPU time per batch, in microseconds: the minimum and the median."""
    spent = []
    for call in globals()[work](*arguments):
        begin = time.thread_time_ns()
        call()
        spent.append((time.thread_time_ns() - begin) / 1e3)
    # The first batches allocate memory, and have few batches to compare with.
    spent = spent[10:]
    return {"min": min(spent), "median": float(np.median(spent))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--only", default="", help="measure only lines that contain this text")
    add_before(parser)
    arguments = parser.parse_args()
    print(environment())
    results: dict[str, dict[str, dict[str, float]]] = {}
    with opened(arguments.before) as earlier:
        for name, work in cells(arguments.rows).items():
            if arguments.only in name:
                results[name] = _both(work, earlier)
    print(report(results))


def _both(work: list[Any], earlier: Earlier | None) -> dict[str, dict[str, float]]:
    """Measure some work with this pinfeed and an earlier one, in turn; keep the best round."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(N_ROUNDS):
        if earlier is not None:
            found = earlier.call("benchmarks.reader_work:measure", *work)
            rounds.setdefault("before", []).append(found)
        rounds.setdefault("after", []).append(measure(*work))
    return {key: min(found, key=lambda one: one["median"]) for key, found in rounds.items()}


def report(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the measurements as a table."""
    return tabulate(
        [
            [name, *(f"{found[key]['median']:,.0f} ({found[key]['min']:,.0f})" for key in found)]
            for name, found in results.items()
        ],
        ["CPU time in us: median (min)", *next(iter(results.values()))],
        tablefmt="github",
        disable_numparse=True,
    )


if __name__ == "__main__":
    main()
