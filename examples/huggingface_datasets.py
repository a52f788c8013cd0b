"""Hugging Face datasets: a Dataset, also a shuffled and filtered one, as the source of a feeder.

The columns are read from Arrow's own memory. A dataset that was loaded from disk is a memory map:
only the rows of the next batches are copied, a batch at a time.
"""

from __future__ import annotations

import tempfile

import datasets
import numpy as np
import torch
from datasets import Array2D, Dataset, Features, List, Value
from torch.utils.data import DataLoader

import pinfeed


def make(n: int) -> Dataset:
    rng = np.random.default_rng(0)
    columns = {
        "image": rng.integers(0, 256, (n, 8, 8), np.uint8),
        "features": rng.normal(size=(n, 16)).astype("float32"),
        "label": rng.integers(10, size=n),
        "name": [f"sample {i}" for i in range(n)],
    }
    features = Features(
        {
            "image": Array2D((8, 8), "uint8"),
            "features": List(Value("float32"), 16),
            "label": Value("int64"),
            "name": Value("string"),
        }
    )
    return Dataset.from_dict(columns, features=features)


def main() -> None:
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        make(1000).save_to_disk(folder)
        data = Dataset.load_from_disk(folder).filter(lambda row: row["label"] != 3).shuffle(seed=0)

        with pinfeed.Feeder(data, batch_size=64, shuffle=True, seed=1) as feeder:
            for batch in feeder.batches():
                want = data.with_format("torch")[batch.rows.tolist()]
                # Text is a list of strings next to the tensors of the batch.
                assert batch.data.pop("name") == list(want["name"])
                for name, tensor in batch.data.items():
                    assert torch.equal(tensor.cpu(), want[name].to(tensor.dtype))
            print(f"{feeder.stats.rows} rows, equal to dataset[i]")

        numbers = data.select_columns(["image", "features", "label"])
        with pinfeed.RowDataset(numbers) as rows_of:
            # The same rows by index: a batch of a DataLoader is one gather.
            x = next(iter(DataLoader(rows_of, batch_size=64)))["features"]
            assert torch.equal(x, torch.tensor(numbers[:64]["features"]))


if __name__ == "__main__":
    main()
