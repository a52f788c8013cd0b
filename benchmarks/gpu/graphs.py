"""CUDA graphs captured in the middle of a prefetching loop, in torch's default mode."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from benchmarks.gpu.bench import words
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import Feeder, wrap_loader

_N_CAPTURES = 20
_BATCH = 1024


def graphs(run: Run) -> list[Cell]:
    """Return a cell for each kind of loop.

    In the default mode, a CUDA call of another thread can invalidate a capture (pytorch 104555).
    """
    return [
        Cell({"loop": name, "depth": depth}, functools.partial(captures, run, name, depth))
        for name in ("Feeder", "wrap_loader")
        for depth in (2, 0)
    ]


def captures(run: Run, name: str, depth: int) -> Fields:
    """Capture a graph at every other batch, replay it, and count the captures that failed."""
    n = 2 * _N_CAPTURES + 4
    store = words(_BATCH * 8 * n, pin=run.cuda)
    rows = store.array.reshape(n, _BATCH)
    batches: Any = (
        Feeder(store, batch_size=_BATCH, depth=depth, device=run.device)
        if name == "Feeder"
        else wrap_loader(list(torch.from_numpy(rows)), depth=depth, device=run.device)
    )
    there = torch.zeros(_BATCH, dtype=torch.int64, device=run.device)
    graph: Any = None
    tripled = there * 3
    errors: list[str] = []
    n_captured = 0
    with batches:
        for i, batch in enumerate(batches):
            if i % 2 and n_captured + len(errors) < _N_CAPTURES:
                graph = torch.cuda.CUDAGraph() if run.cuda else None
                try:
                    with torch.cuda.graph(graph) if run.cuda else contextlib.nullcontext():
                        tripled = there * 3
                    n_captured += 1
                except RuntimeError as error:
                    errors.append(str(error).splitlines()[0])
                    graph = None
            there.copy_(batch)
            if graph is not None:
                graph.replay()
            elif not run.cuda:
                tripled = there * 3
            else:
                continue
            if not torch.equal(tripled.cpu(), torch.from_numpy(rows[i] * 3)):
                raise AssertionError(f"the graph gives wrong values for batch {i}")
    return {"captured": n_captured, "failed": len(errors), "errors": sorted(set(errors))}
