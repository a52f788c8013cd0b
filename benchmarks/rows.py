"""Training steps on rows of a table on the host, with prefetching, without it, and in other ways.

Run it from the root:

    # 20 minutes
    python -m benchmarks.rows
    # two minutes
    python -m benchmarks.rows --quick
    # cells whose description contains this
    python -m benchmarks.rows --only Adagrad

Every contestant trains the same rows with the same optimizer. With Adam, the weights and two
tensors of state are copied. With Adagrad, FBGEMM takes part, because it has Adagrad on the CPU.
Losses are compared first. Each cell is timed twice. The step of the small model is mostly the
transfer. The step of the large model takes about as long as the transfer, so the whole transfer can
be hidden. The transfer is the time of the synchronous step minus that of a step on rows that are on
the device already. The contestants of a cell are timed in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import torch
from tabulate import tabulate

import pinfeed
from benchmarks import rowsteps
from benchmarks.environment import environment, save
from benchmarks.memory import free
from benchmarks.rowcells import Body, RowCell, wait
from benchmarks.rowcopies import best, to_and_from
from benchmarks.rowfbgemm import why_no_fbgemm
from benchmarks.rowsteps import STEP_ALONE

N_WARM = 8
N_STEPS = 200
BIG_ROWS = 10_000_000
"""Rows of the table whose memory is measured: 5.12 GB."""
BIG_DIM = 128

CELLS = [
    RowCell(dim, n_ids, repeated)
    for dim in (16, 128)
    for n_ids in (1024, 8192, 32768)
    for repeated in (0.0, 0.5)
]
CELLS += [RowCell(1024, n_ids, repeated) for n_ids in (1024, 8192) for repeated in (0.0, 0.5)]
CELLS += [RowCell(128, 8192, 0.0, shared) for shared in (0.5, 0.95)]
CELLS += [
    RowCell(dim, n_ids, 0.5, optimizer="Adagrad")
    for dim, n_ids in ((16, 1024), (16, 8192), (16, 32768), (128, 1024), (128, 8192), (128, 32768))
]
CELLS += [RowCell(1024, 8192, 0.5, optimizer="Adagrad")]
QUICK = [
    RowCell(16, 8192, 0.5),
    RowCell(128, 8192, 0.0),
    RowCell(128, 8192, 0.0, 0.5),
    RowCell(128, 32768, 0.5),
    RowCell(128, 8192, 0.5, optimizer="Adagrad"),
]

Times = dict[str, list[float]]
"""Seconds of a step of each contestant, in each round."""


def one_cell(cell: RowCell, device: str, n_rounds: int, n_steps: int = N_STEPS) -> dict[str, Any]:
    """Return milliseconds of a step of every contestant, with a small and a large model."""
    rowsteps.check(cell, device)
    runs = {STEP_ALONE: rowsteps.rows_there, **rowsteps.contestants(device, cell.optimizer)}
    ids = cell.batches(N_WARM + n_steps)
    cap_s = 0.8 if n_rounds == 1 else 0.4

    def time_all(n_products: int) -> Times:
        found: Times = {name: [] for name in runs}
        for _ in range(n_rounds):
            for name, run in runs.items():
                free()
                body = Body(cell, device, n_products)
                found[name].append(rowsteps.step_s(run, cell, body, ids, N_WARM, cap_s))
        return found

    small = time_all(0)
    median_s = {name: statistics.median(times) for name, times in small.items()}
    transfer_s = max(0.0, median_s["synchronous"] - median_s[STEP_ALONE])
    large = time_all(as_long_as_the_transfer(transfer_s * 1e3, cell, device))
    values = {"cell": str(cell), "n_ids": cell.n_ids}
    return values | _summary("small", small) | _summary("large", large)


def _summary(model: str, times: Times) -> dict[str, Any]:
    """Return medians in milliseconds, and the ratio of prefetching to the synchronous loop.

    The ratio is the median of those of the rounds, because a machine may be slower in some rounds.
    """
    pairs = zip(times["prefetch"], times["synchronous"], strict=True)
    medians_s = {name: statistics.median(of_rounds) for name, of_rounds in times.items()}
    return {
        f"{model}_ms": {name: round(seconds * 1e3, 3) for name, seconds in medians_s.items()},
        f"{model}_ratio": round(statistics.median(a / b for a, b in pairs), 3),
    }


def as_long_as_the_transfer(transfer_ms: float, cell: RowCell, device: str) -> int:
    """Return the number of matrix products that take as long as the transfer, at least 0.1 ms."""
    body = Body(cell, device)
    per_product = best(lambda: [body.products(50), wait(body)]) / 50
    return max(1, round(max(0.1, transfer_ms) / 1e3 / per_product))


def report(cells: list[dict[str, Any]]) -> str:
    """Return the cells as a table for each model."""
    parts = []
    for model in ("small", "large"):
        names = list(dict.fromkeys(name for cell in cells for name in cell[f"{model}_ms"]))
        rows = []
        for cell in cells:
            ms = cell[f"{model}_ms"]
            times = [f"{ms[name]:.2f}" if name in ms else "" for name in names]
            rows.append([cell["cell"], *times, f"{cell[f'{model}_ratio']:.2f}"])
        headers = ["", *names, "prefetch /\nsynchronous"]
        align = ("left", *["right"] * (len(names) + 1))
        table = tabulate(rows, headers, disable_numparse=True, colalign=align)
        parts.append(f"ms per step of a {model} model\n{table}")
    return "\n\n".join(parts)


def big_table(device: str, n_rows: int) -> dict[str, Any]:
    """Return the resident memory of a table, drawn and trained.

    A small table is trained first, to load the code.
    """

    def made_and_trained(n_rows: int) -> tuple[int, int]:
        table = pinfeed.HostEmbedding(n_rows, BIG_DIM, pin=device == "cuda", name="table")
        made = _peak()
        optimizer = pinfeed.RowOptimizer(torch.optim.SGD, [table], lr=0.1)
        rng = np.random.default_rng(0)
        ids = [torch.from_numpy(rng.integers(n_rows, size=4096)) for _ in range(50)]
        for batch in pinfeed.train_rows(
            ids, {table: lambda batch: batch}, optimizer=optimizer, device=device
        ):
            table(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return made, _peak()

    made_and_trained(10_000)
    before, nbytes = psutil.Process().memory_info().rss, 4 * n_rows * BIG_DIM
    made, trained = made_and_trained(n_rows)
    return {
        "rows": [n_rows, BIG_DIM],
        "table_gb": nbytes / 1e9,
        "made_over_table": round((made - before) / nbytes, 4),
        "trained_over_table": round((trained - before) / nbytes, 4),
    }


def _peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--quick", action="store_true", help="few cells, one round")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--rounds", type=int, help="rounds of all contestants in a cell")
    parser.add_argument("--memory", type=int, metavar="ROWS", help="measure one large table only")
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.memory:
        print(json.dumps(big_table(device, arguments.memory)))
        return
    print(environment())
    if reason := why_no_fbgemm(device):
        print(f"FBGEMM is left out: {reason}")
    if device == "cpu":
        # Leave a core to the reader threads.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    cells = QUICK if arguments.quick else CELLS
    n_rounds = arguments.rounds or (1 if arguments.quick else 3)
    found = []
    for cell in cells:
        if arguments.only in str(cell):
            found.append(one_cell(cell, device, n_rounds))
            print(found[-1], flush=True)
    print(report(found))
    results: dict[str, Any] = {"cells": found}
    if not (arguments.only or arguments.quick):
        results["SpeedTorch's table, ms"] = to_and_from(device)
        # In a process of its own.
        command = [sys.executable, "-m", "benchmarks.rows", "--device", device]
        command += ["--memory", str(BIG_ROWS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results["memory"] = json.loads(done.stdout)
        print(results["SpeedTorch's table, ms"], results["memory"])
        print(save("rows", results))


if __name__ == "__main__":
    main()
