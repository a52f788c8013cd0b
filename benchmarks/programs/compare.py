"""Comparison of a program with its pinfeed version: results, then time in turn, then memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.conditions import memory_by_kind
from benchmarks.processes import new_process
from benchmarks.programs import run
from benchmarks.programs.program import OURS, Program, load

# Seconds between two readings of the memory of a process.
_LOOK_S = 0.005

Figures = dict[str, Any]


class Peak:
    """Highest memory of a process and its worker processes while the context lasts.

    Args:
        pid: Number of the process.

    Attributes:
        found: Bytes of each kind.
    """

    def __init__(self, pid: int) -> None:
        self.found = {"own": 0, "mapped": 0}
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_LOOK_S)
            now = memory_of(self._pid)
            self.found = {kind: max(now[kind], self.found[kind]) for kind in now}


def memory_of(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process and its worker processes, own and mapped."""
    found = memory_by_kind(pid)
    return {"own": found["anonymous"] + found["shared"], "mapped": found["file"]}


def compare(name: str, size: str, n_rounds: int, base: Path | None = None) -> Figures:
    """Compare a program with its pinfeed version, each way in a process of its own.

    Args:
        name: Module of the program.
        size: Name of the size.
        n_rounds: Rounds of each measurement of time.
        base: Folder in which a folder for the files is made; None for that of temporary files.

    Raises:
        AssertionError: If the batches or the losses differ.
    """
    program = load(name)
    ways = list(program.ways)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        # A run on the tiny files loads the code before memory is measured.
        for one in {size, "tiny"}:
            (folder / one).mkdir()
            program.prepare(folder / one, program.sizes[one])

        def call(way: str, function: Callable[..., Any], *arguments: Any, size: str = size) -> Any:
            given = (name, size, way, str(folder / size), *arguments)
            return processes[way].submit(function, *given).result()

        def times(has_step: bool) -> dict[str, list[float]]:
            """Return the milliseconds of a batch of each way, in rounds of alternating order."""
            found: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(n_rounds):
                for way in reversed(ways) if number % 2 else ways:
                    found[way].append(call(way, run.batch_ms, has_step))
            return found

        processes = {way: stack.enter_context(new_process()) for way in ways}
        results = {way: call(way, run.results) for way in ways}
        expected = results[ways[0]]
        for way, found in results.items():
            for key, values in found.items():
                assert values == expected[key], f"{program.title}: the {key} of {way} differ"
        plain, stepping = times(False), times(True)
        memory = {}
        for way in ways:
            # A new process has the memory of no other run.
            processes[way] = stack.enter_context(new_process())
            call(way, run.once, size="tiny")
            pid = processes[way].submit(os.getpid).result()
            before = memory_of(pid)
            with Peak(pid) as peak:
                call(way, run.once)
            memory[way] = {kind: max(0, peak.found[kind] - before[kind]) for kind in before}
            processes[way].shutdown()
    equal = {key: len(values) for key, values in expected.items()}
    return record(program, equal, plain, stepping, memory)


def record(
    program: Program,
    equal: dict[str, int],
    plain: dict[str, list[float]],
    stepping: dict[str, list[float]],
    memory: dict[str, dict[str, int]],
) -> Figures:
    """Return the figures of a program as plain values.

    A ratio is the median of those of the rounds, because a machine may be slower in some rounds.
    """
    removed, added = program.changed_lines()
    ways = {
        way: {
            "ms": statistics.median(plain[way]),
            "step_ms": statistics.median(stepping[way]),
            "times_as_fast": times_as_fast(plain, way),
            "step_times_as_fast": times_as_fast(stepping, way),
            "memory": memory[way],
        }
        for way in program.ways
    }
    return {
        "title": program.title,
        "equal": equal,
        "lines": {"removed": removed, "added": added},
        "ways": ways,
        "rounds": {"ms": plain, "step_ms": stepping},
    }


def times_as_fast(rounds: dict[str, list[float]], way: str) -> float:
    """Return the time of the original divided by that of a way: the median of the rounds."""
    original = next(iter(rounds.values()))
    pairs = zip(original, rounds[way], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


HEADERS = (
    "program",
    "lines removed, added",
    "equal batches, losses",
    "ms per batch",
    "times as fast",
    "ms with a step",
    "times as fast",
    "memory in MiB, own + mapped",
)


def table(programs: list[dict[str, Any]]) -> str:
    """Return the table: a line for each way of each program, and the original first."""
    lines = []
    for found in programs:
        changed = f"-{found['lines']['removed']} +{found['lines']['added']}"
        equal = f"{found['equal']['batches']:,}, {found['equal']['losses']}"
        for way, figures in found["ways"].items():
            is_original = way == next(iter(found["ways"]))
            lines.append(
                [
                    f"**{found['title']}**: {way}" if is_original else way,
                    changed if way == OURS else "",
                    equal if way == OURS else "",
                    f"{figures['ms']:.2f}",
                    "" if is_original else f"{figures['times_as_fast']:.2f}",
                    f"{figures['step_ms']:.2f}",
                    "" if is_original else f"{figures['step_times_as_fast']:.2f}",
                    " + ".join(f"{n / 2**20:.0f}" for n in figures["memory"].values()),
                ]
            )
    align = ("left", *["right"] * (len(HEADERS) - 1))
    return tabulate(lines, HEADERS, tablefmt="github", disable_numparse=True, colalign=align)
