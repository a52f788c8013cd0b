"""The time that a loop waits, by ``feeder.stats`` and by a clock around the iterator.

Each case is a new process, which reads a warm file of 4 KiB rows in random order. The loop has a
training step of about 2 ms on one thread, or only adds up a column. In half of the cases, memory is
touched and freed just before the clock starts. Many virtual machines give idle memory back to their
host, and touching it again is slow. Run it from the root:

    # one minute
    python -m benchmarks.waiting
    python -m benchmarks.waiting --size 0.25 --dir /fast/disk

The goal is that both shares differ by at most two percentage points in every epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import pinfeed
from benchmarks.conditions import ComputingStep, read_through, touch_memory
from benchmarks.environment import environment, save
from benchmarks.onerun import timed
from benchmarks.rowfile import KINDS, create

N_EPOCHS = 3
GOAL = 2.0
"""Percentage points by which the two shares may differ."""


def epoch(feeder: pinfeed.Feeder, step: ComputingStep) -> dict[str, Any]:
    """Run an epoch, and return what the loop measured and what the feeder counted."""
    before = feeder.stats
    (timing,), _ = timed(iter([feeder]), step, math.inf, lambda: None)
    counted = feeder.stats - before
    # Every value of a row is the index of the row.
    assert timing.total == counted.rows * (counted.rows - 1) / 2, "a row is missing or wrong"
    return {
        "seconds": timing.seconds,
        "clock": 100 * timing.waited_s / timing.seconds,
        "stats": 100 * counted.starved,
        "data": 100 * counted.wait_s / counted.seconds,
        "overhead": 100 * counted.overhead_s / counted.seconds,
        "verdict": counted.verdict,
    }


def run(path: Path, *, has_step: bool, is_touched: bool) -> list[dict[str, Any]]:
    """Run the epochs of a case, in a process of its own."""
    torch.set_num_threads(1)
    read_through([path])
    kind = KINDS["4 KiB"]
    step = ComputingStep(kind.n_products * has_step)
    with pinfeed.Feeder(path, batch_size=kind.batch_size, shuffle=True, device="cpu") as feeder:
        if is_touched:
            touch_memory(path.stat().st_size * 3 // 2)
        return [epoch(feeder, step) for _ in range(N_EPOCHS)]


def measure(path: Path) -> list[dict[str, Any]]:
    """Run each case in a process, and return a record for each epoch."""
    records = []
    for has_step, is_touched in itertools.product((True, False), (True, False)):
        case = {"has_step": has_step, "is_touched": is_touched}
        command = [sys.executable, "-m", "benchmarks.waiting", "--one", json.dumps(case)]
        done = subprocess.run(
            [*command, "--dir", path.parent], check=True, stdout=subprocess.PIPE, text=True
        )
        for number, found in enumerate(json.loads(done.stdout.splitlines()[-1])):
            records.append({**case, "epoch": number, **found})
    return records


def report(records: list[dict[str, Any]]) -> str:
    """Return the records as a table."""
    shares = ("clock", "stats", "data", "overhead")
    rows = [
        [
            "2 ms" if record["has_step"] else "none",
            "yes" if record["is_touched"] else "no",
            record["epoch"],
            *(f"{record[share]:.1f}" for share in shares),
            f"{record['stats'] - record['clock']:+.1f}",
            record["verdict"],
        ]
        for record in records
    ]
    headers = ("step", "touched", "epoch", "clock %", "stats %", "data %", "overhead %", "points")
    return tabulate(rows, (*headers, "verdict"), disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=1.0, metavar="GIB", help="size of the file")
    parser.add_argument("--dir", type=Path, help="folder of the file (default: temporary)")
    # The benchmark starts its own processes with it.
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(run(arguments.dir / "rows.npy", **arguments.one)))
        return
    print(environment())
    with tempfile.TemporaryDirectory(prefix="waiting-", dir=arguments.dir) as folder:
        path = Path(folder) / "rows.npy"
        create(path, KINDS["4 KiB"], pinfeed.GiB(arguments.size))
        records = measure(path)
    print(report(records))
    worst = max(abs(record["stats"] - record["clock"]) for record in records)
    print(f"largest difference: {worst:.1f} percentage points (goal: {GOAL})")
    print(save("waiting", records))


if __name__ == "__main__":
    main()
