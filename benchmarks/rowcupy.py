"""Training steps whose rows CuPy reads and writes in page-locked memory, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pinfeed
from benchmarks.rowcells import LR, Body, RowCell, start


class External:
    """Stream of another library, in the form that CuPy accepts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def mapped(table: torch.Tensor) -> tuple[pinfeed.PinnedStore, Any]:
    """Return a table in page-locked memory, and a CuPy array of the same memory."""
    import cupy

    store = pinfeed.PinnedStore(table, pin=True)
    array = store.array
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, store)
    return store, cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def speedtorch(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Train with SpeedTorch's method, given unique ids: CuPy indexes page-locked memory.

    It waits for all work of the device before and after.
    """
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
        # The weight can only be resized after its autograd graph has been freed.
        loss = loss.detach()
        yield loss


def uva_gathers(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Train with the GPU reading and writing page-locked memory itself, with CuPy.

    Nothing is prefetched, and nothing waits. All device memory is torch's, and all work is in
    torch's stream, so that memory is reused only after the work before.
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
            # The weight can only be resized after its autograd graph has been freed.
            loss = loss.detach()
            yield loss
    finally:
        # The last rows may still be written to memory that is freed now.
        torch.cuda.synchronize()


def _wait_for_all(cupy: Any) -> None:
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
