"""Padding, fill and speed of buckets and packing, compared with Transformers and TRL.

Run it from the root, with the packages of the group ``bench``:

    python -m benchmarks.packing

Lengths are log-normal. All ways have the same rows, each once in an epoch, and a benchmark asserts
it. Rates are the largest of several runs, because the machine may be busy with other work.

- *padding*: share of the elements of all padded batches that are padding
- *fill*: share of the elements of all sequences that are tokens; for batches without padding, the
  mean number of tokens of a batch divided by the largest
- *million rows/s*: rows that are ordered or packed per second. TRL writes a new data set, so its
  rate includes the copies of all tokens.
- *ms*: time to make a batch of rows in memory: the tokens, positions and bounds of all rows
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from tabulate import tabulate

import pinfeed
from benchmarks.environment import environment, save
from benchmarks.programs.group_by_length import LengthGroupedSampler
from pinfeed.rows import bucketed, element_batches, packed, shuffled

N_ROWS = 200_000
BATCH_SIZE = 32
LONGEST = 32_768
MAX_ELEMENTS = 32_768
SEQUENCES = (4096, 8192)
"""Elements of a packed sequence; longer rows are cut to it before."""
N_RUNS = 5
N_BATCHES = 1000
PEERS = ("transformers", "trl", "datasets")

Record = dict[str, Any]


def padded(lengths: np.ndarray) -> list[Record]:
    """Return the padding and the rate of each way to make padded batches."""
    from transformers.trainer_pt_utils import LengthGroupedSampler as TheirSampler

    n_rows = len(lengths)
    positions = np.arange(n_rows)
    order = bucketed(lengths, batch_size=BATCH_SIZE, seed=1)
    listed = lengths.tolist()

    def grouped(make: Callable[..., Iterable[int]], given: Any) -> np.ndarray:
        generator = torch.Generator().manual_seed(1)
        return np.array(list(make(BATCH_SIZE, lengths=given, generator=generator)))

    # The sampler of the program is the one of Transformers.
    assert (grouped(LengthGroupedSampler, lengths) == grouped(TheirSampler, listed)).all()
    by_elements = {"order": shuffled(1), "padded": True}
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "batches of random rows": lambda: cut(np.random.default_rng(1).permutation(n_rows)),
        "LengthGroupedSampler of Transformers": lambda: cut(grouped(TheirSampler, listed)),
        "`bucketed`": lambda: cut(order.bind(n_rows, 0)(positions)),
        f"`element_batches`, {MAX_ELEMENTS:,} elements": lambda: element_batches(
            lengths, MAX_ELEMENTS, **by_elements
        ),
        f"`element_batches`, {MAX_ELEMENTS:,} elements, `window=1600`": lambda: element_batches(
            lengths, MAX_ELEMENTS, window=50 * BATCH_SIZE, **by_elements
        ),
    }
    records = []
    for name, make in ways.items():
        batches, rate = timed(make, n_rows)
        assert np.array_equal(np.sort(np.concatenate(batches)), positions), name
        n_padded = [len(batch) * int(lengths[batch].max()) for batch in batches]
        padding = 1 - int(lengths.sum()) / sum(n_padded)
        largest = max(n_padded)
        records.append({"way": name, "padding": padding, "largest": largest, "rate": rate})
    return records


def filled(lengths: np.ndarray, most: int) -> list[Record]:
    """Return the fill and the rate of each way to make batches without much padding."""
    n_rows = len(lengths)
    n_elements = int(lengths.sum())
    records = []
    ways: tuple[dict[str, Any], ...] = ({}, {"window": 8192}, {"split": "always"})
    for options in ways:
        batches = packed(lengths, most, order=shuffled(1), **options)
        found, rate = timed(lambda batches=batches: batches, n_rows)
        name = "".join(f", `{key}={value!r}`" for key, value in options.items())
        fill = n_elements / len(found) / most
        records.append({"way": f"`packed`{name}", "fill": fill, "rate": rate})
    unpacked, rate = timed(lambda: element_batches(lengths, most, order=shuffled(1)), n_rows)
    fill = n_elements / len(unpacked) / most
    records.append({"way": "`element_batches`", "fill": fill, "rate": rate})
    for strategy in ("bfd", "wrapped"):
        records += [trl_way(lengths, most, strategy, window) for window in (1000, 8192)]
    # The collator joins a fixed number of rows, so memory must hold the largest batch.
    n = flattened_rows(lengths, most)
    sums = np.add.reduceat(
        lengths[np.random.default_rng(1).permutation(n_rows)], np.arange(0, n_rows, n)
    )
    name = f"DataCollatorWithFlattening, {n} random rows"
    records.append({"way": name, "fill": float(sums.mean() / sums.max()), "rate": None})
    return records


def trl_way(lengths: np.ndarray, most: int, strategy: str, window: int) -> Record:
    """Return the fill and the rate of TRL's packing.

    Args:
        lengths: Length of each row.
        most: Elements of a sequence.
        strategy: TRL's name of the strategy.
        window: Number of rows that are packed together; TRL's default is 1,000.
    """
    from trl import pack_dataset

    offsets = np.concatenate(([0], np.cumsum(lengths)))
    items = pa.array(np.zeros(offsets[-1], np.int32))
    column = pa.LargeListArray.from_arrays(pa.array(offsets), items)
    data = datasets.Dataset(pa.table({"input_ids": column})).with_format("arrow")
    found: list[Any] = []

    def pack() -> list[Any]:
        found[:] = [pack_dataset(data, most, strategy, {"batch_size": window})]
        return found

    (sequences,), rate = timed(pack, len(lengths))
    kept = sum(len(chunk.values) for chunk in sequences.data.column("input_ids").chunks)
    assert kept == offsets[-1]
    fill = float(offsets[-1]) / len(sequences) / most
    return {"way": f"TRL, {strategy}, {window:,} rows at a time", "fill": fill, "rate": rate}


def flattened_rows(lengths: np.ndarray, most: int) -> int:
    """Return the rows of a batch that has ``most`` tokens in the mean."""
    return max(1, int(most // lengths.mean()))


def flattened(lengths: np.ndarray, most: int) -> list[Record]:
    """Return the time of batches without padding, whose tensors are compared."""
    from transformers import DataCollatorWithFlattening

    n = flattened_rows(lengths, most)
    lengths = lengths[: n * N_BATCHES]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.random.default_rng(2).integers(32_000, size=offsets[-1], dtype=np.int32)
    rows = [part.tolist() for part in np.split(tokens, offsets[1:-1])]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    arrays = [{"input_ids": one} for one in rows]

    def theirs() -> list[Any]:
        starts = range(0, len(arrays), n)
        batches = (collator(arrays[i : i + n]) for i in starts)
        return [(one["input_ids"], one["position_ids"], one["cu_seq_lens_q"]) for one in batches]

    def ours(depth: int) -> list[Any]:
        documents = pinfeed.RaggedStore(tokens, offsets, layout="packed")
        with pinfeed.Feeder(documents, batch_size=n, depth=depth, device="cpu") as feeder:
            return [(one.values, one.position_ids, one.cu_seqlens) for one in feeder]

    records = []
    expected = theirs()
    for name, make in {
        "DataCollatorWithFlattening": theirs,
        '`layout="packed"`, depth 0': lambda: ours(0),
        '`layout="packed"`, depth 2': lambda: ours(2),
    }.items():
        found, rate = timed(make, N_BATCHES)
        for batch, want in zip(found, expected, strict=True):
            for part, want_part in zip(batch, want, strict=True):
                assert (part.flatten() == want_part.flatten()).all(), name
        records.append({"way": name, "ms": 1e-3 / rate})
    return records


def cut(rows: Any) -> list[Any]:
    return [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]


def timed(make: Callable[[], Iterable[Any]], n: int) -> tuple[list[Any], float]:
    """Return the batches, and the largest rate of several runs in millions per second."""
    best = 0.0
    for _ in range(N_RUNS):
        start = time.perf_counter()
        batches = list(make())
        best = max(best, n / (time.perf_counter() - start) / 1e6)
    return batches, best


def report(results: Record) -> str:
    """Return the figures as tables in Markdown."""
    lines = [
        [one["way"], f"{one['padding']:.1%}", f"{one['largest']:,}", f"{one['rate']:.2f}"]
        for one in results["padded"]
    ]
    heads = ["padded batches", "padding", "elements of the largest batch", "million rows/s"]
    tables = [table(lines, heads)]
    for most, records in results["filled"].items():
        lines = [
            [one["way"], f"{one['fill']:.2%}", f"{one['rate']:.2f}" if one["rate"] else ""]
            for one in records
        ]
        tables.append(table(lines, [f"sequences of {int(most):,}", "fill", "million rows/s"]))
    lines = [[one["way"], f"{one['ms']:.3f}"] for one in results["flattened"]]
    tables.append(table(lines, ["a batch without padding", "ms"]))
    return "\n\n".join(tables)


def table(lines: list[list[str]], heads: list[str]) -> str:
    align = ("left", *["right"] * (len(heads) - 1))
    return tabulate(lines, heads, tablefmt="github", disable_numparse=True, colalign=align)


def main() -> None:
    print(environment())
    datasets.disable_progress_bars()
    datasets.disable_caching()
    lengths = np.exp(np.random.default_rng(0).normal(6, 1, N_ROWS)).astype(np.int64) + 1
    lengths = lengths.clip(max=LONGEST)
    shortened = {most: lengths.clip(max=most) for most in SEQUENCES}
    results: Record = {
        "versions": {name: importlib.metadata.version(name) for name in PEERS},
        "rows": {"n": N_ROWS, "mean": float(lengths.mean()), "longest": int(lengths.max())},
        "padded": padded(lengths),
        "filled": {str(most): filled(part, most) for most, part in shortened.items()},
        "flattened": flattened(shortened[SEQUENCES[0]], SEQUENCES[0]),
    }
    print(report(results))
    path = save("packing", results)
    path.with_suffix(".md").write_text(report(results) + "\n")
    print(path)


if __name__ == "__main__":
    main()
