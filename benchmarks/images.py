"""Augmented images in batches, loaded by pinfeed and its peers with the same functions.

A folder has 4,000 JPEG files of about 200 KB. Every contestant decodes them, crops them randomly to
224 x 224 pixels, flips and normalizes them, and yields batches of 64 in the same order, with two
workers. The random numbers are a function of the index, so all batches must be equal, which is
checked first. simplejpeg releases the interpreter's lock, Pillow holds it longer, and torchvision
takes part if its import succeeds. Run it from the root of the repository:

    # the peers
    pip install -c constraints.txt --group bench
    # everything, about 50 minutes
    python -m benchmarks.images
    # 400 files, one round
    python -m benchmarks.images --quick
    # the table and the picture again, from the results
    python -m benchmarks.images --report

Every run is a process of its own, and each round begins with another contestant, because the speed
of machines varies over time. Threads of some libraries can make samples or whole batches. The first
round measures both, and the others the better one. The files are in the page cache. Figures are
medians of the rounds:

- images per second of a loop that does nothing, and of one that trains a small network with all
  cores, construction and start of the loader included;
- seconds to the first batch, from the construction of the loader;
- memory that belongs to the process and its workers, at its peak;
- microseconds per sample that exists already, so that only the loader works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import image_report, image_run
from benchmarks.environment import RESULTS, environment, machine, save
from benchmarks.image_files import files_of
from benchmarks.image_loaders import CONTESTANTS, WHOLE
from benchmarks.image_report import merit, variants
from benchmarks.image_samples import DECODERS, can_decode
from benchmarks.processes import in_process

N_FILES = 4000
N_QUICK_FILES = 400
N_FIRST_BATCHES = 5
"""Fresh processes that measure the time to the first batch, in all rounds together."""
_N_READY = 100_000
_TIMEOUT_S = 180.0

Cells = dict[str, dict[str, Any]]
"""Jobs by the name of their cell."""


def all_cells(n_files: int, decoders: list[str], *, quick: bool) -> Cells:
    """Return the job of each cell.

    Args:
        n_files: Number of files.
        decoders: Names of the decoders.
        quick: Whether fewer samples are enough.
    """
    cells: Cells = {}
    for step in (False, True):
        for decoder in decoders:
            job = {"call": "rate", "n_files": n_files, "decoder": decoder}
            name = f"images per s, {decoder}{', training step' * step}"
            cells[name] = job | {"computes": step}
    for decoder in decoders[:2]:
        job = {"n_files": n_files, "decoder": decoder}
        cells[f"s to the first batch, {decoder}"] = job | {"call": "first_batch"}
    cells[f"MiB, {decoders[0]}"] = {"call": "memory", "n_files": n_files, "decoder": decoders[0]}
    n_samples = _N_READY // 10 if quick else _N_READY
    cells["µs per sample that exists"] = {"call": "overhead", "n_samples": n_samples}
    return cells


class Contest:
    """The contestants, their cells, and the results of all runs.

    Args:
        names: Names of the contestants.
        cells: Jobs of the cells.
    """

    def __init__(self, names: list[str], cells: Cells) -> None:
        self.names = names
        self.cells = cells
        self.runs: dict[str, dict[str, list[Any]]] = {cell: {} for cell in cells}
        self.steps_s: list[float] = []
        self._begin = time.perf_counter()

    def admit(self, n_files: int, decoders: list[str]) -> None:
        """Leave out contestants that are not installed or yield other data.

        Raises:
            RuntimeError: If pinfeed yields other data.
        """
        for name in self.names[:]:
            try:
                if not CONTESTANTS[name].is_installed:
                    raise RuntimeError("it is not installed")
                for decoder in decoders:
                    self._run({"call": "check", "n_files": n_files, "decoder": decoder}, name)
            except RuntimeError as error:
                if name.startswith("pinfeed"):
                    raise
                self._say(f"{name} is left out: {error}")
                self.names.remove(name)
        self._say(f"equal batches: {'; '.join(self.names)}")

    def run_round(self, number: int) -> None:
        """Run all contestants in all cells once, and the step alone."""
        self.steps_s.append(in_process("benchmarks.images", {"call": "step_alone"})["seconds"])
        first = number % len(self.names)
        for cell, job in self.cells.items():
            # The first batch takes so little time that a round has several.
            n_runs = 1
            if job["call"] == "first_batch":
                n_runs = N_FIRST_BATCHES if number == 0 else 0
            names = [
                name
                for name in self.names[first:] + self.names[:first]
                if self._takes_part(name, cell, number)
            ]
            for name in names * n_runs:
                self._measure(cell, job, name)

    def _takes_part(self, name: str, cell: str, number: int) -> bool:
        """Return whether a contestant is measured: after the first round, the better variants."""
        if number == 0:
            # A thread that makes the whole first batch takes longer than several.
            return not (name.endswith(WHOLE) and self.cells[cell]["call"] == "first_batch")
        found = self.runs[cell]
        return any(
            name == max(names, key=lambda name: merit(cell, found[name][:1]))
            for names in variants(found).values()
        )

    def _measure(self, cell: str, job: dict[str, Any], name: str) -> None:
        try:
            found = self._run(job, name)
        except RuntimeError as error:
            self._say(f"{cell}: {name} failed: {error}")
            return
        self.runs[cell].setdefault(name, []).append(found)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self._say(f"{cell}: {name}: {shown}")

    def _run(self, job: dict[str, Any], name: str) -> Any:
        return in_process("benchmarks.images", job | {"name": name}, _TIMEOUT_S)

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._begin:5.0f} s  {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Augmented images, by pinfeed and by others.")
    parser.add_argument(
        "--quick", action="store_true", help="400 files, one round; nothing is saved"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only cells or contestants whose name contains this; nothing is saved",
    )
    parser.add_argument("--rounds", type=int, help="rounds (default: 3, quick 1)")
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing; write the table and the picture again, from the saved results",
    )
    # The benchmark starts its own processes with it.
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(only: str, cells: Cells) -> tuple[list[str], Cells]:
    """Return the names of the contestants and the cells that an option chooses.

    Raises:
        SystemExit: If it chooses none.
    """
    names = [name for name in CONTESTANTS if only in name]
    kept = {cell: job for cell, job in cells.items() if only in cell}
    if not names and not kept:
        sys.exit(
            f"--only {only!r}: no cell or contestant has this in its name; expected a part of one "
            "of\n" + "\n".join([*cells, *CONTESTANTS])
        )
    return names or list(CONTESTANTS), kept or cells


def main() -> None:
    arguments = parse()
    if arguments.one is not None:
        print(json.dumps(image_run.run_job(**arguments.one)), flush=True)
        for worker in multiprocessing.active_children():
            worker.kill()
        # A peer may hang when the interpreter ends after an early break.
        os._exit(0)
    if arguments.report:
        saved = json.loads((RESULTS / f"images-{machine()}.json").read_text())
        write_report(saved["results"], saved["environment"])
        return
    print(environment(), flush=True)
    n_files = N_QUICK_FILES if arguments.quick else N_FILES
    files_of(n_files)
    decoders = [decoder for decoder in DECODERS if can_decode(decoder)]
    names, cells = chosen(arguments.only, all_cells(n_files, decoders, quick=arguments.quick))
    contest = Contest(names, cells)
    contest.admit(n_files, decoders)
    for number in range(arguments.rounds or (1 if arguments.quick else 3)):
        contest.run_round(number)
    results = image_report.summary(contest.runs, contest.steps_s)
    print(image_report.table(results))
    if not (arguments.quick or arguments.only):
        print(save("images", results))
        write_report(results, environment())


def write_report(results: dict[str, Any], environment: str) -> None:
    """Write the table and the picture next to the JSON file of the results."""
    path: Path = RESULTS / f"images-{machine()}"
    path.with_suffix(".md").write_text(image_report.table(results) + "\n")
    image_report.save_picture(results, path.with_suffix(".png"), environment)


if __name__ == "__main__":
    main()
