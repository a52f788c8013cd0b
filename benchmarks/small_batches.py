"""Small batches of rows in memory and of DataLoaders, with pinfeed and without it.

A batch has 64 rows of 784 float32 in random order. The loop does nothing, or trains a small
perceptron on one thread, which takes some hundred microseconds. Run it from the root:

    # one minute
    python -m benchmarks.small_batches
    # while two processes compute all the time
    python -m benchmarks.small_batches --busy 2
    # with the pinfeed of an earlier commit, too
    python -m benchmarks.small_batches --before CHECKOUT

Every way runs in its own process. The processes run their epochs in turn, so each round compares
all ways under equal conditions. First, every value of two epochs and every loss are compared. The
first epoch includes the construction of the loader and is reported apart. Figures are medians of
the rounds of later epochs, and ratios and differences are medians of those of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import small_batch_ways
from benchmarks.earlier import Earlier, add_before, opened
from benchmarks.environment import environment, save
from benchmarks.small_batch_ways import GROUPS, IN_MEMORY, N_BATCHES, STEPS

BEFORE = " (before)"
GOAL_RATIO = 1.5
"""Goal of a DataLoader's time divided by a Feeder's, for rows in memory without a step."""
GOAL_OVER_US = 15
"""Goal of the time that wrap_loader adds to a batch at depth 2, without a step."""

_ROOT = Path(__file__).parents[1]

Figures = dict[str, Any]


class Way:
    """A way to iterate batches, in a process of its own.

    Args:
        group: Name of the group.
        name: Name of the way, with ``BEFORE`` at its end for the earlier pinfeed.
        process: Process in which it runs.
        n_batches: Number of batches of an epoch.
    """

    def __init__(self, group: str, name: str, process: Earlier, n_batches: int) -> None:
        self.name = name
        self._process = process
        self._group = group
        self._n_batches = n_batches

    def checksums(self) -> list[int] | None:
        """Return the checksums of two epochs; None if this pinfeed does not have the way."""
        return self._call("checksums")

    def run_epoch(self, step: str) -> Figures:
        return self._call("run_epoch", step)

    def choice(self, step: str) -> str:
        return self._call("choice", step)

    def _call(self, function: str, *arguments: str) -> Any:
        return self._process.call(
            f"{small_batch_ways.__name__}:{function}",
            self._group,
            self.name.removesuffix(BEFORE),
            *arguments,
            self._n_batches,
        )


@contextlib.contextmanager
def open_ways(group: str, before: Path | None, n_batches: int) -> Iterator[list[Way]]:
    """Start a process for each way of a group, and compare the batches of all.

    Raises:
        AssertionError: If a way yields other batches.
    """
    checkouts = dict.fromkeys(GROUPS[group], _ROOT)
    if before is not None:
        ours = [name for name in checkouts if name.startswith(("Feeder", "wrap_loader"))]
        checkouts |= {name + BEFORE: before for name in ours}
    with contextlib.ExitStack() as stack:
        ways = []
        for name, checkout in checkouts.items():
            process = stack.enter_context(opened(checkout))
            assert process is not None
            ways.append(Way(group, name, process, n_batches))
        found = {way: way.checksums() for way in ways}
        expected = found[ways[0]]
        for way, checksums in found.items():
            assert checksums in (None, expected), f"{group}: {way.name} yields other batches"
            if checksums is None:
                print(f"{group}: {way.name} is left out: this pinfeed refuses it")
        yield [way for way in ways if found[way] is not None]


@contextlib.contextmanager
def busy(n_processes: int) -> Iterator[None]:
    """Run processes that compute all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(n_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(
    before: Path | None, n_rounds: int, n_busy: int = 0, n_batches: int = N_BATCHES
) -> list[Figures]:
    """Return a record for each group and step."""
    results = []
    for group in GROUPS:
        with open_ways(group, before, n_batches) as ways, busy(n_busy):
            results += [one_step(group, step, ways, n_rounds) for step in STEPS]
    return results


def one_step(group: str, step: str, ways: list[Way], n_rounds: int) -> Figures:
    """Run the epochs of all ways with a step, in turn.

    Raises:
        AssertionError: If the losses of an epoch differ.
    """
    rounds: list[dict[str, Figures]] = []
    for number in range(n_rounds + 1):
        # Each round begins with another way.
        first = number % len(ways)
        found = {way.name: way.run_epoch(step) for way in ways[first:] + ways[:first]}
        losses = {name: figures["loss"] for name, figures in found.items()}
        assert len(set(losses.values())) == 1, f"{group}, {step}: the losses differ: {losses}"
        rounds.append(found)
    reference = ways[0].name
    return {
        "group": group,
        "step": step,
        "ways": {way.name: summary(way.name, reference, rounds) for way in ways},
        "choices": {way.name: way.choice(step) for way in ways if "depth=None" in way.name},
    }


def summary(name: str, reference: str, rounds: list[dict[str, Figures]]) -> Figures:
    """Return the figures of a way, compared with the first way of its group.

    Args:
        name: Name of the way.
        reference: Name of the first way.
        rounds: Figures of all ways in each round; the first round is that of first epochs.
    """
    first, *later = rounds
    pairs = [(found[name]["wall"], found[reference]["wall"]) for found in later]
    return {
        "first_us": first[name]["wall"],
        "us": statistics.median(wall for wall, _ in pairs),
        "cpu_us": statistics.median(found[name]["cpu"] for found in later),
        "faults": statistics.median(found[name]["faults"] for found in later),
        "ratio": statistics.median(base / wall for wall, base in pairs),
        "over_us": statistics.median(wall - base for wall, base in pairs),
    }


def report(results: list[Figures]) -> str:
    """Return the figures as a table in Markdown for each group and step."""
    parts = []
    for result in results:
        title = f"{result['group']}, {result['step']}, µs and page faults of a batch"
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{_table(result['ways'])}")
        chosen = [f"- {name}: {text}" for name, text in result["choices"].items() if text]
        if chosen:
            parts.append("\n".join(chosen))
    return "\n\n".join(parts)


def _table(ways: dict[str, Figures]) -> str:
    reference = next(iter(ways))
    rows = [
        [
            name,
            *(f"{figures[key]:.0f}" for key in ("first_us", "us", "cpu_us", "faults")),
            *("" if name == reference else text for text in _compared(figures)),
        ]
        for name, figures in ways.items()
    ]
    headers = ("", "first epoch", "later epochs", "CPU", "page faults", "added", "times as fast")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _compared(figures: Figures) -> tuple[str, str]:
    return f"{figures['over_us']:+.0f}", f"{figures['ratio']:.2f}"


def goals(results: list[Figures]) -> str:
    """Compare loops without a step with the goals, one line for each."""
    lines = []
    for result in results:
        if result["step"] != "no step":
            continue
        for name, figures in result["ways"].items():
            if result["group"] == IN_MEMORY and name.startswith("Feeder, depth=None"):
                shown = f"{figures['ratio']:.2f} times as fast, goal {GOAL_RATIO}"
                is_met = figures["ratio"] >= GOAL_RATIO
            elif name.startswith("wrap_loader, depth=2"):
                shown = f"{figures['over_us']:+.1f} µs of a batch, goal {GOAL_OVER_US}"
                is_met = figures["over_us"] <= GOAL_OVER_US
            else:
                continue
            reference = next(iter(result["ways"]))
            verdict = "met" if is_met else "missed"
            lines.append(f"{result['group']}: {name} to {reference}: {shown}: {verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of later epochs")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="processes that compute at the same time"
    )
    add_before(parser)
    arguments = parser.parse_args()
    print(environment())
    results = measure(arguments.before, arguments.rounds, arguments.busy)
    tables = report(results)
    print(f"{tables}\n\n{goals(results)}\n")
    path = save(f"small-batches{'-busy' * (arguments.busy > 0)}", results)
    path.with_suffix(".md").write_text(tables + "\n")
    print(path)


if __name__ == "__main__":
    main()
