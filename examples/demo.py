"""Stream a shuffled .npy file into a training step, inside a memory limit.

The same loop is run with a plain DataLoader, and both read the file from the disk. The model is a
small autoencoder, which learns to reproduce a row from a few numbers. Both loops have the same rows
in the same order, so their losses must be equal bit for bit. Run ``make demo``, or ``python
examples/demo.py --help``.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import pinfeed
from pinfeed.memory.units import human

LIMIT = pinfeed.MiB(256)
STEP = pinfeed.MiB(96)
"""The part of the limit that is reserved for the training step of the program."""
BATCH_SIZE = 2048
BATCH_BYTES = pinfeed.MiB(16)
WIDTH = 1024
OUT = Path("demo")


@dataclass
class Result:
    """Measurements of one loop."""

    seconds: float
    waited_s: float
    peak_growth: int
    losses: list[float]
    nbytes: int

    def __str__(self) -> str:
        first, last = np.mean(self.losses[:5]), np.mean(self.losses[-5:])
        return (
            f"{self.seconds:6.1f} s  {self.nbytes / self.seconds / 1e9:5.2f} GB/s"
            f"  waited {self.waited_s / self.seconds:4.0%} of the time"
            f"  memory +{human(self.peak_growth):9}  loss {first:.3f} -> {last:.3f}"
        )


class Training:
    """A training step on a batch of rows."""

    def __init__(
        self, row_shape: tuple[int, ...], device: str, sample: torch.Tensor, n_steps: int
    ) -> None:
        torch.manual_seed(0)
        width = min(WIDTH, math.prod(row_shape))
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(width, 32), nn.Linear(32, width)).to(
            device
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        sample = features(sample)
        self.mean = sample.mean()
        self.scale = sample.std().clamp_min(1e-6)
        # All losses are in one tensor. A small tensor from every step would lie between the large
        # ones, and glibc could return none of their memory to the system.
        self.losses = torch.zeros(n_steps, device=device)
        self.step = 0

    def __call__(self, rows: torch.Tensor) -> None:
        x = (features(rows) - self.mean) / self.scale
        loss = nn.functional.mse_loss(self.model(x), x)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.losses[self.step] = loss.detach()
        self.step += 1


def features(rows: torch.Tensor) -> torch.Tensor:
    """Return the beginning of each row, from which the model learns."""
    return rows.reshape(len(rows), -1)[:, :WIDTH].to(torch.float32)


class Rows(Dataset[torch.Tensor]):
    """The dataset of a plain loop: a memory map."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")
        self.dtype = self.rows.dtype.newbyteorder("=")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows[index], self.dtype))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--npy", type=Path, help="stream this file (default: write demo/rows.npy and stream it)"
    )
    parser.add_argument(
        "--size", type=size, default=size("2GiB"), help="size of the written file (default: 2GiB)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    OUT.mkdir(exist_ok=True)
    path = arguments.npy or written(OUT / "rows.npy", arguments.size)

    rows = np.load(path, mmap_mode="r")
    preferred = max(1, min(BATCH_SIZE, BATCH_BYTES * len(rows) // max(1, rows.nbytes)))
    config = pinfeed.Config(cpu_memory_limit=LIMIT - STEP, preferred_batch_size=preferred)
    with pinfeed.Feeder(path, config=config, shuffle=True, progress=True, timeline=True) as feeder:
        print(f"\n{path} on {feeder.device}:\n{feeder.plan}\n")
        if feeder.device == "cpu":
            # The reader threads need a core. With as many threads as cores, torch's threads would
            # wait for each other.
            torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        fed = run(feeder, feeder.device, path, preferred)
        feeder.timeline.save(OUT / "timeline.png", last_s=min(1.0, fed.seconds / 2))
        feeder.timeline.save(OUT / "timeline.json")
        batch_size = feeder.plan.batch_size
    order = pinfeed.rows.shuffled().bind(len(Rows(path)), 0)
    sampler = order(np.arange(len(Rows(path)))).tolist()
    plain = run(
        on(feeder.device, DataLoader(Rows(path), batch_size, sampler=sampler), "DataLoader"),
        feeder.device,
        path,
        preferred,
    )
    report(fed, plain)


def report(fed: Result, plain: Result) -> None:
    """Compare the loop over a feeder with that over a DataLoader."""
    print(
        f"\npinfeed shuffled {human(fed.nbytes)}, and memory grew by {human(fed.peak_growth)} with "
        f"the training step (limit {human(LIMIT)}, DataLoader {human(plain.peak_growth)})"
    )
    print(f"losses equal, bit for bit: {np.array_equal(fed.losses, plain.losses, equal_nan=True)}")
    print(
        f"waited for data: {fed.waited_s:.1f} s (DataLoader {plain.waited_s:.1f} s); "
        f"time {fed.seconds / plain.seconds:.2f} of the DataLoader's"
    )
    print(f"\npinfeed     {fed}\nDataLoader  {plain}\n")
    print(
        f"timeline of the last steps: {OUT / 'timeline.png'} "
        f"(and {OUT / 'timeline.json'} for https://ui.perfetto.dev)"
    )
    if fed.peak_growth > LIMIT:
        raise SystemExit(
            f"resident memory grew by {human(fed.peak_growth)}, "
            f"more than the limit of {human(LIMIT)}"
        )


def run(batches: Iterable[torch.Tensor], device: str, path: Path, batch_size: int) -> Result:
    """Train for one epoch, and measure the loop."""
    rows = np.load(path, mmap_mode="r")
    nbytes = rows.nbytes
    row_shape = rows.shape[1:]
    n_rows = len(rows)
    sample, some = (
        torch.from_numpy(np.array(rows[:n], rows.dtype.newbyteorder("="))).to(device)
        for n in (256, batch_size)
    )
    del rows
    # A step to warm up allocates the memory of the model before growth is measured.
    Training(row_shape, device, sample, n_rows)(some)
    training = Training(row_shape, device, sample, n_rows)
    del some
    gc.collect()
    forget(path)
    start = time.perf_counter()
    waited = 0.0
    asked = time.perf_counter()
    with peak_growth() as growth:
        for batch in batches:
            waited += time.perf_counter() - asked
            training(batch)
            asked = time.perf_counter()
        # This waits until the device has completed all its work.
        losses = training.losses[: training.step].tolist()
    return Result(time.perf_counter() - start, waited, growth(), losses, nbytes)


def on(device: str, loader: DataLoader[Any], name: str) -> Iterator[torch.Tensor]:
    """Copy a loader's batches to the device, one at a time."""
    for batch in tqdm(loader, desc=name, unit="batch"):
        yield batch.to(device)


class peak_growth:  # noqa: N801  # reads as a verb
    """Measure the peak growth of resident memory, from the kernel's counter of the peak."""

    def __enter__(self) -> Callable[[], int]:
        Path("/proc/self/clear_refs").write_text("5")
        before = self.field("VmRSS")
        return lambda: self.field("VmHWM") - before

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to undo."""

    @staticmethod
    def field(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


def written(path: Path, nbytes: int) -> Path:
    """Write rows of 1024 float32 that 16 numbers determine, except for some noise."""
    n = max(BATCH_SIZE, nbytes // 4096)
    if path.exists() and np.load(path, mmap_mode="r").shape == (n, 1024):
        return path
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(16, 1024)).astype(np.float32)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (n, 1024))
    for start in tqdm(range(0, n, 8192), desc=f"writing {path}", unit="piece"):
        piece = file[start : start + 8192]
        piece[...] = rng.normal(size=(len(piece), 16)).astype(np.float32) @ basis / 4
        piece += rng.normal(scale=0.1, size=1024).astype(np.float32)
    return path


def forget(path: Path) -> None:
    """Drop a file from the page cache, so that each loop reads it from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size(text: str) -> int:
    """Return the bytes of a text such as ``2GiB`` or ``96MiB``."""
    found = re.fullmatch(r"([\d.]+)\s*([KMG])i?B", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 2GiB or 96MiB")
    return {"K": pinfeed.KiB, "M": pinfeed.MiB, "G": pinfeed.GiB}[found[2]](float(found[1]))


if __name__ == "__main__":
    main()
