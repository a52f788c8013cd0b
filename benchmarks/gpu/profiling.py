"""The kernels that copy rows: registers, local memory, duration, and profiler counters."""

from __future__ import annotations

import csv
import functools
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.launches import Launches
from benchmarks.gpu.processes import last_lines, run_program
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped

_BLOCKS = (8, 16, 32)
_SECTIONS = (
    "LaunchStats",
    "Occupancy",
    "SpeedOfLight",
    "WarpStateStats",
    "SchedulerStats",
    "MemoryWorkloadAnalysis",
    "SourceCounters",
)
_METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio",
    "lts__t_sectors_aperture_sysmem.sum",
    "lts__t_sectors_aperture_sysmem_op_read.sum",
    "lts__t_sectors_aperture_sysmem_op_write.sum",
    "pcie__read_bytes.sum",
    "pcie__write_bytes.sum",
)
_NCU_S = 60.0


def profile(run: Run) -> list[Cell]:
    """Return a cell for each way to profile the kernels."""
    cells = [Cell({"by": "CuPy", "what": "attributes"}, lambda: _attributes(run))]
    for n_blocks in _BLOCKS:
        key = {"by": "torch.profiler", "what": "launches", "n_blocks": n_blocks}
        cells.append(Cell(key, functools.partial(_traced, run, n_blocks)))
    sections = [argument for name in _SECTIONS for argument in ("--section", name)]
    cells.append(Cell({"by": "ncu", "what": "sections"}, lambda: _counted(run, sections)))
    # The names have a cell of their own, because ncu counts nothing if it does not know one.
    cells.append(
        Cell(
            {"by": "ncu", "what": "metrics"},
            lambda: _counted(run, ["--metrics", ",".join(_METRICS)]),
        )
    )
    return cells


def _attributes(run: Run) -> Fields:
    """Return the resources of each compiled kernel; local memory holds spilled registers."""
    run.require_cuda("a compiled kernel")
    kernels: Any = Launches(run.device, nbytes=1 << 20, n_rows=16).bench.device.kernels
    return {
        f"{n_threads}_{name}": dict(kernel.attributes)
        for n_threads, module in kernels.modules.items()
        for name, kernel in module.kernels.items()
    }


def _traced(run: Run, n_blocks: int) -> Fields:
    """Return durations of the kernels, from a trace of torch's profiler."""
    run.require_cuda("a trace of kernels")
    launches = Launches(run.device)
    launches.launch(n_blocks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        launches.launch(n_blocks)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [
        event
        for event in events
        if event.get("cat") == "kernel" and "_rows" in event.get("name", "")
    ]
    if not kernels:
        raise RuntimeError(
            "torch's profiler saw no kernel that moves rows: CUPTI may be missing or not allowed"
        )
    return {
        "batch_nbytes": launches.nbytes,
        "launches": [
            {"kernel": event["name"], "us": event["dur"], **event.get("args", {})}
            for event in kernels
        ],
    }


def _counted(run: Run, wanted: list[str]) -> Fields:
    """Return the rows of ncu's raw page, one for each launch."""
    run.require_cuda("ncu")
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        raise Skipped("the program ncu is not installed")
    target = (sys.executable, "-m", "benchmarks.gpu.launches")
    # By default, ncu locks the clocks of the GPU, which other programs and later parts use, too.
    command = (
        ncu,
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--kernel-name",
        "regex:_rows",
        "--launch-count",
        "4",
        *wanted,
        *target,
    )
    status, output = run_program(command, max(1.0, min(_NCU_S, run.left_s())))
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if not rows:
        raise RuntimeError(
            f"ncu ended with exit status {status} and counted nothing: {last_lines(output, 20)}"
        )
    return {"exit_status": status, "rows": rows}
