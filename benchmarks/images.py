"""Augmented images in batches, loaded by pinfeed and its peers with the same functions.

A folder has 4,000 JPEG files of about 200 KB. Every contestant decodes them, crops them randomly to
224 x 224 pixels, flips and normalizes them, and yields batches of 64 in the same order, with two
workers. The random numbers are a function of the index, so all batches must be equal, which is
checked first. simplejpeg releases the interpreter's lock, and Pillow holds it longer. Run it from
the root of the repository:

    # the peers
    pip install -c constraints.txt --group bench
    # everything, about an hour
    python -m benchmarks.images
    # 400 files, one round
    python -m benchmarks.images --quick

Every run is a process of its own, and each round begins with another contestant, because the speed
of machines varies over time. Threads of some libraries can make samples or whole batches. Both are
measured, and the better one is reported. The files are in the page cache. Figures are medians of
the rounds:

- images per second of a loop that does nothing, and of one that trains a small network with all
  cores, construction and start of the loader included;
- seconds to the first batch, from the construction of the loader;
- memory that belongs to the process and its workers, at its peak;
- microseconds per sample that exists already, so that only the loader works.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from benchmarks.conditions import memory_by_kind, read_through, touch_memory
from benchmarks.environment import environment, save
from benchmarks.image_loaders import BATCH_SIZE, CONTESTANTS, WHOLE, Task
from benchmarks.image_samples import DECODERS, Images, Ready, files_of
from benchmarks.processes import in_process

OURS = "pinfeed"
FACTORS = {"per_s": 1.0, "seconds": 1.0, "nbytes": 1 / (1 << 20), "us": 1.0}
"""The main figures of runs, and the factors of the units in the names of their cells."""
_TIMEOUT_S = 180.0
# The batches that are compared, and those after which the memory is measured.
_N_CHECKED = 3
_N_MEASURED = 12
# A loop that is slower than the loaders, so that their queues are full.
_SLOW_STEP_S = 0.5
_TOUCHED_BYTES = 1 << 30

Figures = dict[str, float]
Cells = dict[str, dict[str, Any]]
"""Jobs by the name of their cell."""


def run_job(call: str, **arguments: Any) -> Any:
    """Run a function of this module, with one contestant that is imported first."""
    # Grain logs that jax is missing.
    logging.disable(logging.WARNING)
    if "name" in arguments:
        importlib.import_module(CONTESTANTS[arguments["name"]].module)
    return JOBS[call](**arguments)


def image_task(n_files: int, decoder: str) -> Task:
    """Return the images of the folder, with all files in the page cache."""
    dataset = Images(n_files, decoder)
    read_through(dataset.paths)
    return Task(dataset)


def check(name: str, n_files: int, decoder: str) -> None:
    """Compare every element of the first batches of images, and of all batches of ready tensors.

    Raises:
        AssertionError: If they differ.
    """
    for task, n_batches in ((image_task(n_files, decoder), _N_CHECKED), (Task(Ready(1000)), None)):
        wanted = task.index_batches[:n_batches]
        batches = itertools.islice(CONTESTANTS[name].batches(task), n_batches)
        for indices, batch in zip(wanted, batches, strict=True):
            pairs = zip(parts_of(batch), parts_of(task.batch(indices)), strict=True)
            for given, expected in pairs:
                assert torch.equal(given, expected), f"{name}, {decoder}: another batch"
                assert given.dtype == expected.dtype
                assert given.is_contiguous()


def parts_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


class Step:
    """A training step of a small convolutional network."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=8, padding=3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            Residual(16),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            Residual(32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.01)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(self.network(images), labels % 10)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Residual(nn.Module):
    """A residual block with two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


def step_alone() -> Figures:
    """Return the seconds of a training step without a loader."""
    step = Step()
    images = torch.rand(BATCH_SIZE, 3, 224, 224)
    labels = torch.arange(BATCH_SIZE)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        step(images, labels)
        times.append(time.perf_counter() - begin)
    return {"seconds": sorted(times)[len(times) // 2]}


def rate(name: str, n_files: int, decoder: str, *, computes: bool) -> Figures:
    """Return the images per second of an epoch, and the share of time that the loop waited."""
    task = image_task(n_files, decoder)
    step = Step() if computes else None
    if step is not None:
        # The first step chooses kernels.
        step(*task.batch(task.indices[:BATCH_SIZE]))
    n_images = len(task.indices)
    touch_memory(_TOUCHED_BYTES)
    seen = []
    waited_s = 0.0
    begin = asked = time.perf_counter()
    for batch in CONTESTANTS[name].batches(task):
        waited_s += time.perf_counter() - asked
        seen.append(batch[1])
        if step is not None:
            step(*batch)
        asked = time.perf_counter()
    seconds = time.perf_counter() - begin
    assert torch.cat(seen).tolist() == task.indices, f"{name}: another order"
    return {"per_s": n_images / seconds, "waited": waited_s / seconds}


def first_batch(name: str, n_files: int, decoder: str) -> Figures:
    """Return the seconds from the construction of the loader to the first batch."""
    task = image_task(n_files, decoder)
    assert task.indices
    touch_memory(_TOUCHED_BYTES)
    begin = time.perf_counter()
    next(iter(CONTESTANTS[name].batches(task)))
    return {"seconds": time.perf_counter() - begin}


def memory(name: str, n_files: int, decoder: str) -> Figures:
    """Return the largest growth of memory of this process and its workers, in bytes.

    Pages that several processes have are divided among them. The loop is slow, so that the queues
    are full.
    """
    task = image_task(n_files, decoder)
    # A first sample imports the decoder.
    task.batch(task.indices[:1])
    before = own_bytes()
    peak = before
    for _ in itertools.islice(CONTESTANTS[name].batches(task), _N_MEASURED):
        time.sleep(_SLOW_STEP_S)
        peak = max(peak, own_bytes())
    return {"nbytes": peak - before}


def own_bytes() -> int:
    """Return the anonymous memory of this process and its workers, and all shared memory.

    No process maps the batches that are in the queue of a DataLoader.
    """
    shared = re.search(r"^Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert shared is not None
    return memory_by_kind()["anonymous"] + int(shared[1]) * 1024


def overhead(name: str, n_samples: int) -> Figures:
    """Return the seconds per sample that exists already."""
    task = Task(Ready(n_samples))
    n_expected = len(task.index_batches)
    assert len(task.indices) == n_samples
    begin = time.perf_counter()
    n_batches = sum(1 for _ in CONTESTANTS[name].batches(task))
    seconds = time.perf_counter() - begin
    assert n_batches == n_expected
    return {"us": seconds / n_samples * 1e6}


JOBS = {
    "check": check,
    "step_alone": step_alone,
    "rate": rate,
    "first_batch": first_batch,
    "memory": memory,
    "overhead": overhead,
}


class Contest:
    """The contestants, their cells, and the results of all runs.

    Args:
        names: Names of the contestants.
        cells: Jobs of the cells.
    """

    def __init__(self, names: list[str], cells: Cells) -> None:
        self.names = names
        self.cells = cells
        self.runs: dict[str, dict[str, list[Figures]]] = {cell: {} for cell in cells}
        self.steps_s: list[float] = []

    def admit(self, n_files: int) -> None:
        """Leave out contestants that are not installed or yield other data.

        Raises:
            RuntimeError: If pinfeed yields other data.
        """
        for name in self.names[:]:
            try:
                if not CONTESTANTS[name].is_installed:
                    raise RuntimeError("it is not installed")
                for decoder in DECODERS:
                    self._run({"call": "check", "n_files": n_files, "decoder": decoder}, name)
            except RuntimeError as error:
                if name.startswith(OURS):
                    raise
                print(f"{name} is left out: {error}", flush=True)
                self.names.remove(name)
        print(f"equal batches: {'; '.join(self.names)}", flush=True)

    def run_round(self, number: int) -> None:
        """Run all contestants in all cells once, and the step alone."""
        self.steps_s.append(in_process("benchmarks.images", {"call": "step_alone"})["seconds"])
        first = number % len(self.names)
        for cell, job in self.cells.items():
            for name in self.names[first:] + self.names[:first]:
                try:
                    found = self._run(job, name)
                except RuntimeError as error:
                    print(f"{cell}: {name} failed: {error}", flush=True)
                    continue
                self.runs[cell].setdefault(name, []).append(found)
                print(f"{cell}: {name}: {found}", flush=True)

    def _run(self, job: dict[str, Any], name: str) -> Any:
        return in_process("benchmarks.images", job | {"name": name}, _TIMEOUT_S)


def all_cells(n_files: int, n_samples: int) -> Cells:
    """Return the job of each cell, with a number of files, and of samples that exist."""
    cells: Cells = {}
    for step in (False, True):
        for decoder in DECODERS:
            job = {"call": "rate", "n_files": n_files, "decoder": decoder, "computes": step}
            cells[f"images per s, {decoder}{', training step' * step}"] = job
    for decoder in DECODERS:
        job = {"call": "first_batch", "n_files": n_files, "decoder": decoder}
        cells[f"s to the first batch, {decoder}"] = job
    decoder = next(iter(DECODERS))
    cells[f"MiB, {decoder}"] = {"call": "memory", "n_files": n_files, "decoder": decoder}
    cells["µs per sample that exists"] = {"call": "overhead", "n_samples": n_samples}
    return cells


def best_variants(cell: str, by_name: dict[str, list[Figures]]) -> dict[str, tuple[float, float]]:
    """Return the medians of the better variant of each library.

    Returns:
        The figure and the share of time waited, by the name of the variant.
    """
    found: dict[str, tuple[float, float]] = {}
    for library in dict.fromkeys(name.removesuffix(WHOLE) for name in by_name):
        medians = {}
        for name in {library, library + WHOLE} & by_name.keys():
            runs = by_name[name]
            key = next(key for key in FACTORS if key in runs[0])
            value = statistics.median(run[key] for run in runs) * FACTORS[key]
            medians[name] = value, statistics.median(run.get("waited", 0.0) for run in runs)
        best = max if cell.startswith("images per s") else min
        name = best(medians, key=medians.__getitem__)
        found[name] = medians[name]
    return found


def report(results: dict[str, Any]) -> str:
    """Return the figures of all contestants, and the ratio of pinfeed to the best peer."""
    libraries = [name for name in CONTESTANTS if not name.endswith(WHOLE)]
    lines = []
    waits = []
    for cell, by_name in results["runs"].items():
        variants = best_variants(cell, by_name)
        found = {name.removesuffix(WHOLE): figures for name, figures in variants.items()}
        stars = {name.removesuffix(WHOLE): " \\*" * name.endswith(WHOLE) for name in variants}
        shown = [_text(found[name][0]) + stars[name] if name in found else "" for name in libraries]
        peers = {name: found[name][0] for name in found if not name.startswith(OURS)}
        best = max if cell.startswith("images per s") else min
        peer = best(peers, key=peers.__getitem__)
        ours = [f"{found[name][0] / peers[peer]:.2f}" for name in found if name.startswith(OURS)]
        lines.append([cell, *shown, f"{' and '.join(ours)} ({peer})"])
        if "step" in cell:
            shares = [f"{found[name][1]:.0%}" if name in found else "" for name in libraries]
            waits.append([cell.removeprefix("images per s, "), *shares])
    step_ms = statistics.median(results["steps_s"]) * 1e3
    note = (
        "\\* Threads make whole batches, which was faster than samples. The training step alone "
        f"takes {step_ms:.0f} ms."
    )
    heads = ["", *libraries, "ratio to the best peer"]
    figures = tabulate(lines, heads, tablefmt="github", disable_numparse=True)
    table = tabulate(waits, ["", *libraries], tablefmt="github", disable_numparse=True)
    title = "Share of the time that a loop with a training step waits:"
    return "\n\n".join([figures, note, title, table])


def _text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="400 files, one round; saves nothing")
    parser.add_argument("--rounds", type=int, default=3)
    # The benchmark starts its own processes with it.
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(run_job(**arguments.one)), flush=True)
        for worker in multiprocessing.active_children():
            worker.kill()
        # A peer may hang when the interpreter ends after an early break.
        os._exit(0)
    print(environment(), flush=True)
    n_files, n_samples = (400, 10_000) if arguments.quick else (4000, 100_000)
    files_of(n_files)
    contest = Contest(list(CONTESTANTS), all_cells(n_files, n_samples))
    contest.admit(n_files)
    for number in range(1 if arguments.quick else arguments.rounds):
        contest.run_round(number)
    results = {"runs": contest.runs, "steps_s": contest.steps_s}
    print(report(results))
    if not arguments.quick:
        path = save("images", results)
        path.with_suffix(".md").write_text(report(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
