"""Copying all rows of a table to the device in random order, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import pinfeed
from benchmarks.rowcupy import External, mapped

N_ROWS = 131_072
DIM = 128

Ways = dict[str, Callable[[], object]]
"""Functions to time, by name."""


def to_and_from(device: str) -> dict[str, Any]:
    """Return milliseconds to copy 131,072 random rows of 128 float32 to the device, and back.

    It also returns the route of pinfeed's rows.
    """
    shape = (N_ROWS, DIM)
    values = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)
    order = np.random.default_rng(0).permutation(N_ROWS)
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
        found[f"pinfeed, depth {depth}"], route = write_back_s(ours, order, depth, there)
    for table in tables:
        assert np.array_equal(table, values.numpy())
    return {name: round(seconds * 1e3, 3) for name, seconds in found.items()} | {"route": route}


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
        "SpeedTorch's: CuPy indexes page-locked memory, and waits for the device": speedtorch_rows,
        "CuPy indexes page-locked memory in torch's stream": uva_rows,
    }


def write_back_s(
    store: pinfeed.PinnedStore, order: np.ndarray, depth: int, device: torch.device, n: int = 20
) -> tuple[float, str]:
    """Return the seconds of a batch of a loop that writes every batch back, and its route."""
    with pinfeed.Feeder(store, rows=[order] * (n + 4), depth=depth, device=device.type) as feeder:
        begin = 0.0
        for i, batch in enumerate(feeder.batches()):
            if i == 4:
                wait_for(device)
                begin = time.perf_counter()
            batch.write_back(batch.data)
    # The feeder is closed, so all writes have completed.
    seconds = (time.perf_counter() - begin) / n
    return seconds, "; ".join((feeder.plan.route, *feeder.plan.notes))


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
