"""Both routes in a feeder's own loop, by row size and by the length of the step."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.bench import as_rows, expected_rows, wait, words
from benchmarks.gpu.conditions import clocks
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.steps import Products
from pinfeed import Feeder

_ROW_BYTES = (512, 4096)
_BATCH_BYTES = (64 << 20, 16 << 20)
_PRODUCTS = (0, 16, 8, 32)
_DEPTH = 2
_N_BATCHES = 24
_N_ROUNDS = 3
_ROUTES = ("direct", "staged")


def in_loop(run: Run) -> list[Cell]:
    """Return cells of loops on both routes.

    The default is right if it is close to the faster one in every cell.
    """
    memory = functools.cache(lambda: words((2 << 30) if run.cuda else (8 << 20), pin=run.cuda))
    products = functools.cache(lambda: Products(run.device, 4096))
    sizes = _BATCH_BYTES if run.cuda else (64 << 10,)

    def measure(row_nbytes: int, batch_nbytes: int, n_products: int) -> Fields:
        store = as_rows(memory(), row_nbytes)
        found: Fields = {}
        for route in _ROUTES if run.cuda else (None,):
            options: Fields = {"batch_size": batch_nbytes // row_nbytes, "depth": _DEPTH}
            with Feeder(store, shuffle=True, device=run.device, route=route, **options) as feeder:
                step = functools.partial(products(), n_products)
                times = _round_times(run, feeder, row_nbytes, step)
                found[route or "default"] = {
                    "batch_ms": round(statistics.median(times) * 1e3, 4),
                    "rounds_ms": [round(one * 1e3, 4) for one in times],
                    "plan": feeder.plan.route,
                    "notes": list(feeder.plan.notes),
                    "conditions": clocks(),
                }
        return found

    return [
        Cell(
            {"row_nbytes": row_nbytes, "batch_mib": size >> 20, "products": n_products},
            functools.partial(measure, row_nbytes, size, n_products),
        )
        for size, n_products, row_nbytes in itertools.product(sizes, _PRODUCTS, _ROW_BYTES)
    ]


def _round_times(
    run: Run, feeder: Feeder, row_nbytes: int, step: Callable[[], object]
) -> list[float]:
    """Compare the first batch, and return the seconds of a batch in each round."""
    times = []
    n_rounds, n_batches = (_N_ROUNDS, _N_BATCHES) if run.cuda else (1, 4)
    for i in range(1 + n_rounds):
        wait(run.device)
        begin = time.perf_counter()
        count = 0
        for batch in feeder.batches():
            if i == count == 0:
                expected = torch.from_numpy(expected_rows(batch.rows, row_nbytes))
                if not torch.equal(batch.data.cpu(), expected):
                    raise AssertionError(f"rows of {row_nbytes} bytes are wrong")
            step()
            count += 1
            if count == n_batches:
                break
        wait(run.device)
        times.append((time.perf_counter() - begin) / count)
    # The first round loads code, and the feeder may choose its route in it.
    return times[1:]
