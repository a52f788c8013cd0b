"""Padding, fill and speed of buckets and packing, compared with the usual ways.

python -m benchmarks.packing
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from tabulate import tabulate

import pinfeed
from pinfeed.rows import bucketed, element_batches, packed, shuffled

N_ROWS = 200_000
BATCH_SIZE = 32
N_RUNS = 3


def main() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(6, 1, N_ROWS)).astype(np.int64) + 1, 32_768)
    print(f"pinfeed {pinfeed.__version__}; {N_ROWS:,} rows, log-normal, mean {lengths.mean():.0f}")
    padded(lengths)
    for most in (4096, 8192):
        filled(np.minimum(lengths, most), most)


def padded(lengths: Any) -> None:
    order = bucketed(lengths, batch_size=BATCH_SIZE, seed=1)
    positions = np.arange(N_ROWS)
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "random batches": lambda: cut(np.random.default_rng(1).permutation(N_ROWS)),
        "sorted as group_by_length does": lambda: cut(grouped(lengths)),
        "bucketed": lambda: cut(order.bind(N_ROWS, 0)(positions)),
        "element_batches": lambda: element_batches(lengths, 32_768, order=shuffled(1), padded=True),
        "element_batches, window=1600": lambda: element_batches(
            lengths, 32_768, order=shuffled(1), padded=True, window=1600
        ),
    }
    rows = []
    for name, make in ways.items():
        batches, rate = timed(make)
        assert np.array_equal(np.sort(np.concatenate(batches)), positions), name
        n_padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        rows.append((name, f"{1 - lengths.sum() / n_padded:.1%}", rate))
    print(tabulate(rows, ("padded batches", "padding", "million rows/s")), "\n")


def filled(lengths: Any, most: int) -> None:
    rows = []
    for split in ("never", "always"):
        batches = packed(lengths, most, order=shuffled(1), split=split)  # type: ignore[arg-type]
        found, rate = timed(lambda batches=batches: batches)
        rows.append((f"packed, split={split!r}", f"{lengths.sum() / len(found) / most:.2%}", rate))
    unpacked, rate = timed(lambda: element_batches(lengths, most, order=shuffled(1)))
    rows.append(("element_batches", f"{lengths.sum() / len(unpacked) / most:.2%}", rate))
    # DataCollatorWithFlattening joins the rows of each batch: there is no padding, but batches have
    # a fixed number of rows, so memory must hold the largest of them.
    n = max(1, most // int(lengths.mean()))
    mixed = lengths[np.random.default_rng(1).permutation(N_ROWS)]
    sums = np.add.reduceat(mixed, range(0, N_ROWS, n))
    rows.append((f"flattened batches of {n} rows", f"{sums.mean() / sums.max():.2%}", None))
    for name, fill, rate in trl_ways(lengths, most):
        rows.append((name, fill, rate))
    print(tabulate(rows, (f"sequences of {most:,}", "fill", "million rows/s")), "\n")


def cut(rows: Any) -> list[Any]:
    return [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]


def grouped(lengths: Any) -> Any:
    """Sort each 50 random batches by length, as transformers documents ``group_by_length``."""
    rows = np.random.default_rng(1).permutation(len(lengths))
    window = 50 * BATCH_SIZE
    parts = [rows[i : i + window] for i in range(0, len(rows), window)]
    return np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])


def trl_ways(lengths: Any, most: int) -> list[tuple[str, str, float]]:
    """Return the results of TRL's packing, which writes a new data set, if it is installed."""
    try:
        from datasets import Dataset
        from trl import pack_dataset
    except (ImportError, RuntimeError):
        # TRL raises RuntimeError if a library that it needs cannot be imported.
        return []
    import pyarrow as pa

    offsets = np.concatenate(([0], np.cumsum(lengths)))
    items = pa.array(np.zeros(offsets[-1], np.int32))
    column = pa.LargeListArray.from_arrays(pa.array(offsets), items)
    data = Dataset(pa.table({"input_ids": column})).with_format("arrow")
    rows = []
    for strategy in ("bfd", "wrapped"):
        start = time.perf_counter()
        n = len(pack_dataset(data, most, strategy))
        rate = len(lengths) / (time.perf_counter() - start) / 1e6
        rows.append((f"TRL, {strategy}, copies tokens", f"{offsets[-1] / n / most:.2%}", rate))
    return rows


def timed(make: Callable[[], Iterable[Any]]) -> tuple[list[Any], float]:
    """Return the batches, and the largest of several rates in million rows per second."""
    best = 0.0
    for _ in range(N_RUNS):
        start = time.perf_counter()
        batches = list(make())
        best = max(best, N_ROWS / (time.perf_counter() - start) / 1e6)
    return batches, best


if __name__ == "__main__":
    main()
