"""Prices of single calls of the CUDA driver, from C and through torch."""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.processes import last_lines, run_program
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped

DRIVER = "libcuda.so.1"
_SOURCE = Path(__file__).with_name("driver_prices.c")
_COMPILE_S = 30.0
_GROUP = 64
_N_GROUPS = 40


def prices(run: Run) -> list[Cell]:
    """Return a cell for the calls from C, and one for each call through torch."""
    made = functools.cache(lambda: Calls(run.device))
    cells = [Cell({"from": "C"}, lambda: from_c(DRIVER, run.left_s()))]
    for name in Calls.NAMES:
        measure = functools.partial(lambda name: made().price(name), name)
        cells.append(Cell({"from": "torch", "call": name}, measure))
    return cells


def from_c(driver: str, limit_s: float) -> Fields:
    """Return microseconds of each call: the median and the 90th percentile.

    Raises:
        Skipped: If there is no C compiler, or no driver.
    """
    if shutil.which("cc") is None:
        raise Skipped("there is no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "driver_prices")
        command = ("cc", "-std=gnu11", "-O2", "-Wall", str(_SOURCE), "-o", program, "-ldl")
        status, output = run_program(command, _COMPILE_S)
        if status == 0:
            status, output = run_program((program, driver), max(1.0, limit_s))
    if status != 0 and f"{driver}: cannot open" in output:
        raise Skipped(f"there is no {driver}")
    if status != 0:
        raise RuntimeError(f"{_SOURCE.name} ended with status {status}: {last_lines(output)}")
    lines = (line.split() for line in output.splitlines())
    return {name: [float(median), float(p90)] for name, median, p90 in lines}


class Calls:
    """Calls through torch, on a GPU or, to check the code, on torch's stand-ins for the CPU.

    Args:
        device: ``cuda`` or ``cpu``.
    """

    NAMES = (
        "record",
        "wait",
        "query of a done event",
        "sync of a done event",
        "create, record and destroy",
        "current_stream",
        "with stream",
        "empty of 320 KB",
        "copy of 4 B",
        "copy of 320 KB",
        "launch",
    )

    def __init__(self, device: str) -> None:
        self._torch: Any = torch.cuda if device == "cuda" else torch.cpu
        self._stream = self._torch.Stream()
        self._event = self._torch.Event()
        self._small, self._large = (
            torch.zeros(n, dtype=torch.uint8, pin_memory=device == "cuda") for n in (4, 320_000)
        )
        self._there = torch.zeros(320_000, dtype=torch.uint8, device=device)
        self._few = self._there[:4]
        empty = functools.partial(torch.empty, 320_000, dtype=torch.uint8, device=device)
        calls: tuple[Callable[[], object], ...] = (
            lambda: self._event.record(self._stream),
            lambda: self._stream.wait_event(self._event),
            self._event.query,
            self._event.synchronize,
            self._record_new,
            self._torch.current_stream,
            self._enter_stream,
            empty,
            lambda: self._few.copy_(self._small, non_blocking=True),
            lambda: self._there.copy_(self._large, non_blocking=True),
            lambda: self._few.add_(1),
        )
        self._calls = dict(zip(self.NAMES, calls, strict=True))

    def price(self, name: str) -> Fields:
        """Return the microseconds of a call: the median over groups of calls, and the slowest."""
        call = self._calls[name]
        self._event.record(self._stream)
        times = []
        for _ in range(1 + _N_GROUPS):
            self._torch.synchronize()
            begin = time.perf_counter()
            for _ in range(_GROUP):
                call()
            times.append((time.perf_counter() - begin) / _GROUP * 1e6)
        # The first group loads code.
        return {"us": round(statistics.median(times[1:]), 2), "most_us": round(max(times[1:]), 2)}

    def _record_new(self) -> None:
        self._torch.Event().record(self._stream)

    def _enter_stream(self) -> None:
        with self._torch.stream(self._stream):
            pass
