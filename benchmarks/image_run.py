"""One run of one contestant with images, in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.conditions import memory_by_kind, read_through, touch_memory
from benchmarks.image_loaders import BATCH_SIZE, CONTESTANTS, Task
from benchmarks.image_samples import Images, Ready, first_values

# The batches that are compared, and those after which the memory is measured.
_N_CHECKED = 3
_N_MEASURED = 12
# A loop that is slower than the loaders, so that their queues are full.
_SLOW_STEP_S = 0.5
_TOUCHED_BYTES = 1 << 30

Results = dict[str, Any]


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


def step_alone() -> Results:
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


def rate(name: str, n_files: int, decoder: str, *, computes: bool) -> Results:
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
        seen.append(first_values(batch))
        if step is not None:
            step(*batch)
        asked = time.perf_counter()
    seconds = time.perf_counter() - begin
    assert torch.cat(seen).tolist() == task.indices, f"{name}: another order"
    return {"per_s": n_images / seconds, "waited": waited_s / seconds}


def first_batch(name: str, n_files: int, decoder: str) -> Results:
    """Return the seconds from the construction of the loader to the first batch."""
    task = image_task(n_files, decoder)
    assert task.indices
    touch_memory(_TOUCHED_BYTES)
    begin = time.perf_counter()
    next(iter(CONTESTANTS[name].batches(task)))
    return {"seconds": time.perf_counter() - begin}


def memory(name: str, n_files: int, decoder: str) -> Results:
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


def overhead(name: str, n_samples: int) -> Results:
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
