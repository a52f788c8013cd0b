"""The tests that need a GPU, alone and in parallel, and memcheck."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import testlog
from benchmarks.gpu.processes import CRASH, ROOT, last_lines, run_program
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped

_PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "-p",
    "benchmarks.gpu.testlog",
)
# Warnings are errors in pyproject.toml. Other versions of Python, torch and numpy warn of other
# things, and a warning must not hide what a GPU does. Options override pyproject.toml.
_WARNINGS = ("-W", "default")
_OPTIONS = ("-o", "addopts=", "--strict-markers", "--continue-on-collection-errors", *_WARNINGS)
# A test that breaks the CUDA context ends its process, and xdist starts another one.
_RESTARTS = ("--max-worker-restart", "100")
_PARALLEL_SHARE = 0.75
_ALONE_S = 120.0
_N_SLOWEST = 20
_N_STACK_LINES = 200
_DIRECT = ("tests/devices/test_direct_access.py", "tests/devices/test_cuda.py")
# These tests of Offload have killed processes that had run other tests, and passed alone.
_CRASHED = ("tests/training/offload/test_offload_cuda.py",)
_CRASHED_NAMES = "views or odd"
_BESIDE = ("tests/training/offload", "tests/training/test_compiled.py")
_ON_CPU = ("tests/training/offload/test_offload.py",)
_SANITIZED = ("tests/devices/test_cuda.py", "-k", "rows_of_every_size or every_grid or one_call")


def tests(run: Run) -> list[Cell]:
    """Return a cell with all tests, which adds a cell for each failed test."""
    return [Cell({"run": "in parallel"}, functools.partial(_all_tests, run))]


def direct_tests(run: Run) -> list[Cell]:
    """Return a cell with the tests of the device and its direct route, in one process alone.

    If these fail, the measurements mean little. The tests in parallel disturb each other more.
    """
    markers = "not stress" if run.cuda else "not stress and not gpu"
    files = _DIRECT if run.cuda else _DIRECT[:1]
    return [
        Cell(
            {"run": "alone", "files": list(files)},
            lambda: _pytest(run.left_s(), "-p", "no:xdist", "-m", markers, *files),
        )
    ]


def _all_tests(run: Run) -> Fields:
    if run.cuda:
        # Other files may import packages that are not installed.
        files = sorted(
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests").rglob("test_*.py")
            if "mark.gpu" in path.read_text()
        )
        markers = "gpu"
    else:
        files = ["tests/devices/test_kernels.py", "tests/memory/test_limits.py"]
        markers = "not gpu and not stress"
    n_processes = max(2, min(6, len(os.sched_getaffinity(0)) // 3))
    found = _pytest(
        run.left_s() * _PARALLEL_SHARE, "-n", str(n_processes), *_RESTARTS, "-m", markers, *files
    )
    again = dict.fromkeys(
        [*(failure["test"] for failure in found["failures"]), *found["unfinished"]]
    )
    run.recorder.add(
        Cell({"run": "alone", "test": test}, functools.partial(_alone, run, markers, test))
        for test in again
    )
    return {"files": files, "processes": n_processes, **found}


def _alone(run: Run, markers: str, test: str) -> Fields:
    found = _pytest(min(_ALONE_S, run.left_s()), "-p", "no:xdist", "-m", markers, test)
    counts = found["counts"]
    return {
        "passes_alone": bool(counts.get("passed"))
        and not counts.get("failed")
        and not found["killed"],
        **found,
    }


def _pytest(limit_s: float, *arguments: str) -> Fields:
    """Run pytest, and read its log, also if pytest was killed.

    Args:
        limit_s: Seconds after which pytest is killed.
        arguments: Arguments of pytest.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.jsonl"
        status, output = run_program(
            (*_PYTEST, *_OPTIONS, *arguments),
            max(1.0, limit_s),
            **{testlog.VARIABLE: str(log)},
        )
        lines = log.read_text().splitlines() if log.exists() else []
    # The last line may have been cut off.
    reports = [json.loads(line) for line in lines if line.endswith("}")]
    return {
        "exit_status": status,
        "killed": status is None,
        **summary(reports),
        "output": last_lines(output),
    }


def summary(lines: list[dict[str, Any]]) -> Fields:
    """Return counts, failures, unfinished tests, reasons of skips, and the slowest tests."""
    reports = [line for line in lines if line["outcome"] != "started"]
    ended = {report["test"] for report in reports}
    failures = [report for report in reports if report["outcome"] == "failed"]
    skipped = [report for report in reports if report["outcome"] == "skipped"]
    slowest = sorted(reports, key=lambda report: -report["seconds"])[:_N_SLOWEST]
    return {
        "counts": dict(Counter(report["outcome"] for report in reports)),
        "failures": failures,
        "unfinished": [line["test"] for line in lines if line["test"] not in ended],
        "skipped": [{"test": report["test"], "message": report["message"]} for report in skipped],
        "slowest": [{"test": report["test"], "seconds": report["seconds"]} for report in slowest],
    }


def saved_tensors(run: Run) -> list[Cell]:
    """Return a cell of tests of Offload in one process, which adds a cell that looks closer."""
    return [Cell({"run": "Offload, one process"}, functools.partial(_offload_tests, run))]


def _offload_tests(run: Run) -> Fields:
    """Run the tests in one process; then in a debugger if it crashed, or else in five."""
    files, names = (_CRASHED, _CRASHED_NAMES) if run.cuda else (_ON_CPU, "odd")
    markers = ("-m", "gpu" if run.cuda else "not gpu")
    limit_s = run.left_s() / 2
    found = _pytest(limit_s, "-p", "no:xdist", *markers, *files, "-k", names)
    crashed = any(CRASH in line for line in found["output"])
    if crashed or (found["exit_status"] or 0) < 0:
        command = (*_PYTEST, *_OPTIONS, "-p", "no:xdist", *markers, *files, "-k", names)
        debug = functools.partial(debugged, command, run.left_s)
        run.recorder.add([Cell({"run": "Offload, in a debugger"}, debug)])
    else:
        n, others = ("5", _BESIDE) if run.cuda else ("2", (*files, "-k", names))
        options = ("-n", n, *_RESTARTS, *markers, *others)
        beside = Cell({"run": "Offload, beside others"}, lambda: _pytest(run.left_s(), *options))
        run.recorder.add([beside])
    return {"files": list(files), **found}


def debugged(command: Sequence[str], limit_s: Callable[[], float]) -> Fields:
    """Run a command in cuda-gdb, or in gdb, and return the stacks of its threads where it crashes.

    Raises:
        Skipped: If there is no debugger.
    """
    program = shutil.which("cuda-gdb") or shutil.which("/usr/local/cuda/bin/cuda-gdb")
    program = program or shutil.which("gdb")
    if program is None:
        raise Skipped("there is neither cuda-gdb nor gdb")
    commands = ("-ex", "run", "-ex", "thread apply all bt 12")
    status, output = run_program(
        (program, "-batch", *commands, "--args", *command), max(1.0, limit_s())
    )
    lines = output.splitlines()
    signals = (i for i, line in enumerate(lines) if "received signal" in line)
    first = next(signals, max(0, len(lines) - _N_STACK_LINES))
    return {"exit_status": status, "stacks": lines[first : first + _N_STACK_LINES]}


def compute_sanitizer(run: Run) -> list[Cell]:
    """Return a cell that runs memcheck on the kernels that copy rows."""
    return [Cell({"tool": "memcheck"}, functools.partial(_sanitized, run))]


def _sanitized(run: Run) -> Fields:
    run.require_cuda("compute-sanitizer")
    name = "compute-sanitizer"
    program = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if program is None:
        raise Skipped(f"the program {name} is not installed")
    command = (
        program,
        "--tool",
        "memcheck",
        *_PYTEST,
        *_OPTIONS,
        "-p",
        "no:xdist",
        "-m",
        "gpu",
        *_SANITIZED,
    )
    status, output = run_program(command, max(1.0, run.left_s()))
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    return {
        "exit_status": status,
        "killed": status is None,
        "errors": int(errors[-1]) if errors else None,
        "said": [line for line in output.splitlines() if line.startswith("=========")][:100],
        "output": last_lines(output),
    }
