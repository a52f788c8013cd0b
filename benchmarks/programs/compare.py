"""Comparison of a program with its pinfeed version: results, then time in turn, then memory."""

from __future__ import annotations

import contextlib
import re
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.earlier import Earlier
from benchmarks.programs.program import Program, load

ROOT = Path(__file__).parents[2]
_RUN = "benchmarks.programs.run"
_KINDS = {"Pss_Anon": "own", "Pss_Shmem": "own", "Pss_File": "mapped"}
# Seconds between two readings of the memory of a process.
_LOOK_S = 0.005

Figures = dict[str, Any]


class Comparison:
    """A program of a size, with its files in a folder, and a process for each of its ways.

    Args:
        name: Module of the program.
        size: Name of the size.
        folder: Folder for the files.
    """

    def __init__(self, name: str, size: str, folder: Path) -> None:
        self._name = name
        self._size = size
        self._folder = folder
        self.program = load(name)
        # A run on the tiny files loads the code before memory is measured.
        for one in {size, "tiny"}:
            (folder / one).mkdir()
            self.program.prepare(folder / one, self.program.sizes[one])

    @contextlib.contextmanager
    def open_ways(self) -> Iterator[dict[str, Earlier]]:
        with contextlib.ExitStack() as stack:
            yield {way: stack.enter_context(Earlier(ROOT)) for way in self.program.ways}

    def _call(self, process: Earlier, function: str, way: str, *arguments: Any) -> Any:
        return self._call_size(process, function, way, self._size, *arguments)

    def _call_size(
        self, process: Earlier, function: str, way: str, size: str, *arguments: Any
    ) -> Any:
        given = (self._name, size, way, str(self._folder / size), *arguments)
        return process.call(f"{_RUN}:{function}", *given)

    def check(self, processes: dict[str, Earlier]) -> dict[str, int]:
        """Compare the batches and the losses of all ways, and return how many were compared.

        Raises:
            AssertionError: If they are not equal.
        """
        found = {way: self._call(one, "results", way) for way, one in processes.items()}
        expected, *others = found.items()
        for way, results in others:
            for key, values in results.items():
                assert values == expected[1][key], (
                    f"{self.program.title}: the {key} of {way} differ from those of {expected[0]}"
                )
        return {key: len(values) for key, values in expected[1].items()}

    def times(self, processes: dict[str, Earlier], has_step: bool, n_rounds: int) -> Figures:
        """Return the milliseconds of a batch of each way, in each round.

        A way runs before the others in one round and after them in the next.
        """
        found: dict[str, list[float]] = {way: [] for way in processes}
        for number in range(n_rounds):
            ways = list(processes)
            for way in reversed(ways) if number % 2 else ways:
                found[way].append(self._call(processes[way], "batch_ms", way, has_step))
        return found

    def memory(self, way: str) -> dict[str, int]:
        """Return the growth of the memory of a new process at its peak, in bytes by kind."""
        with Earlier(ROOT) as process:
            self._call_size(process, "once", way, "tiny")
            before = memory_of(process.pid)
            with Peak(process.pid) as peak:
                self._call(process, "once", way)
        return {kind: max(0, peak.found[kind] - before[kind]) for kind in before}


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
    """Return the resident bytes of a process and its worker processes, by kind.

    ``own`` is anonymous and shared memory, and ``mapped`` is pages of files, which the kernel may
    drop. Pages that several processes have mapped are divided among them.
    """
    found = {"own": 0, "mapped": 0}
    with contextlib.suppress(OSError, psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        for one in (pid, *(child.pid for child in children)):
            # A worker process may have ended.
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{one}/smaps_rollup").read_text()
                for key, kilobytes in re.findall(r"^(Pss_\w+):\s+(\d+) kB", text, re.MULTILINE):
                    if key in _KINDS:
                        found[_KINDS[key]] += int(kilobytes) * 1024
    return found


def compare(name: str, size: str, n_rounds: int, base: Path | None = None) -> Figures:
    """Compare a program with its pinfeed version.

    Args:
        name: Module of the program.
        size: Name of the size.
        n_rounds: Rounds of each measurement of time.
        base: Folder in which a folder for the files is made; None for that of temporary files.

    Raises:
        AssertionError: If the batches or the losses differ.
    """
    with tempfile.TemporaryDirectory(dir=base) as folder:
        comparison = Comparison(name, size, Path(folder))
        with comparison.open_ways() as processes:
            equal = comparison.check(processes)
            plain = comparison.times(processes, False, n_rounds)
            stepping = comparison.times(processes, True, n_rounds)
        memory = {way: comparison.memory(way) for way in comparison.program.ways}
    return record(comparison.program, equal, plain, stepping, memory)


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
