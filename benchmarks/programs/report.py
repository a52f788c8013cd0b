"""The figures of the programs as a table in Markdown."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.programs.program import OURS

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
                    _memory(figures["memory"]),
                ]
            )
    align = ("left", *["right"] * (len(HEADERS) - 1))
    return tabulate(lines, HEADERS, tablefmt="github", disable_numparse=True, colalign=align)


def _memory(memory: dict[str, int]) -> str:
    return " + ".join(f"{memory[kind] / 2**20:.0f}" for kind in ("own", "mapped"))
