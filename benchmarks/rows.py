"""Training steps on rows of a table on the host, with prefetching, without it, and in other ways.

Run it from the root:

    python -m benchmarks.rows            (ten minutes)
    python -m benchmarks.rows --quick    (two minutes)

Every contestant trains the same rows with Adam. The weights and two tensors of state are copied.
Losses are compared first. Each cell is timed twice: with a small model, whose step is mostly the
transfer, and with a step that takes about as long as the transfer, so that all of it can be hidden.
The transfer is the time of the synchronous step minus that of a step on rows that are on the device
already. "Hidden" is the share of the transfer that prefetching saves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import pinfeed
from benchmarks.environment import environment, save
from benchmarks.memory import free
from benchmarks.onerun import memory
from benchmarks.rowcells import Body, RowCell, wait
from benchmarks.rowcupy import mapped
from benchmarks.rowsteps import check, contestants, rows_there, step_s
from pinfeed.devices.kernels import External

N_WARM = 8
N_STEPS = 200
SPEEDTORCH_ROWS = 131_072
SPEEDTORCH_DIM = 128
BIG_ROWS = 10_000_000
BIG_DIM = 128

CELLS = [
    RowCell(dim, n_ids, repeated)
    for dim in (16, 128)
    for n_ids in (1024, 8192, 32768)
    for repeated in (0.0, 0.5)
]
CELLS += [RowCell(1024, n_ids, repeated) for n_ids in (1024, 8192) for repeated in (0.0, 0.5)]
CELLS += [RowCell(128, 8192, 0.0, shared) for shared in (0.5, 0.95)]
QUICK = [
    RowCell(16, 8192, 0.5),
    RowCell(128, 8192, 0.0),
    RowCell(128, 8192, 0.0, 0.5),
    RowCell(128, 32768, 0.5),
]

Ways = dict[str, Callable[[], object]]
"""Functions to time, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--quick", action="store_true")
    # This is run in a process of its own.
    parser.add_argument("--memory", type=int, metavar="ROWS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(big_table(arguments.device, arguments.memory)))
        return
    print(environment())
    results = measure(arguments.device, quick=arguments.quick)
    print(table(results["cells"]))
    print(results["SpeedTorch's table, ms"])
    print(results["memory"])
    print(save("rows-quick" if arguments.quick else "rows", results))


def measure(device: str, *, quick: bool) -> dict[str, Any]:
    """Run all measurements and return them as plain values."""
    if device == "cpu":
        # The reader threads need a core.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    n_repeats, cap_s = (1, 0.8) if quick else (3, 0.4)
    cells = []
    for cell in QUICK if quick else CELLS:
        cells.append(one_cell(cell, device, n_repeats, cap_s))
        print(_line(cells[-1]), flush=True)
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.rows", "--memory", str(BIG_ROWS), "--device", device],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "cells": cells,
        "SpeedTorch's table, ms": to_and_from(device),
        "memory": json.loads(run.stdout),
    }


def one_cell(cell: RowCell, device: str, n_repeats: int, cap_s: float) -> dict[str, Any]:
    """Return milliseconds of a step of every contestant, with a small and a large model."""
    check(cell, device)
    ids = cell.batches(N_WARM + N_STEPS)
    runs = {"step alone": rows_there, **contestants(device)}

    def time_all(n_products: int) -> dict[str, float]:
        body = Body(cell, device, n_products)
        found = {name: [] for name in runs}
        for _ in range(n_repeats):
            for name, run in runs.items():
                free()
                found[name].append(step_s(run, cell, body, ids, N_WARM, cap_s))
        return {name: round(statistics.median(times) * 1e3, 3) for name, times in found.items()}

    small = time_all(0)
    n_products = as_long_as_the_transfer(small["synchronous"] - small["step alone"], cell, device)
    return {"cell": str(cell), "small_ms": small, "large_ms": time_all(n_products)}


def as_long_as_the_transfer(transfer_ms: float, cell: RowCell, device: str) -> int:
    """Return the number of matrix products that take as long, and at least 0.1 ms."""
    body = Body(cell, device)
    per_product = best(lambda: [body.products(50), wait(body)]) / 50
    return max(1, round(max(0.1, transfer_ms) / 1e3 / per_product))


def hidden(ms: dict[str, float]) -> float:
    """Return the share of the transfer that prefetching hides."""
    return (ms["synchronous"] - ms["prefetch"]) / max(1e-9, ms["synchronous"] - ms["step alone"])


def to_and_from(device: str) -> dict[str, float]:
    """Return milliseconds to copy 131,072 random rows of 128 float32 to the device, and back."""
    shape = (SPEEDTORCH_ROWS, SPEEDTORCH_DIM)
    values = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)
    order = np.random.default_rng(0).permutation(SPEEDTORCH_ROWS)
    there = torch.device(device)
    host = values.clone().pin_memory() if device == "cuda" else values.clone()
    ours = pinfeed.PinnedStore(values.clone(), pin=device == "cuda")
    ways = torch_ways(host, order, there)
    tables = [ours.array, host.numpy()]
    if device == "cuda":
        store, array = mapped(values.clone())
        tables.append(store.array)
        ways |= cupy_ways(array, order, there)
    found = {name: best(lambda way=way: [way(), wait_for(there)]) for name, way in ways.items()}
    for depth in (0, 2):
        found[f"pinfeed, depth {depth}"] = write_back_s(ours, order, depth, there)
    for table in tables:
        assert np.array_equal(table, values.numpy())
    return {name: round(seconds * 1e3, 3) for name, seconds in found.items()}


def torch_ways(host: torch.Tensor, order: np.ndarray, device: torch.device) -> Ways:
    """Return functions that copy rows with torch alone."""
    pinned = device.type == "cuda"
    ids = torch.from_numpy(order)
    buffer = torch.empty_like(host, pin_memory=pinned)

    def indexed() -> None:
        host[ids] = host[ids].to(device).cpu()

    def selected() -> None:
        torch.index_select(host, 0, ids, out=buffer)
        block = buffer.to(device, non_blocking=True)
        buffer.copy_(block, non_blocking=True)
        wait_for(device)
        host.index_copy_(0, ids, buffer)

    if pinned:
        return {
            "torch, pinned[ids].to(device) and back": indexed,
            "torch, index_select(out=pinned) and asynchronous copies": selected,
        }
    return {
        "torch, table[ids] and back": indexed,
        "torch, index_select(out) and index_copy_": selected,
    }


def cupy_ways(array: Any, order: np.ndarray, device: torch.device) -> Ways:
    """Return functions in which the GPU reads and writes page-locked memory itself."""
    import cupy

    ids = torch.from_numpy(order)

    def speedtorch_rows() -> None:
        rows = cupy.asarray(order)
        torch.cuda.synchronize()
        block = array[rows]
        torch.cuda.synchronize()
        array[rows] = block
        torch.cuda.synchronize()

    def uva_rows() -> None:
        rows = ids.to(device)
        block = torch.empty(array.shape, device=device)
        with cupy.cuda.Stream.from_external(External(torch.cuda.current_stream().cuda_stream)):
            array.take(cupy.asarray(rows), axis=0, out=cupy.asarray(block))
            array[cupy.asarray(rows)] = cupy.asarray(block)

    return {
        "SpeedTorch's: CuPy indexes page-locked memory, everything is waited for": speedtorch_rows,
        "CuPy indexes page-locked memory in torch's stream": uva_rows,
    }


def write_back_s(
    store: pinfeed.PinnedStore, order: np.ndarray, depth: int, device: torch.device, n: int = 20
) -> float:
    """Return the seconds of a batch of a feeder's loop that writes every batch back."""
    with pinfeed.Feeder(store, rows=[order] * (n + 4), depth=depth, device=device.type) as feeder:
        begin = 0.0
        for i, batch in enumerate(feeder.batches()):
            if i == 4:
                wait_for(device)
                begin = time.perf_counter()
            batch.write_back(batch.data)
    # The feeder is closed, so all writes have completed.
    return (time.perf_counter() - begin) / n


def big_table(device: str, n_rows: int) -> dict[str, Any]:
    """Return the resident memory of a table (5.12 GB with ``BIG_ROWS``), drawn and trained.

    A small table is trained first, to load the code.
    """

    def made_and_trained(n_rows: int) -> tuple[int, int]:
        table = pinfeed.HostEmbedding(n_rows, BIG_DIM, pin=device == "cuda", name="table")
        made = memory()["VmHWM"]
        optimizer = pinfeed.RowOptimizer(torch.optim.SGD, [table], lr=0.1)
        rng = np.random.default_rng(0)
        ids = [torch.from_numpy(rng.integers(n_rows, size=4096)) for _ in range(50)]
        for batch in pinfeed.train_rows(
            ids, {table: lambda batch: batch}, optimizer=optimizer, device=device
        ):
            table(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return made, memory()["VmHWM"]

    made_and_trained(10_000)
    before, nbytes = memory()["VmRSS"], 4 * n_rows * BIG_DIM
    made, trained = made_and_trained(n_rows)
    return {
        "rows": [n_rows, BIG_DIM],
        "table_gb": nbytes / 1e9,
        "made_over_table": round((made - before) / nbytes, 4),
        "trained_over_table": round((trained - before) / nbytes, 4),
    }


def best(work: Callable[[], object], n: int = 8) -> float:
    """Return the seconds of the fastest of ``n`` calls."""
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(cells: list[dict[str, Any]]) -> str:
    """Return the cells as text."""
    return "\n".join(
        [
            "ms per step of a small model | a large one; hidden: share of the transfer",
            *map(_line, cells),
        ]
    )


def _line(cell: dict[str, Any]) -> str:
    parts = [
        ", ".join(f"{name} {value:.2f}" for name, value in cell[key].items())
        for key in ("small_ms", "large_ms")
    ]
    small = hidden(cell["small_ms"])
    large = hidden(cell["large_ms"])
    return f"{cell['cell']}: {parts[0]} | {parts[1]}; hidden {small:.2f} | {large:.2f}"


if __name__ == "__main__":
    main()
