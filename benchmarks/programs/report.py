"""The figures of the programs as a table in Markdown."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.programs.program import OURS

HEADERS = (
    "program",
    "lines removed / added",
    "equal batches / losses",
    "ms per batch",
    "ratio",
    "ms with a step",
    "ratio",
    "memory, MiB: own / mapped",
)


def table(programs: list[dict[str, Any]]) -> str:
    """Return the table: a line for each way of each program.

    A ratio is the time of a way in that of pinfeed.
    """
    lines = []
    for found in programs:
        for way, figures in found["ways"].items():
            is_first = way == next(iter(found["ways"]))
            is_ours = way == OURS
            changed = f"-{found['lines']['removed']} / +{found['lines']['added']}"
            equal = f"{found['equal']['batches']} / {found['equal']['losses']}"
            lines.append(
                [
                    f"**{found['title']}**, {way}" if is_first else way,
                    changed if is_ours else "",
                    equal if is_ours else "",
                    f"{figures['ms']:.2f}",
                    "" if is_ours else f"{figures['times_as_fast']:.2f}",
                    f"{figures['step_ms']:.2f}",
                    "" if is_ours else f"{figures['step_times_as_fast']:.2f}",
                    _memory(figures["memory"]),
                ]
            )
    align = ("left", *["right"] * (len(HEADERS) - 1))
    return tabulate(lines, HEADERS, tablefmt="github", disable_numparse=True, colalign=align)


def _memory(memory: dict[str, int]) -> str:
    return " / ".join(f"{memory[kind] / 2**20:.0f}" for kind in ("own", "mapped"))
