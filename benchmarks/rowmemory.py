"""Resident memory of a large table of rows on the host, when it is made and when it is trained."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch

import pinfeed
from benchmarks.onerun import memory

BIG_DIM = 128


def measured_apart(device: str, n_rows: int) -> dict[str, Any]:
    """Call ``big_table`` in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.rows", "--memory", str(n_rows), "--device", device],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def big_table(device: str, n_rows: int) -> dict[str, Any]:
    """Return the resident memory of a table, drawn and trained.

    A small table is trained first, to load the code.
    """

    def made_and_trained(n_rows: int) -> tuple[int, int]:
        table = pinfeed.HostEmbedding(n_rows, BIG_DIM, pin=device == "cuda", name="table")
        made = memory()["VmHWM"]
        optimizer = pinfeed.RowOptimizer(torch.optim.SGD, [table], lr=0.1)
        rng = np.random.default_rng(0)
        ids = [torch.from_numpy(rng.integers(n_rows, size=4096)) for _ in range(50)]
        for batch in pinfeed.train_rows(
            ids, {table: lambda batch: batch}, optimizer=optimizer, device=device
        ):
            table(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return made, memory()["VmHWM"]

    made_and_trained(10_000)
    before, nbytes = memory()["VmRSS"], 4 * n_rows * BIG_DIM
    made, trained = made_and_trained(n_rows)
    return {
        "rows": [n_rows, BIG_DIM],
        "table_gb": nbytes / 1e9,
        "made_over_table": round((made - before) / nbytes, 4),
        "trained_over_table": round((trained - before) / nbytes, 4),
    }
