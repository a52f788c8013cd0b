"""Training steps on rows of a table on the host, by pinfeed and in the usual ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pinfeed
from benchmarks.rowcells import LR, Body, RowCell, start, wait
from benchmarks.rowcupy import speedtorch, uva_gathers
from benchmarks.rowfbgemm import fbgemm, why_no_fbgemm


def prefetched(
    cell: RowCell,
    body: Body,
    ids: list[torch.Tensor],
    depth: int | None = 2,
    loops: list[Any] | None = None,
    cache: float | None = None,
) -> Iterator[torch.Tensor]:
    """Train with pinfeed, prefetching ``depth`` batches.

    Args:
        cell: Table to train.
        body: Computation of a step.
        ids: Ids of each batch.
        depth: Number of batches to prefetch; None lets pinfeed choose by measurement.
        loops: List that the loop is appended to.
        cache: Share of the rows that the cache on the device holds; None for no cache.
    """
    store = pinfeed.PinnedStore(start(cell), pin=pin(body))
    options: dict[str, Any] = {} if cache is None else {"device_cache": cache}
    table = pinfeed.HostEmbedding(cell.n_rows, cell.dim, store=store, name="table", **options)
    optimizer = pinfeed.RowOptimizer(cell.rule.dense, [table], state=touched, lr=LR)
    given: dict[str, Any] = {"depth": depth, "device": str(body.device)}
    loop = pinfeed.train_rows(ids, {table: lambda batch: batch}, optimizer=optimizer, **given)
    if loops is not None:
        loops.append(loop)
    for batch in loop:
        loss = body.loss(table(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # The weight can only be resized after its autograd graph has been freed.
        loss = loss.detach()
        yield loss


def touched(table: Any, key: str, shape: tuple[int, ...], dtype: Any) -> pinfeed.PinnedStore:
    """Create state whose memory is touched at once, like that of the other contestants.

    Otherwise the kernel would provide it page by page in the first steps.
    """
    store = pinfeed.PinnedStore.zeros(shape, dtype, pin=table.store.page_locked)
    store.array[...] = 0
    return store


def synchronous(
    cell: RowCell, body: Body, ids: list[torch.Tensor], loops: list[Any] | None = None
) -> Iterator[torch.Tensor]:
    """Train with pinfeed without prefetching: the device waits while rows are copied."""
    return prefetched(cell, body, ids, depth=0, loops=loops)


def gather_and_copy(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Train with a plain loop: gather on the CPU, copy, step, copy back, scatter."""
    weights = start(cell)
    tables = {name: torch.zeros(cell.n_rows, cell.dim) for name in cell.rule.state}
    weight = nn.Parameter(torch.empty(0, device=body.device))
    optimizer = cell.rule.dense([weight], lr=LR)
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    for batch in ids:
        rows, where = batch.unique(return_inverse=True)
        weight.data = weights.index_select(0, rows).to(body.device)
        for name, table in tables.items():
            state[name] = table.index_select(0, rows).to(body.device)
        optimizer.state[weight] = state
        loss = body.loss(functional.embedding(where.to(body.device), weight))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.index_copy_(0, rows, weight.data.cpu())
        for name, table in tables.items():
            table.index_copy_(0, rows, state[name].cpu())
        # The weight can only be resized after its autograd graph has been freed.
        loss = loss.detach()
        yield loss


def whole_table(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Train ``nn.Embedding(sparse=True)`` with SparseAdam or Adagrad, all of it on the device.

    pinfeed is for tables that do not fit there.
    """
    table = nn.Embedding.from_pretrained(start(cell).to(body.device), freeze=False, sparse=True)
    optimizer = cell.rule.sparse(table.parameters(), lr=LR)
    for batch in ids:
        loss = body.loss(table(batch.to(body.device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # The weight can only be resized after its autograd graph has been freed.
        loss = loss.detach()
        yield loss


def rows_there(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Run the step alone, on rows that stay on the device.

    This is not a contestant, but the time that remains if the whole transfer is hidden.
    """
    rows, where = ids[0].unique(return_inverse=True)
    weight = nn.Parameter(start(cell)[rows].to(body.device))
    where = where.to(body.device)
    optimizer = cell.rule.dense([weight], lr=LR)
    for _ in ids:
        loss = body.loss(functional.embedding(where, weight))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # The weight can only be resized after its autograd graph has been freed.
        loss = loss.detach()
        yield loss


Run = Callable[[RowCell, Body, list[torch.Tensor]], Iterator[torch.Tensor]]

STEP_ALONE = "step alone"
CACHED = "cache of "
"""Beginning of the name of a contestant with a cache."""


def contestants(device: str, optimizer: str = "Adam") -> dict[str, Run]:
    """Return the contestants by name; the others are compared with the first."""
    found: dict[str, Run] = {"prefetch": prefetched, "synchronous": synchronous}
    found |= {"gather+copy": gather_and_copy, "whole table": whole_table}
    if optimizer == "Adagrad" and not why_no_fbgemm(device):
        found["FBGEMM"] = fbgemm
    if optimizer == "Adam" and device == "cuda":
        found |= {"UVA gathers": uva_gathers, "SpeedTorch's": speedtorch}
    return found


def pin(body: Body) -> bool:
    return body.device.type == "cuda"


def check(cell: RowCell, device: str, n: int = 4) -> None:
    """Compare the losses of some steps.

    Raises:
        AssertionError: If they differ.
    """
    expected = losses(prefetched, cell, device, n)
    for name, run in contestants(device, cell.optimizer).items():
        compare(name, losses(run, cell, device, n), expected)


def losses(run: Run, cell: RowCell, device: str, n: int = 4) -> torch.Tensor:
    """Return the losses of the first steps."""
    return torch.stack(list(run(cell, Body(cell, device), cell.batches(n)))).cpu()


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare losses with those of prefetching.

    Raises:
        AssertionError: If they differ. pinfeed's own must be equal bit for bit. The others may
            differ by another order of additions and by SparseAdam's eps.
    """
    same = (
        torch.equal(found, expected)
        if name == "synchronous" or name.startswith(CACHED)
        else torch.allclose(found, expected, rtol=1e-4)
    )
    assert same, f"{name}: losses {found.tolist()}, expected {expected.tolist()}"


def step_s(
    run: Run, cell: RowCell, body: Body, ids: list[torch.Tensor], n_warm: int, cap_s: float
) -> float:
    """Return the mean seconds of the steps after ``n_warm``, which run for up to ``cap_s``.

    The end of the steps is not timed, because it frees the tables.
    """
    steps = run(cell, body, ids)
    for _ in range(n_warm):
        next(steps)
    wait(body)
    begin = time.perf_counter()
    n = 0
    for _ in steps:
        n += 1
        if n == len(ids) - n_warm or time.perf_counter() - begin > cap_s:
            break
    wait(body)
    seconds = (time.perf_counter() - begin) / n
    steps.close()  # type: ignore[attr-defined]  # a generator
    return seconds
