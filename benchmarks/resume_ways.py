"""Programs that mix two sources and save their position: pinfeed, and LitData as it documents.

Run as ``python -m benchmarks.resume_ways WAY FOLDER N_PARTS FIRST_PART``. The program continues
after the saved position if there is one. It saves its position after every tenth batch, and writes
a line with the row numbers of each batch. ``benchmarks/resume.py`` reads the lines, and kills the
program.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pinfeed

SIZES = {"web": 70_000, "code": 30_000}
"""Rows of each source."""
WEIGHTS = {"web": 0.7, "code": 0.3}
LENGTH = 65
BATCH_SIZE = 64
SAVE_EVERY = 10
# Rows of a file in LitData's format.
_CHUNK_ROWS = 2000


def rows_of(name: str) -> np.ndarray:
    """Return the rows of a source, whose first token is a number that no other row has."""
    names = list(SIZES)
    first = sum(SIZES[one] for one in names[: names.index(name)])
    rows = np.zeros((SIZES[name], LENGTH), np.int32)
    rows[:, 0] = np.arange(first, first + len(rows))
    return rows


def prepare_pinfeed(folder: Path) -> None:
    for name in SIZES:
        np.save(folder / f"{name}.npy", rows_of(name))


def chunk(part: tuple[str, int]) -> Iterator[torch.Tensor]:
    """Yield the tokens of a file in LitData's format."""
    name, begin = part
    yield torch.from_numpy(rows_of(name)[begin : begin + _CHUNK_ROWS].ravel())


def prepare_litdata(folder: Path) -> None:
    """Write the sources in LitData's format for tokens."""
    from litdata import TokensLoader, optimize

    for name, n_rows in SIZES.items():
        optimize(
            chunk,
            [(name, begin) for begin in range(0, n_rows, _CHUNK_ROWS)],
            str(folder / name),
            chunk_size=LENGTH * _CHUNK_ROWS,
            item_loader=TokensLoader(),
            num_workers=1,
            keep_data_ordered=True,
            verbose=False,
        )


def run_pinfeed(folder: Path, state: Any, n_ranks: int, rank: int) -> tuple[Any, Callable[[], Any]]:
    """Return the batches from a state on, and the function that returns the state."""
    sources = {name: pinfeed.NpyStore(folder / f"{name}.npy") for name in SIZES}
    order = pinfeed.rows.mixed(sources, WEIGHTS, seed=42)
    ranks = pinfeed.Ranks("join", rank=rank, world_size=n_ranks, split_batches=True)
    feeder = pinfeed.Feeder(
        pinfeed.concat(sources), batch_size=BATCH_SIZE, rows=order, ranks=ranks, device="cpu"
    )
    if state is not None:
        feeder.load_state_dict(state)
    return feeder, feeder.state_dict


def run_litdata(folder: Path, state: Any, n_workers: int, _: int) -> tuple[Any, Callable[[], Any]]:
    """Return the batches from a state on, and the function that returns the state."""
    from litdata import (
        CombinedStreamingDataset,
        StreamingDataLoader,
        StreamingDataset,
        TokensLoader,
    )

    datasets = [
        StreamingDataset(
            str(folder / name),
            item_loader=TokensLoader(block_size=LENGTH),
            shuffle=True,
            drop_last=True,
        )
        for name in SIZES
    ]
    combined = CombinedStreamingDataset(
        datasets, seed=42, weights=tuple(WEIGHTS.values()), iterate_over_all=False
    )
    loader = StreamingDataLoader(combined, batch_size=BATCH_SIZE, num_workers=n_workers)
    if state is not None:
        loader.load_state_dict(state)
    return loader, loader.state_dict


PREPARE = {"pinfeed": prepare_pinfeed, "litdata": prepare_litdata}
RUN = {"pinfeed": run_pinfeed, "litdata": run_litdata}


def main(way: str, folder: Path, n_parts: int, part: int) -> None:
    """Iterate over an epoch, or the rest of it, and report its batches."""
    path = folder / "state.pt"
    if way == "litdata":
        importlib.import_module("litdata")
    begin = time.perf_counter()
    saved = torch.load(path) if path.exists() else {"batches": 0, "state": None}
    batches, state_dict = RUN[way](folder, saved["state"], n_parts, part)
    for number, batch in enumerate(batches, saved["batches"] + 1):
        report: dict[str, Any] = {"batch": number, "rows": batch[:, 0].tolist()}
        if number == saved["batches"] + 1:
            report["first_batch_s"] = time.perf_counter() - begin
        if number % SAVE_EVERY == 0:
            # The file has a complete state at any moment.
            torch.save({"batches": number, "state": state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
