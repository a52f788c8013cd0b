"""The host's work for a batch: the gap between batches, CPU time and switches of each thread."""

from __future__ import annotations

import functools
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import wait, words
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import ArrayStore, Feeder, PinnedStore, wrap_loader

_N_WARM = 50
_DEPTHS = (0, 1, 2)
_OTHERS = "threads that run no Python"

Usage = dict[str, Counter[str]]
"""Microseconds of CPU time and voluntary context switches of each thread, by its name."""


class Nothing(ArrayStore):
    """A store whose gather does nothing, so only the loop's own work remains."""

    def gather(self, rows: Any, out: Any) -> None:
        pass


def host_work(run: Run) -> list[Cell]:
    """Return cells of loops without a step, which show the work that each batch costs the host."""
    n = 3000 if run.cuda else 200
    memory = functools.cache(lambda: words((64 << 20) if run.cuda else (1 << 20), pin=run.cuda))
    empty = np.zeros((16 * (n + _N_WARM + 1), 4), np.float32)
    empty.flags.writeable = False

    def table(n_words: int) -> PinnedStore:
        store: PinnedStore = memory()
        whole = store.n_rows // n_words * n_words
        return PinnedStore(store.array[:whole].reshape(-1, n_words), pin=run.cuda)

    def random_rows(n_rows: int, batch_size: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.permutation(n_rows)[:batch_size] for _ in range(64)] * (n // 64 + 2)

    def fed(make: Callable[[], Any], write: bool, **options: Any) -> Fields:
        source = make()
        if isinstance(source, PinnedStore):
            options["rows"] = random_rows(source.n_rows, options.pop("batch_size"))
        with Feeder(source, device=run.device, **options) as feeder:
            batches = feeder.batches() if write else feeder
            step = (lambda batch: batch.write_back(batch.data)) if write else _nothing
            return {**measured(batches, step, n, run.device), "plan": feeder.plan.route}

    def loaded(pinned: bool, **options: Any) -> Fields:
        if pinned:
            run.require_cuda("page-locked memory of torch")
        some = [torch.full((80_000,), float(i), pin_memory=pinned) for i in range(8)]
        loader = [some[i % len(some)] for i in range(n + _N_WARM + 1)]
        with wrap_loader(loader, device=run.device, **options) as batches:
            return measured(batches, _nothing, n, run.device)

    sources: list[tuple[str, Callable[[], Any], int, bool]] = [
        ("empty source", lambda: Nothing(empty), 16, False),
        ("64 rows of 3 KB", lambda: table(384), 64, False),
        ("16 rows of 16 B, written back", lambda: table(2), 16, True),
    ]
    cells = []
    for depth in (*_DEPTHS, None):
        given = {} if depth is None else {"depth": depth}
        for name, make, batch_size, write in sources:
            measure = functools.partial(fed, make, write, batch_size=batch_size, **given)
            cells.append(Cell({"loop": name, "depth": depth}, measure))
        for pinned in (True, False):
            key = {"loop": "wrap_loader, 320 KB", "pinned": pinned, "depth": depth}
            cells.append(Cell(key, functools.partial(loaded, pinned, **given)))
    return cells


def measured(batches: Iterable[Any], step: Callable[[Any], object], n: int, device: str) -> Fields:
    """Return microseconds of a batch, and what it costs each thread, over up to ``n`` batches.

    The mean includes the time of ``step``. Half of the time of loops with write-backs is in few
    long batches, which a median hides, so both are recorded.
    """
    gaps = []
    before: Usage = {}
    begin = last = 0.0
    count = 0
    for i, batch in enumerate(batches):
        now = time.perf_counter()
        if i == _N_WARM:
            before = usage()
            begin = now = time.perf_counter()
        elif i > _N_WARM:
            gaps.append(now - last)
            count = i - _N_WARM
        step(batch)
        del batch
        last = time.perf_counter()
        if count == n:
            break
    wait(device)
    mean = (time.perf_counter() - begin) / max(1, count)
    after = usage()
    threads = {
        name: {
            key: round((used[key] - before.get(name, Counter())[key]) / count, 2) for key in used
        }
        for name, used in after.items()
    }
    return {
        "gap_us": round(statistics.median(gaps) * 1e6, 1),
        "mean_us": round(mean * 1e6, 1),
        "batches": count,
        "cpu_us": round(sum(one["cpu_us"] for one in threads.values()), 1),
        "switches": round(sum(one["switches"] for one in threads.values()), 2),
        "threads": threads,
    }


def usage() -> Usage:
    """Return what each thread of this process has used so far. Threads of equal names are added."""
    found: Usage = {}
    cpu_s = time.process_time()
    n_switches = _switches(Path("/proc/self/status"), every_thread=True)
    for thread in threading.enumerate():
        try:
            used_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        except (OSError, OverflowError):
            # The thread has ended.
            continue
        switches = _switches(Path(f"/proc/self/task/{thread.native_id}/status"))
        # Pools number their threads.
        name = re.sub(r"[-_]?\d+$", "", thread.name)
        found.setdefault(name, Counter())
        found[name].update(cpu_us=used_s * 1e6, switches=switches)
        cpu_s -= used_s
        n_switches -= switches
    found[_OTHERS] = Counter(cpu_us=max(0.0, cpu_s * 1e6), switches=max(0, n_switches))
    return found


def _switches(path: Path, *, every_thread: bool = False) -> int:
    """Return the voluntary context switches of a thread, or of all threads of this process."""
    paths = list(Path("/proc/self/task").glob("*/status")) if every_thread else [path]
    total = 0
    for one in paths:
        try:
            found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", one.read_text(), re.MULTILINE)
        except OSError:
            continue
        total += int(found[1]) if found else 0
    return total


def _nothing(batch: Any) -> None:
    """Do nothing."""
