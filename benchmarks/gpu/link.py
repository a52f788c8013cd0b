"""Throughput of the link between host and device, and of a feeder's loop."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.bench import (
    Bench,
    as_rows,
    expected_rows,
    long_rows_last,
    rate,
    wait,
    words,
)
from benchmarks.gpu.ceilings import BLOCKS, DIRECTIONS, Ceilings
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import Feeder, PinnedStore

_BATCH_BYTES = 16 << 20
_N_WARM = 8
_ROUTE_SIZES = (512, 4096, 65_536, 64, 32_768, 128, 1024, 16_384, 256, 1 << 20)
_N_CONSECUTIVE = 3
_TABLE_GB = 8
_SMALL_GB = 1


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


def routes(run: Run) -> list[Cell]:
    """Return cells of a feeder's loops without a step, with and without write-back."""
    memory = functools.cache(lambda: words((2 << 30) if run.cuda else (256 << 20), pin=run.cuda))
    seconds = 0.5 if run.cuda else 0.1

    def measured(row_nbytes: int, write: bool, route: str, order: str) -> Fields:
        return loop_rate(
            as_rows(memory(), row_nbytes),
            run.device,
            route if run.cuda else None,
            order,
            write=write,
            seconds=seconds,
        )

    sizes = _ROUTE_SIZES if run.cuda else (512, 4096)
    both = (False, True)
    consecutive = itertools.product(sizes[:_N_CONSECUTIVE], both, ("direct",), ("consecutive",))
    random = itertools.product(sizes, both, ("direct", "staged"), ("shuffled",))
    cells = []
    for row_nbytes, write, route, order in (*consecutive, *random):
        key = {"row_nbytes": row_nbytes, "write": write, "route": route, "order": order}
        cells.append(Cell(key, functools.partial(measured, row_nbytes, write, route, order)))
    return long_rows_last(cells)


def loop_rate(
    store: PinnedStore, device: str, route: str | None, order: str, *, write: bool, seconds: float
) -> Fields:
    """Return GB/s of rows in a loop without a step, in the steady state.

    Rows that are written back count in both directions.
    """
    row_nbytes = store.array.nbytes // store.n_rows
    batch_size = max(1, _BATCH_BYTES // row_nbytes)
    shuffle = order == "shuffled"
    with Feeder(
        store, batch_size=batch_size, shuffle=shuffle, drop_last=True, device=device, route=route
    ) as feeder:
        with contextlib.closing(feeder.batches()) as batches:
            for batch in itertools.islice(batches, 2):
                expected = torch.from_numpy(expected_rows(batch.rows, row_nbytes))
                if not torch.equal(batch.data.cpu(), expected):
                    raise AssertionError(
                        f"rows of {row_nbytes} bytes by the {feeder.plan.route} route are wrong"
                    )
        rates = [_epoch_rate(feeder, device, seconds, write=write)]
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            rates.append(_epoch_rate(feeder, device, seconds, write=write))
        epoch_nbytes = batch_size * row_nbytes * (1 + write)
        return {
            "gb_per_s": rate(epoch_nbytes, 1 / max(rates)),
            "epochs": len(rates),
            "batch_size": batch_size,
            "plan": feeder.plan.route,
            "notes": list(feeder.plan.notes),
        }


def _epoch_rate(feeder: Feeder, device: str, seconds: float, *, write: bool) -> float:
    """Return the batches per second of an epoch, after the first ones, for up to ``seconds``."""
    n_warm = min(_N_WARM, len(feeder) // 2)
    begin = 0.0
    i = 0
    with contextlib.closing(feeder.batches()) as batches:
        for i, batch in enumerate(batches):
            if i == n_warm:
                wait(device)
                begin = time.perf_counter()
            if write:
                batch.write_back(batch.data)
            if i > n_warm and time.perf_counter() - begin > seconds:
                break
        wait(device)
        # The batch after which the time begins does not count.
        return (i - n_warm) / (time.perf_counter() - begin)
