"""Throughput of the link between host and device: the limit of every transfer."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import BLOCKS, DIRECTIONS, Ceilings
from benchmarks.gpu.recorder import Cell, Fields, Run

_TABLE_GB = 2
_SMALL_GB = 0.5


def ceilings(run: Run) -> list[Cell]:
    """Return cells of the throughput of blocks and rows of a table, by copy engine and kernels."""
    bench = functools.cache(lambda: Bench(run.device))
    memory = functools.cache(lambda: bench().words(int(_TABLE_GB * 1e9) if run.cuda else 64 << 20))
    made = functools.cache(lambda: Ceilings(bench(), memory()))

    def smaller() -> Fields:
        # In memory of its own, because a machine may have too little for the large table.
        words_of_it = bench().words(int(_SMALL_GB * 1e9) if run.cuda else 8 << 20)
        small = Ceilings(bench(), words_of_it)
        return {**small.few(), "conditions": small.conditions()}

    ways: list[tuple[Fields, Callable[[str], float]]] = [
        ({"by": "copy engine"}, lambda direction: made().engine(direction)),
        ({"by": "plain kernel"}, lambda direction: made().plain(direction)),
    ]
    for n_blocks in (8, *(n for n in BLOCKS if n != 8)):
        for what, random in (("blocks", False), ("random rows", True)):
            by_blocks = functools.partial(
                lambda n, random, direction: made().kernel(n, direction, random=random),
                n_blocks,
                random,
            )
            ways.append(({"by": "row kernel", "what": what, "n_blocks": n_blocks}, by_blocks))
    table: Fields = {"table_gb": _TABLE_GB if run.cuda else 0.064}
    cells = [
        Cell({**table, **key, "direction": direction}, functools.partial(_gb_per_s, way, direction))
        for key, way in ways
        for direction in DIRECTIONS
    ]
    conditions = Cell({"what": "conditions", **table}, lambda: made().conditions())
    few = Cell({"what": "ceilings", "table_gb": _SMALL_GB if run.cuda else 0.008}, smaller)
    # The cells of the copy engine, both kernels and the smaller table matter most, so they are
    # first.
    n_first = 4 * len(DIRECTIONS)
    return [*cells[:n_first], conditions, few, *cells[n_first:]]


def _gb_per_s(way: Callable[[str], float], direction: str) -> Fields:
    return {"gb_per_s": way(direction)}
