"""Zarr arrays in batches: with pinfeed, with zarr alone, and the tiles of xbatcher.

Run it from the root; the tiles need xarray and xbatcher, and are left out without them:

    python -m benchmarks.arrays

"zarr" is pinfeed with every chunk decoded by zarr, as for arrays with other codecs. The batches of
each way must be equal. Files are in the page cache, and each figure is the best of the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import zarr
from tabulate import tabulate

import pinfeed
from pinfeed.stores.raw_chunks import ZarrChunks

Array = npt.NDArray[Any]

SHAPE = (3000, 64, 64)
CHUNKS = ((100, 64, 64), (100, 32, 32), (20, 64, 64), (4, 64, 64))
ORDERS = {"in sequence": pinfeed.rows.sequential(), "shuffled": pinfeed.rows.shuffled(1)}
TILES = ({}, {"lat": 32})


def epoch(source: Any, order: Any, n: int) -> tuple[float, Array]:
    """Return the seconds of a first epoch, and its batches as one array."""
    with pinfeed.Feeder(source, batch_size=64, rows=order, device="cpu") as feeder:
        begin = time.perf_counter()
        batches = list(feeder)
        seconds = time.perf_counter() - begin
    rows = np.concatenate([batch.numpy() for batch in batches])
    assert len(rows) == n
    return seconds, rows


def rates(folder: Path, chunks: tuple[int, ...], order: Any, n_rounds: int) -> list[str]:
    """Return the MB per second of zarr and of pinfeed, and their ratio."""
    steps = np.random.default_rng(0).integers(-3, 4, SHAPE)
    made = zarr.create_array(folder, shape=SHAPE, chunks=chunks, dtype="f4", overwrite=True)
    made[...] = values = np.cumsum(steps, axis=0).astype(np.float32)
    wanted = values[order.bind(SHAPE[0], 0)(np.arange(SHAPE[0]))]
    best = {}
    for _ in range(n_rounds):
        for way, of in (("zarr", lambda array: None), ("pinfeed", ZarrChunks.of)):
            with mock.patch.object(ZarrChunks, "of", of), pinfeed.ZarrStore(folder) as store:
                seconds, rows = epoch(store, order, SHAPE[0])
            np.testing.assert_array_equal(rows, wanted)
            best[way] = min(seconds, best.get(way, seconds))
    speeds = [f"{values.nbytes / best[way] / 1e6:,.0f}" for way in ("zarr", "pinfeed")]
    return [*speeds, f"{best['zarr'] / best['pinfeed']:.1f}"]


def tiles(folder: Path, overlap: dict[str, int], n_rounds: int) -> list[str]:
    """Return the seconds of xbatcher and of pinfeed for all tiles, and their ratio."""
    import xarray
    import xbatcher

    values = np.random.default_rng(0).normal(size=(30, 256, 320)).astype(np.float32)
    data = xarray.Dataset({"air": (("time", "lat", "lon"), values)})
    data.chunk({"time": 10}).to_zarr(folder, mode="w", consolidated=False)
    size = {"time": 1, "lat": 64, "lon": 64}
    step = tuple(64 - overlap.get(name, 0) for name in ("lat", "lon"))

    def theirs() -> Array:
        opened = xarray.open_zarr(folder, consolidated=False)
        batches = xbatcher.BatchGenerator(opened, size, input_overlap=overlap)
        return np.concatenate([batch["air"].values for batch in batches])

    def ours() -> Array:
        with (
            pinfeed.ZarrStore(folder, "air") as store,
            store.windows(axis=(1, 2), length=64, step=step) as windows,
        ):
            return epoch(windows, pinfeed.rows.sequential(), windows.n_rows)[1]

    best: dict[Callable[[], Array], float] = {}
    for _ in range(n_rounds):
        found = []
        for way in (theirs, ours):
            begin = time.perf_counter()
            found.append(way())
            seconds = time.perf_counter() - begin
            best[way] = min(seconds, best.get(way, seconds))
        np.testing.assert_array_equal(*found)
    return [f"{best[theirs]:.2f} s", f"{best[ours]:.2f} s", f"{best[theirs] / best[ours]:.1f}"]


def main() -> None:
    """Compare the ways, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    n_rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.zarr"
        rows = [
            (f"{chunks}, {name}", *rates(path, chunks, order, n_rounds))
            for chunks in CHUNKS
            for name, order in ORDERS.items()
        ]
        head = ("chunks", "zarr, MB/s", "pinfeed, MB/s", "times as fast")
        print(tabulate(rows, head, tablefmt="github", disable_numparse=True))
        if importlib.util.find_spec("xbatcher") is not None:
            rows = [
                (f"64 x 64, overlap {overlap}", *tiles(Path(folder) / "t.zarr", overlap, n_rounds))
                for overlap in TILES
            ]
            head = ("tiles", "xbatcher", "pinfeed", "times as fast")
            print(tabulate(rows, head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
