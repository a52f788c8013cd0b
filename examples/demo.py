"""Stream a shuffled .npy file into a training step, inside a memory limit.

DataLoaders run the same loop: with the single rows that most programs ask for, and with whole
batches, without and with worker processes, which is faster. Every loop reads the file from the
disk. The model is a small autoencoder, which learns to reproduce a row from a few numbers. All
loops have the same rows in the same order, so their losses must be equal bit for bit. Run ``make
demo``, or ``python examples/demo.py --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from tabulate import tabulate
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import pinfeed
from pinfeed.memory.units import human

LIMIT = pinfeed.MiB(256)
STEP = pinfeed.MiB(96)
"""The part of the limit that is reserved for the training step of the program."""
SMALL = pinfeed.MiB(512)
BATCH_SIZE = 2048
BATCH_BYTES = pinfeed.MiB(16)
WIDTH = 512
OUT = Path("demo")


class Result(NamedTuple):
    """Measurements of one loop.

    Attributes:
        own: Peak growth of the memory of the process and its workers, in bytes.
        mapped: The same for pages of the file, which the kernel may drop.
    """

    name: str
    seconds: float
    waited_s: float
    own: int
    mapped: int
    losses: list[float]
    nbytes: int

    @property
    def row(self) -> list[str]:
        """Return the line of the table."""
        return [
            self.name,
            f"{self.seconds:.1f} s",
            f"{self.nbytes / self.seconds / 1e9:.2f} GB/s",
            f"{self.waited_s / self.seconds:.0%}",
            human(self.own),
            human(self.mapped),
        ]


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
    """The dataset of a plain loop: a memory map, whose items are rows or whole batches."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r").view(np.ndarray)
        self.dtype = self.rows.dtype.newbyteorder("=")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.from_numpy(self.rows.take(index, axis=0).astype(self.dtype, copy=False))


def loaders(path: Path, batch_size: int) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yield DataLoaders with the rows of pinfeed's order, and their names.

    Each has a memory map of its own, because the kernel keeps the pages that one still maps.
    """
    n_rows = len(Rows(path))
    order = pinfeed.rows.shuffled().bind(n_rows, 0)(np.arange(n_rows))
    batches: Any = [order[i : i + batch_size] for i in range(0, n_rows, batch_size)]
    yield "a DataLoader of single rows", DataLoader(Rows(path), batch_size, sampler=order.tolist())
    yield "a DataLoader of whole batches", DataLoader(Rows(path), None, sampler=batches)
    n_workers = min(2, len(os.sched_getaffinity(0)))
    loader = DataLoader(Rows(path), None, sampler=batches, num_workers=n_workers)
    yield f"the same with {n_workers} workers", loader


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--npy", type=Path, help="stream this file (default: write demo/rows.npy and stream it)"
    )
    parser.add_argument(
        "--size", type=size, default=size("1GiB"), help="size of the written file (default: 1GiB)"
    )
    return parser.parse_args()


def main() -> None:
    begin = time.perf_counter()
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
        fed = run("pinfeed", feeder, feeder.device, path, preferred)
        feeder.timeline.save(OUT / "timeline.png", last_s=min(1.0, fed.seconds / 2))
        feeder.timeline.save(OUT / "timeline.json")
        batch_size = feeder.plan.batch_size
    plain = [
        run(name, on(feeder.device, loader, name), feeder.device, path, preferred)
        for name, loader in loaders(path, batch_size)
    ]
    report(fed, plain)
    print(f"The demo took {time.perf_counter() - begin:.0f} s.")
    if fed.own + fed.mapped > LIMIT:
        raise SystemExit(
            f"memory grew by {human(fed.own + fed.mapped)}, more than the limit of {human(LIMIT)}"
        )


def report(fed: Result, plain: list[Result]) -> None:
    """Print the measurements, and what was gained in words."""
    heads = ["", "time", "rate", "waited", "own memory", "mapped pages of the file"]
    print("\n" + tabulate([one.row for one in (fed, *plain)], heads, disable_numparse=True))
    first, last = np.mean(fed.losses[:5]), np.mean(fed.losses[-5:])
    differ = max(sum(a != b for a, b in zip(fed.losses, one.losses, strict=True)) for one in plain)
    print(
        f"\npinfeed trained on {human(fed.nbytes)} in random order "
        f"(loss {first:.3f} to {last:.3f}):"
    )
    for one in plain:
        print(f"- {one.seconds / fed.seconds:.1f} times as fast as {one.name}")
    if fed.nbytes < SMALL:
        print(f"  (a file below {human(SMALL)} is read in less time than a loop takes to begin)")
    largest = max(one.own + one.mapped for one in plain)
    print(
        f"- memory grew by {human(fed.own + fed.mapped)}, inside the limit of {human(LIMIT)}, of "
        f"which {human(STEP)} are for the training step; with a DataLoader by up to "
        f"{human(largest)}, mapped pages included\n"
        f"- {differ} of {len(fed.losses)} losses differ from those of the DataLoaders\n"
        f"The timeline of the last steps is in {OUT / 'timeline.png'} "
        f"(and in {OUT / 'timeline.json'} for https://ui.perfetto.dev)."
    )


def run(
    name: str, batches: Iterable[torch.Tensor], device: str, path: Path, batch_size: int
) -> Result:
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
    before = np.array(memory())
    peak = before
    start = asked = time.perf_counter()
    waited = 0.0
    for batch in batches:
        waited += time.perf_counter() - asked
        training(batch)
        if training.step % 4 == 0:
            peak = np.maximum(peak, memory())
        asked = time.perf_counter()
    # This waits until the device has completed all its work.
    losses = training.losses[: training.step].tolist()
    seconds = time.perf_counter() - start
    own, mapped = (int(nbytes) for nbytes in peak - before)
    return Result(name, seconds, waited, own, mapped, losses, nbytes)


def on(device: str, loader: DataLoader[Any], name: str) -> Iterator[torch.Tensor]:
    """Copy a loader's batches to the device, one at a time."""
    for batch in tqdm(loader, desc=name, unit="batch"):
        yield batch.to(device)


def memory() -> tuple[int, int]:
    """Return the bytes of this process and its workers: their own, and mapped pages of files.

    Pages that several processes have are divided among them.
    """
    own = mapped = 0
    for process in (psutil.Process(), *psutil.Process().children()):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            found = {key: int(kb) * 1024 for key, kb in re.findall(r"(Pss_\w+): +(\d+) kB", text)}
            own += found["Pss_Anon"] + found["Pss_Shmem"]
            mapped += found["Pss_File"]
    return own, mapped


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
