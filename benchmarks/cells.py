"""Loaders of cells of AnnData files: equal cells, then cells per second of each epoch, and memory.

Run it from the root, with anndata, annbatch, zarrs and scvi-tools installed (annbatch needs Python
3.12; ways whose libraries are missing are left out):

    python -m benchmarks.cells
    python -m benchmarks.cells --cells 60000 --only sparse

Cells have 20,000 genes, of which 1,700 are not zero on average. Sparse ways read 512 cells at a
time from the sharded Zarr format of annbatch, in blocks of 512 cells that each library shuffles
itself. Dense ways read the same shuffled batches of 128 cells from an .h5ad file. Every way runs in
a process of its own, and reads three epochs, because some read the file only in the first one. Each
epoch must have the same cells. A check of this loads the libraries before the first measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tabulate import tabulate

import pinfeed
from benchmarks.processes import new_process
from benchmarks.programs import single_cells

BLOCK_ROWS = 512
WINDOW_BLOCKS = 16
DENSE_ROWS = 128
N_EPOCHS = 3

Epochs = Iterator[Iterator[torch.Tensor]]
"""The batches of each epoch, sparse or dense, shape (n, n_genes)."""


def prepare(folder: Path, n_cells: int) -> None:
    """Write the cells as .h5ad and, if annbatch is installed, as its Zarr format."""
    size = dataclasses.replace(single_cells.SIZES["full"], n_cells=n_cells)
    single_cells.prepare(folder, size)
    if importlib.util.find_spec("annbatch") is None:
        return
    import annbatch
    import anndata
    import zarr

    adata = anndata.AnnData(single_cells.Cells(folder / "cells.h5ad").counts)
    annbatch.write_sharded(zarr.open_group(folder / "cells.zarr", mode="w", zarr_format=3), adata)
    adata.write_h5ad(folder / "scvi.h5ad")


def annbatch_epochs(folder: Path) -> Epochs:
    """Shuffle blocks of cells with annbatch."""
    import annbatch
    import anndata
    import zarr

    matrix = anndata.io.sparse_dataset(zarr.open_group(folder / "cells.zarr", mode="r")["X"])
    for _ in range(N_EPOCHS):
        loader = annbatch.Loader(
            chunk_size=BLOCK_ROWS,
            preload_nchunks=WINDOW_BLOCKS,
            batch_size=BLOCK_ROWS,
            shuffle=True,
            preload_to_gpu=False,
            to="torch",
        )
        loader.add_dataset(matrix)
        yield (batch["X"] for batch in loader)


def zarrs_epochs(folder: Path) -> Epochs:
    """Shuffle blocks of cells with annbatch and the codecs of zarrs."""
    import zarr

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    return annbatch_epochs(folder)


def sparse_epochs(folder: Path, limit: str | None = None, window_blocks: int = 16) -> Epochs:
    """Shuffle blocks of cells with pinfeed."""
    order = pinfeed.rows.block_shuffled(1, block_rows=BLOCK_ROWS, window_blocks=window_blocks)
    config = limit and pinfeed.Config(cpu_memory_limit=limit, preferred_batch_size=BLOCK_ROWS)
    size = None if limit else BLOCK_ROWS
    path = folder / "cells.zarr"
    with (
        pinfeed.SparseStore(path) as store,
        pinfeed.Feeder(store, batch_size=size, config=config, rows=order, device="cpu") as feeder,
    ):
        for _ in range(N_EPOCHS):
            yield iter(feeder)


def limited_epochs(folder: Path) -> Epochs:
    """Shuffle blocks of cells with pinfeed, in windows that fit in a limit."""
    return sparse_epochs(folder, "260MiB", window_blocks=8)


def _scvi_epochs(folder: Path, backed: str | None) -> Epochs:
    import anndata
    from scvi.data import AnnDataManager
    from scvi.data.fields import LayerField
    from scvi.dataloaders import AnnDataLoader

    cells = anndata.read_h5ad(folder / "scvi.h5ad", backed=backed)
    manager = AnnDataManager([LayerField("X", None, is_count_data=False)])
    manager.register_fields(cells)
    for _ in range(N_EPOCHS):
        rows = np.concatenate(_batches(cells.n_obs))
        loader = AnnDataLoader(manager, indices=rows, shuffle=False, batch_size=DENSE_ROWS)
        yield (batch["X"] for batch in loader)


def scvi_epochs(folder: Path) -> Epochs:
    """Read dense batches of a matrix in memory with scvi-tools."""
    return _scvi_epochs(folder, None)


def backed_epochs(folder: Path) -> Epochs:
    """Read dense batches of the file with scvi-tools."""
    return _scvi_epochs(folder, "r")


def scipy_epochs(folder: Path) -> Epochs:
    """Index a matrix in memory, and make the rows dense."""
    counts = single_cells.Cells(folder / "cells.h5ad").counts
    for _ in range(N_EPOCHS):
        yield (torch.from_numpy(counts[rows].toarray()) for rows in _batches(counts.shape[0]))


def dense_epochs(folder: Path) -> Epochs:
    """Read dense batches of the file with pinfeed."""
    with pinfeed.SparseStore(folder / "cells.h5ad", layout="dense") as store:
        rows = _batches(store.n_rows)
        with pinfeed.Feeder(store, rows=rows, device="cpu") as feeder:
            for _ in range(N_EPOCHS):
                yield iter(feeder)


def _batches(n_cells: int) -> list[np.ndarray]:
    rows = np.random.default_rng(1).permutation(n_cells)
    return np.array_split(rows, range(DENSE_ROWS, n_cells, DENSE_ROWS))


WAYS: dict[str, Callable[[Path], Epochs]] = {
    "sparse, annbatch": annbatch_epochs,
    "sparse, annbatch with zarrs": zarrs_epochs,
    "sparse, pinfeed": sparse_epochs,
    "sparse, pinfeed within 260 MiB": limited_epochs,
    "dense, scvi-tools in memory": scvi_epochs,
    "dense, scvi-tools backed": backed_epochs,
    "dense, scipy in memory": scipy_epochs,
    "dense, pinfeed": dense_epochs,
}
_MODULES = {"sparse": "annbatch", "zarrs": "zarrs", "scvi": "scvi"}


def times(way: str, folder: str) -> dict[str, Any]:
    """Return the cells per second of each epoch, and the peak memory of the process in MiB."""
    torch.set_num_threads(1)
    rates = []
    peak = 0
    begin = time.perf_counter()
    for batches in WAYS[way](Path(folder)):
        n_cells = 0
        for batch in batches:
            n_cells += len(batch)
            peak = max(peak, psutil.Process().memory_info().rss)
        rates.append(n_cells / (time.perf_counter() - begin))
        begin = time.perf_counter()
    return {"rates": rates, "MiB": peak / 2**20}


def check(way: str, folder: str) -> list[int]:
    """Return a checksum of the cells of each epoch, in any order."""
    genes = torch.arange(single_cells.SIZES["full"].n_genes)
    # Sums of small whole numbers are exact.
    weights = torch.stack([genes % 7 + 1, genes % 11 + 1], dim=1).float()
    found = []
    for batches in WAYS[way](Path(folder)):
        sums = torch.cat([batch @ weights for batch in batches]).double()
        sums = sums[:, 0] * 2**24 + sums[:, 1]
        found.append(zlib.crc32(sums.sort().values.numpy().tobytes()))
    return found


def main() -> None:
    """Compare all ways that are installed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    given = parser.parse_args()
    missing = [key for key, name in _MODULES.items() if importlib.util.find_spec(name) is None]
    ways = [way for way in WAYS if given.only in way and not any(key in way for key in missing)]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), given.cells)
        wanted: list[int] = []
        for i in range(given.rounds):
            for way in ways if i % 2 else reversed(ways):
                with new_process() as process:
                    sums = process.submit(check, way, folder).result()
                    wanted = wanted or sums[:1] * N_EPOCHS
                    assert sums == wanted, f"{way} has other cells"
                    found[way].append(process.submit(times, way, folder).result())
    rows = [
        (
            way,
            *(f"{rate:,.0f}" for rate in np.median([run["rates"] for run in one], axis=0)),
            f"{statistics.median(run['MiB'] for run in one):,.0f}",
        )
        for way, one in found.items()
    ]
    head = ("way", *(f"cells/s, epoch {i}" for i in range(N_EPOCHS)), "MiB")
    print(tabulate(rows, head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
