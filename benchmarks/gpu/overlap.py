"""Overlap of transfers with a step: the time of both together, relative to the longer one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.bench import as_rows, words
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.steady import N_WARM, Loop, rounds, timed
from benchmarks.gpu.steps import (
    N_FIELDS,
    EmbeddingModel,
    Products,
    Step,
    best_s,
    random_images,
    resnet_step,
)
from benchmarks.rowcells import RowCell
from pinfeed import Feeder, PinnedStore

_ROW_BYTES = (512, 4096, 65_536, 64)
_PRODUCTS = (8192, 4096)
_FACTORS = (2, 0.5, 4, 0.25)
# A transfer of this size takes 1.2 to 2.7 ms, and a product of 8192 rows and columns 1.5 to 4.4 ms.
_BATCH_BYTES = 64 << 20
# Batches of shorter rows are smaller, because a loop draws and checks every row index.
_MOST_ROWS = 262_144
_N_BATCHES = 48
_DEPTH = 2
_N_SHARED = (65_536, 8192, 1024)
_SHARED_ROW_BYTES = 512


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loops on a GPU, and on a CPU, where they only check the code."""

    memory: int
    batch: int
    n: int
    rows: Sequence[int]
    shared: Sequence[int]
    images: int


_ON_A_GPU = Sizes(4 << 30, _BATCH_BYTES, _N_BATCHES, _ROW_BYTES, _N_SHARED, 128)
_ON_A_CPU = Sizes(64 << 20, 1 << 20, 4, (64, 4096), (1024, 512), 2)


class Overlap:
    """Loops whose rows are in one block of memory, and the steps during which they are copied."""

    def __init__(self, run: Run) -> None:
        self.device = run.device
        self.sizes = _ON_A_GPU if run.cuda else _ON_A_CPU
        self._products = functools.cache(functools.partial(Products, run.device))

    @functools.cached_property
    def memory(self) -> PinnedStore:
        return words(self.sizes.memory, pin=self.device == "cuda")

    def products(
        self, size: int, row_nbytes: int, factor: float, write: bool, route: str
    ) -> Fields:
        """Measure products that take about ``factor`` times as long as the transfer."""
        store = as_rows(self.memory, row_nbytes)
        batch_size = min(self.sizes.batch // row_nbytes, _MOST_ROWS)
        step_of = functools.partial(self._step, size, factor)
        return self._measure(
            store, step_of, route, write=write, batch_size=batch_size, shuffle=True
        )

    def shared(self, n_rows: int, depth: int) -> Fields:
        """Measure batches that have half of their rows in common with the previous batch.

        The time of the consumer thread should not grow with the rows, nor with the depth.
        """
        store = as_rows(self.memory, _SHARED_ROW_BYTES)
        # Rows of float32 as long as those of the store.
        dim = _SHARED_ROW_BYTES // 4
        cell = RowCell(dim, n_rows, 0.0, 0.5, table_bytes=store.array.nbytes)
        rows = [ids.numpy() for ids in cell.batches(N_WARM + self.sizes.n + 1)]
        step_of = functools.partial(self._step, _PRODUCTS[0], 1)
        return self._measure(store, step_of, "staged", write=True, rows=rows, depth=depth)

    def resnet(self, route: str) -> Fields:
        """Measure ResNet-18, which reads images."""
        batch_size = self.sizes.images
        images = random_images((N_WARM + self.sizes.n + 1) * batch_size, pin=self.device == "cuda")
        step = resnet_step(self.device, batch_size)
        return self._measure(
            images, lambda _: step, route, write=False, batch_size=batch_size, shuffle=True
        )

    def embeddings(self, n_ids: int, n_hidden: int, shared: float) -> Fields:
        """Measure a model whose rows are trained with Adam, in a loop of train_rows."""
        n = self.sizes.n
        dim = 128 if self.device == "cuda" else 8
        cell = RowCell(dim, n_ids, 0.0, shared, table_bytes=self.sizes.memory // 8)
        ids = cell.batches(N_WARM + n + 1)
        losses = self._compared_losses(cell, ids[:4], n_hidden)
        model = EmbeddingModel(cell, self.device, n_hidden)
        with model.loop(ids, _DEPTH) as feeder:
            both = Loop(feeder.__iter__, model.step, None, self.device)
            # The first steps create the state, which is copied in every loop from then on.
            timed(both, n)
            transfer = Loop(feeder.__iter__, _nothing, None, self.device)
            found = rounds(transfer, both, model.step_alone(ids[0]), n)
            # Adam's two tensors of state are copied with the weights.
            nbytes = 3 * n_ids * 4 * cell.dim
            samples = n_ids // N_FIELDS
            sizes = {"batch_nbytes": nbytes, "samples": samples}
            return {"losses": losses, "route": feeder.route, **sizes, **found}

    def _compared_losses(self, cell: RowCell, ids: list[torch.Tensor], n_hidden: int) -> str:
        """Return whether prefetching changes the losses. The times are recorded even if it does."""
        losses = []
        for depth in (0, _DEPTH):
            model = EmbeddingModel(cell, self.device, n_hidden)
            with model.loop(ids, depth) as loop:
                losses.append(torch.stack([model.step(batch) for batch in loop]).tolist())
        if losses[0] != losses[1]:
            return f"different: depth {_DEPTH} gives {losses[1]}, expected {losses[0]}"
        return "equal"

    def _step(self, size: int, factor: float, transfer_s: float) -> Step:
        products = self._products(size)
        n_times = max(1, round(factor * transfer_s / best_s(products, self.device)))
        return lambda _: products(n_times)

    def _measure(
        self,
        store: PinnedStore,
        step_of: Callable[[float], Step],
        route: str,
        *,
        write: bool,
        **options: Any,
    ) -> Fields:
        """Check the first batch of a feeder, and measure its loop.

        Args:
            store: Store of the rows.
            step_of: Function that returns the step, given the seconds of a transfer.
            route: Route of the feeder.
            write: Whether the rows are written back.
            **options: Further options of the feeder.
        """
        options = {"depth": _DEPTH, **options}
        if self.device != "cpu":
            options["route"] = route
        with Feeder(store, device=self.device, **options) as feeder:
            return self._rounds(feeder, store, step_of, write)

    def _rounds(
        self, feeder: Feeder, store: PinnedStore, step_of: Callable[[float], Step], write: bool
    ) -> Fields:
        n, device = self.sizes.n, self.device
        resident = _first_batch(feeder, store)
        back = _write_back if write else None
        transfer = Loop(feeder.batches, _nothing, back, device)
        step = step_of(timed(transfer, n).batch_s)
        both = Loop(feeder.batches, lambda batch: step(batch.data), back, device)
        found = rounds(transfer, both, lambda: step(resident), n)
        nbytes = resident.nbytes
        gb_per_s = (1 + write) * nbytes / found["transfer_ms"] / 1e6
        return {
            "plan": feeder.plan.route,
            "notes": list(feeder.plan.notes),
            "batch_nbytes": nbytes,
            "transfer_gb_per_s": round(gb_per_s, 2),
            **found,
        }


def overlaps(run: Run) -> list[Cell]:
    """Return cells of loops whose step is products or a model, and of products during transfers.

    The first cells decide whether a loop takes at most 1.03 times the longer one of its step and
    its transfer.
    """
    overlap = Overlap(run)

    def products(
        sizes: Sequence[int], rows: Sequence[int], factor: float, route: str
    ) -> list[Cell]:
        cells = []
        for size, row_nbytes, write in itertools.product(sizes, rows, (False, True)):
            key = {
                "what": "products as the step",
                "size": size,
                "row_nbytes": row_nbytes,
                "factor": factor,
                "write": write,
                "route": route,
            }
            measure = functools.partial(overlap.products, size, row_nbytes, factor, write, route)
            cells.append(Cell(key, measure))
        return cells

    shared = [
        Cell(
            {
                "what": "half of the rows in the batch before",
                "n_rows": n_rows,
                "depth": depth,
                "write": True,
            },
            functools.partial(overlap.shared, n_rows, depth),
        )
        for n_rows in overlap.sizes.shared
        for depth in (_DEPTH, 2 * _DEPTH)
    ]
    largest, *smaller = _PRODUCTS if run.cuda else _PRODUCTS[:1]
    sizes = overlap.sizes.rows
    factors = _FACTORS if run.cuda else ()
    return [
        *products([largest], sizes[:2], 1, "staged"),
        *shared[:2],
        *_models(run, overlap, "staged"),
        *products([largest], sizes[2:], 1, "staged"),
        *products(smaller, sizes, 1, "staged"),
        *shared[2:],
        *(cell for factor in factors for cell in products(smaller, [4096], factor, "direct")),
        *products(smaller, sizes[:2], 1, "direct"),
        *(_models(run, overlap, "direct")[:1] if run.cuda else ()),
    ]


def _models(run: Run, overlap: Overlap, route: str) -> list[Cell]:
    cells = [
        Cell(
            {"what": "ResNet-18 as the step", "write": False, "route": route},
            functools.partial(overlap.resnet, route),
        )
    ]
    many, n_hidden = (65_536, 8) if run.cuda else (1024, 1)
    for n_ids, shared in ((many, 0.5), (many, 0.0), (many // 8, 0.5)):
        key = {
            "what": "train_rows with a network",
            "n_ids": n_ids,
            "shared": shared,
            "write": True,
            "route": route,
        }
        measure = functools.partial(overlap.embeddings, n_ids, n_hidden, shared)
        cells.append(Cell(key, measure))
    return cells


def _first_batch(feeder: Feeder, store: PinnedStore) -> torch.Tensor:
    """Return a copy of the first batch.

    Raises:
        AssertionError: If a row differs from that of the store.
    """
    with contextlib.closing(feeder.batches()) as batches:  # type: ignore[type-var]  # a generator
        batch = next(batches)
        resident: torch.Tensor = batch.data.clone()
        if not torch.equal(resident.cpu(), torch.from_numpy(store.array[batch.rows])):
            raise AssertionError(f"rows by the {feeder.plan.route} route are wrong")
        return resident


def _nothing(batch: Any) -> None:
    """Do nothing."""


def _write_back(batch: Any) -> None:
    batch.write_back(batch.data)
