"""The batches of Parquet files in sequence, as programs decode them with pyarrow in each epoch."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, Program, Step
from benchmarks.programs.tabular import FEATURES, SIZES, Size, make_step, prepare


def original(folder: Path, size: Size, step: Step) -> None:
    """Decode a batch after the other with pyarrow, in each epoch."""
    for _ in itertools.count():
        for path in sorted(folder.glob("part-*.parquet")):
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(size.batch_size):
                    columns = [batch[name].fill_null(0).to_numpy() for name in FEATURES]
                    inputs = torch.from_numpy(np.stack(columns, 1, dtype=np.float32))
                    targets = torch.from_numpy(batch["y"].to_numpy().copy())
                    step(inputs.to(DEVICE), targets.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the columns of all files as a matrix."""
    files = str(folder / "part-*.parquet")
    x = pinfeed.ParquetStore(files, columns=FEATURES, dtype="float32", missing=0)
    y = pinfeed.ParquetStore(files, "y")
    with pinfeed.Feeder((x, y), batch_size=size.batch_size, device=DEVICE) as feeder:
        for _ in itertools.count():
            for inputs, targets in feeder:
                step(inputs, targets)


PROGRAM = Program(
    title="Parquet batches, in sequence",
    sizes=SIZES,
    prepare=prepare,
    ways={"pyarrow iter_batches": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
