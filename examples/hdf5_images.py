"""HDF5: compressed images and their labels, read chunk by chunk within a memory limit.

An HDF5 file stores its rows in chunks, and each chunk is decompressed as a whole. A Dataset that
reads single rows in random order decompresses a chunk for almost every row. ``block_shuffled``
mixes the rows of many chunks, and reads each chunk once per window. Datasets that you opened stay
open.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch

import pinfeed

CHUNK = 64


def main(n_images: int = 20_000, limit: float = 64) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.h5"
        images = rng.integers(0, 16, (n_images, 3, 32, 32), np.uint8)
        labels = rng.integers(10, size=n_images)
        with h5py.File(path, "w") as file:
            file.create_dataset(
                "images", data=images, chunks=(CHUNK, 3, 32, 32), compression="gzip"
            )
            file["labels"] = labels

        order = pinfeed.rows.block_shuffled(seed=1, block_rows=CHUNK)
        config = pinfeed.Config(cpu_memory_limit=pinfeed.MiB(limit), preferred_batch_size=128)
        with h5py.File(path) as file:
            source = {"x": file["images"], "y": file["labels"]}
            with pinfeed.Feeder(source, config=config, rows=order) as feeder:
                print(feeder.plan)
                for batch in feeder.batches():
                    assert np.array_equal(batch.data["x"].cpu(), images[batch.rows])
                    assert np.array_equal(batch.data["y"].cpu(), labels[batch.rows])

        # A store opens a path itself, and closes it.
        store = pinfeed.HDF5Store(path, "images")
        with pinfeed.Feeder(store, batch_size=500) as feeder:
            whole = torch.cat([x.cpu() for x in feeder])
        store.close()
        assert np.array_equal(whole, images)
        print(f"{n_images} images, equal in both orders")


if __name__ == "__main__":
    main()
