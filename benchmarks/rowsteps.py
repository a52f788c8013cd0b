"""One step of training rows of a table on the host, by pinfeed and in the ways in which it is done without."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import pinfeed
from pinfeed.devices.kernels import External

LR = 0.01
Losses = list[torch.Tensor]
Tables = list[torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """What is trained.

    Args:
        dim: float32 numbers in a row.
        n_ids: Ids in a batch.
        repeated: Share of them that are there before in the same batch.
        shared: Share of a batch's rows that are in the batch before as well.
        table_bytes: Size of the table of weights; Adam's state takes twice as much.
    """

    dim: int
    n_ids: int
    repeated: float
    shared: float = 0.0
    table_bytes: int = 256 << 20

    @property
    def n_rows(self) -> int:
        return self.table_bytes // (4 * self.dim)

    def __str__(self) -> str:
        text = f"rows of {4 * self.dim} B, {self.n_ids} ids, {self.repeated:.0%} repeated"
        return text + f", {self.shared:.0%} of the rows in the batch before" * bool(self.shared)

    def batches(self, n: int) -> list[torch.Tensor]:
        """Ids on the host, int64, shape (n_ids,): the same at every call."""
        rng = np.random.default_rng(0)
        n_unique = max(1, round(self.n_ids * (1 - self.repeated)))
        n_kept = round(n_unique * self.shared)
        found, rows = [], np.empty(0, np.int64)
        for _ in range(n):
            kept = rng.permutation(rows)[:n_kept]
            fresh = np.setdiff1d(rng.integers(self.n_rows, size=n_unique * 2), rows)
            rows = np.concatenate([kept, rng.permutation(fresh)[: n_unique - len(kept)]])
            again = rng.choice(rows, self.n_ids - len(rows))
            found.append(torch.from_numpy(rng.permutation(np.concatenate([rows, again]))))
        return found


class Body:
    """What the step does with its rows: a small model, and ``n_products`` matrix products as the rest of a large one."""

    def __init__(self, cell: Cell, device: str, n_products: int = 0) -> None:
        self.device = torch.device(device)
        self._n_products = n_products
        self._model = torch.linspace(-1, 1, cell.dim, device=device)
        size = 2048 if self.device.type == "cuda" else 192
        self._a, self._b, self._c = (torch.randn(size, size, device=device) for _ in range(3))

    def loss(self, looked_up: torch.Tensor) -> torch.Tensor:
        self.products(self._n_products)
        # Of the mean, gradients would be as small as Adam's eps.
        return functional.softplus(looked_up @ self._model).sum()

    def products(self, n: int) -> None:
        for _ in range(n):
            torch.mm(self._a, self._b, out=self._c)


def prefetched(
    cell: Cell, body: Body, ids: list[torch.Tensor], depth: int = 2
) -> Iterator[torch.Tensor]:
    """pinfeed."""
    table = pinfeed.HostEmbedding(
        cell.n_rows, cell.dim, store=pinfeed.PinnedStore(start(cell), pin=pin(body)), name="table"
    )
    optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [table], state=touched, lr=LR)
    for batch in pinfeed.train_rows(
        ids, {table: lambda batch: batch}, optimizer=optimizer, depth=depth, device=str(body.device)
    ):
        loss = body.loss(table(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # A graph that is kept knows the size of the weight.
        loss = loss.detach()
        yield loss


def touched(table: Any, key: str, shape: tuple[int, ...], dtype: Any) -> pinfeed.PinnedStore:
    """State that has its memory from the start, as the others have theirs: else the first steps are those of the kernel, page by page."""
    store = pinfeed.PinnedStore.zeros(shape, dtype, pin=table.store.page_locked)
    store.array[...] = 0
    return store


def synchronous(cell: Cell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """pinfeed without prefetching: the rows are switched while the device waits."""
    return prefetched(cell, body, ids, depth=0)


def gather_and_copy(cell: Cell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The loop that one writes by hand: unique ids, index_select on the CPU, copy, step, copy back, index_copy_."""
    tables = [start(cell), torch.zeros(cell.n_rows, cell.dim), torch.zeros(cell.n_rows, cell.dim)]
    weight = nn.Parameter(torch.empty(0, device=body.device))
    optimizer = torch.optim.Adam([weight], lr=LR)
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    for batch in ids:
        rows, where = batch.unique(return_inverse=True)
        weight.data, state["exp_avg"], state["exp_avg_sq"] = (
            table.index_select(0, rows).to(body.device) for table in tables
        )
        optimizer.state[weight] = state
        loss = body.loss(functional.embedding(where.to(body.device), weight))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for table, values in zip(
            tables, (weight.data, state["exp_avg"], state["exp_avg_sq"]), strict=True
        ):
            table.index_copy_(0, rows, values.cpu())
        # A graph that is kept knows the size of the weight.
        loss = loss.detach()
        yield loss


def whole_table(cell: Cell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """``nn.Embedding(sparse=True)`` with SparseAdam: the table is on the device as a whole, which is what does not fit."""
    table = nn.Embedding.from_pretrained(start(cell).to(body.device), freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=LR)
    for batch in ids:
        loss = body.loss(table(batch.to(body.device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # A graph that is kept knows the size of the weight.
        loss = loss.detach()
        yield loss


def rows_there(cell: Cell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """No contestant: the step alone, on rows that came before and go nowhere.

    What is left when all of the transfer is hidden.
    """
    rows, where = ids[0].unique(return_inverse=True)
    weight, where = nn.Parameter(start(cell)[rows].to(body.device)), where.to(body.device)
    optimizer = torch.optim.Adam([weight], lr=LR)
    for _ in ids:
        loss = body.loss(functional.embedding(where, weight))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # A graph that is kept knows the size of the weight.
        loss = loss.detach()
        yield loss


def speedtorch(cell: Cell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """SpeedTorch's method, given unique ids: CuPy indexes page-locked memory; everything on the device is waited for, before and after."""
    import cupy

    tables = [mapped(start(cell)), *(mapped(torch.zeros(cell.n_rows, cell.dim)) for _ in range(2))]
    weight = nn.Parameter(torch.empty(0, device=body.device))
    optimizer = torch.optim.Adam([weight], lr=LR)
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    for batch in ids:
        unique, where = batch.unique(return_inverse=True)
        rows = cupy.asarray(unique.numpy())
        _wait_for_all(cupy)
        weight.data, state["exp_avg"], state["exp_avg_sq"] = (
            torch.from_dlpack(array[rows]) for _, array in tables
        )
        optimizer.state[weight] = state
        _wait_for_all(cupy)
        loss = body.loss(functional.embedding(where.to(body.device), weight))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait_for_all(cupy)
        for (_, array), values in zip(
            tables, (weight.data, state["exp_avg"], state["exp_avg_sq"]), strict=True
        ):
            array[rows] = cupy.from_dlpack(values)
        _wait_for_all(cupy)
        # A graph that is kept knows the size of the weight.
        loss = loss.detach()
        yield loss


def uva_gathers(cell: Cell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The GPU reads and writes page-locked memory itself, by CuPy in torch's stream; nothing is prefetched, nothing is waited for.

    All memory of the device is torch's, and all of its work is in one stream: so memory is used
    again only after the work before.
    """
    import cupy

    tables = [mapped(start(cell)), *(mapped(torch.zeros(cell.n_rows, cell.dim)) for _ in range(2))]
    weight = nn.Parameter(torch.empty(0, device=body.device))
    optimizer = torch.optim.Adam([weight], lr=LR)
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    stream = cupy.cuda.Stream.from_external(External(torch.cuda.current_stream().cuda_stream))
    try:
        for batch in ids:
            unique, where = (
                there.pin_memory().to(body.device, non_blocking=True)
                for there in batch.unique(return_inverse=True)
            )
            values = [torch.empty(len(unique), cell.dim, device=body.device) for _ in tables]
            with stream:
                for (_, array), gathered in zip(tables, values, strict=True):
                    array.take(cupy.asarray(unique), axis=0, out=cupy.asarray(gathered))
            weight.data, state["exp_avg"], state["exp_avg_sq"] = values
            optimizer.state[weight] = state
            loss = body.loss(functional.embedding(where, weight))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with stream:
                for (_, array), changed in zip(
                    tables, (weight.data, state["exp_avg"], state["exp_avg_sq"]), strict=True
                ):
                    array[cupy.asarray(unique)] = cupy.asarray(changed)
            # A graph that is kept knows the size of the weight.
            loss = loss.detach()
            yield loss
    finally:
        # The last rows may still be on their way into memory that is freed now.
        torch.cuda.synchronize()


Run = Callable[[Cell, Body, list[torch.Tensor]], Iterator[torch.Tensor]]


def contestants(device: str) -> dict[str, Run]:
    """By name; the first is what is compared with the others."""
    found: dict[str, Run] = {
        "prefetch": prefetched,
        "synchronous": synchronous,
        "gather+copy": gather_and_copy,
        "whole table": whole_table,
    }
    return (
        {**found, "UVA gathers": uva_gathers, "SpeedTorch's": speedtorch}
        if device == "cuda"
        else found
    )


def start(cell: Cell) -> torch.Tensor:
    """The table as it begins: the same at every call."""
    return _drawn(cell.n_rows, cell.dim).clone()


@functools.lru_cache(maxsize=1)
def _drawn(n_rows: int, dim: int) -> torch.Tensor:
    return torch.empty(n_rows, dim).normal_(generator=torch.Generator().manual_seed(0))


def pin(body: Body) -> bool:
    return body.device.type == "cuda"


def mapped(table: torch.Tensor) -> tuple[pinfeed.PinnedStore, Any]:
    """A table in page-locked memory, and as CuPy sees it there."""
    import cupy

    store = pinfeed.PinnedStore(table, pin=True)
    array = store.array
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, store)
    return store, cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def _wait_for_all(cupy: Any) -> None:
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()


def check(cell: Cell, device: str, n: int = 4) -> None:
    """Compare the losses of some steps.

    Raises:
        AssertionError: They differ.
    """
    expected = losses(prefetched, cell, device, n)
    for name, run in contestants(device).items():
        compare(name, losses(run, cell, device, n), expected)


def losses(run: Run, cell: Cell, device: str, n: int = 4) -> torch.Tensor:
    """Losses of the first steps."""
    return torch.stack(list(run(cell, Body(cell, device), cell.batches(n)))).cpu()


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare losses with those of prefetching.

    Raises:
        AssertionError: They differ: pinfeed's own by a bit, the others by more than another order
            of adding and SparseAdam's eps explain.
    """
    same = (
        torch.equal(found, expected)
        if name == "synchronous"
        else torch.allclose(found, expected, rtol=1e-4)
    )
    assert same, f"{name}: losses {found.tolist()}, expected {expected.tolist()}"


def step_s(
    run: Run, cell: Cell, body: Body, ids: list[torch.Tensor], n_warm: int, cap_s: float
) -> float:
    """Seconds of a step: the mean of those after ``n_warm``, up to ``cap_s`` altogether."""
    steps = run(cell, body, ids)
    for _ in range(n_warm):
        next(steps)
    wait(body)
    begin, n = time.perf_counter(), 0
    for _ in steps:
        n += 1
        if time.perf_counter() - begin > cap_s:
            break
    wait(body)
    seconds = (time.perf_counter() - begin) / n
    steps.close()  # type: ignore[attr-defined]  # a generator
    return seconds


def wait(body: Body) -> None:
    if body.device.type == "cuda":
        torch.cuda.synchronize()
