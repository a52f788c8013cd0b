"""Training steps on rows of a table on the host, with prefetching, without it, and in other ways.

Run it from the root:

    python -m benchmarks.rows                      (25 minutes)
    python -m benchmarks.rows --quick              (two minutes)
    python -m benchmarks.rows --only Adagrad       (cells whose description contains this)
    python -m benchmarks.rows --before CHECKOUT    (also with the pinfeed of an earlier commit)

Every contestant trains the same rows with the same optimizer. With Adam, the weights and two
tensors of state are copied. With Adagrad, FBGEMM takes part, because it has Adagrad on the CPU.
Losses are compared first. Each cell is timed twice. The step of the small model is mostly the
transfer. The step of the large model takes about as long as the transfer, so the whole transfer can
be hidden. The transfer is the time of the synchronous step minus that of a step on rows that are on
the device already. "Hidden" is the share of the transfer that prefetching saves. "Depth chosen" is
the default, which measures both ways and keeps the faster one. The contestants of a cell are timed
in turn, and an earlier pinfeed runs in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import rowsteps
from benchmarks.earlier import Earlier, add_before, opened
from benchmarks.environment import environment, save
from benchmarks.rowcells import Body, RowCell, wait
from benchmarks.rowcopies import best, to_and_from
from benchmarks.rowfbgemm import why_no_fbgemm
from benchmarks.rowmemory import big_table, measured_apart
from benchmarks.rowsteps import BEFORE, CHOSEN, STEP_ALONE, Timing

N_WARM = 8
N_STEPS = 200
GOAL_IDS = 8192
"""Goal: from this number of ids on, prefetching is faster than the synchronous loop."""
NOISE = 1.05
"""Two ways count as equally fast up to this ratio."""
BIG_ROWS = 10_000_000
"""Rows of the table whose memory is measured: 5.12 GB."""

CELLS = [
    RowCell(dim, n_ids, repeated)
    for dim in (16, 128)
    for n_ids in (1024, 8192, 32768)
    for repeated in (0.0, 0.5)
]
CELLS += [RowCell(1024, n_ids, repeated) for n_ids in (1024, 8192) for repeated in (0.0, 0.5)]
CELLS += [RowCell(128, 8192, 0.0, shared) for shared in (0.5, 0.95)]
CELLS += [
    RowCell(dim, n_ids, 0.5, optimizer="Adagrad")
    for dim, n_ids in ((16, 1024), (16, 8192), (16, 32768), (128, 1024), (128, 8192), (128, 32768))
]
CELLS += [RowCell(1024, 8192, 0.5, optimizer="Adagrad")]
QUICK = [
    RowCell(16, 8192, 0.5),
    RowCell(128, 8192, 0.0),
    RowCell(128, 8192, 0.0, 0.5),
    RowCell(128, 32768, 0.5),
    RowCell(128, 8192, 0.5, optimizer="Adagrad"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--rounds", type=int, help="rounds of all contestants in a cell")
    add_before(parser)
    # This is run in a process of its own.
    parser.add_argument("--memory", type=int, metavar="ROWS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(big_table(arguments.device, arguments.memory)))
        return
    device = arguments.device
    print(environment())
    if reason := why_no_fbgemm(device):
        print(f"FBGEMM is left out: {reason}")
    cells = QUICK if arguments.quick else CELLS
    cells = [cell for cell in cells if arguments.only in str(cell)]
    with opened(arguments.before) as earlier:
        n_rounds = arguments.rounds or (1 if arguments.quick else 3)
        found = measure(cells, device, n_rounds, earlier)
    print(report(found))
    results: dict[str, Any] = {"cells": found}
    if not arguments.only:
        results["SpeedTorch's table, ms"] = to_and_from(device)
        results["memory"] = measured_apart(device, BIG_ROWS)
        print(results["SpeedTorch's table, ms"])
        print(results["memory"])
    kind = "-part" if arguments.only else "-quick" if arguments.quick else ""
    print(save(f"rows{kind}", results))


def measure(
    cells: list[RowCell], device: str, n_rounds: int, earlier: Earlier | None
) -> list[dict[str, Any]]:
    """Measure cells and return plain values."""
    leave_a_core(device)
    if earlier is not None:
        earlier.call("benchmarks.rows:leave_a_core", device)
    timing = Timing(device, N_STEPS, N_WARM, cap_s=0.8 if n_rounds == 1 else 0.4)
    results = []
    for cell in cells:
        results.append(one_cell(cell, timing, n_rounds, earlier))
        print(_line(results[-1]), flush=True)
    return results


def leave_a_core(device: str) -> None:
    """Leave a core to the reader threads, if torch computes on the CPU."""
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def one_cell(
    cell: RowCell, timing: Timing, n_rounds: int, earlier: Earlier | None
) -> dict[str, Any]:
    """Return milliseconds of a step of every contestant, with a small and a large model."""
    device = timing.device
    rowsteps.check(cell, device)
    if earlier is not None:
        check_earlier(cell, device, earlier)
    names = [STEP_ALONE, *rowsteps.contestants(device, cell.optimizer)]
    if earlier is not None:
        names[3:3] = ["prefetch" + BEFORE, "synchronous" + BEFORE]

    def time_all(n_products: int) -> tuple[Times, str]:
        given = dataclasses.asdict(dataclasses.replace(timing, n_products=n_products))
        found: Times = {name: [] for name in names}
        chosen = ""
        for _ in range(n_rounds):
            for name in names:
                arguments = (name.removesuffix(BEFORE), dataclasses.asdict(cell), given)
                if name.endswith(BEFORE) and earlier is not None:
                    step_s, _ = earlier.call("benchmarks.rowsteps:timed_step_s", *arguments)
                else:
                    step_s, reason = rowsteps.timed_step_s(*arguments)
                    chosen = reason or chosen
                found[name].append(step_s)
        return found, chosen

    small, small_choice = time_all(0)
    transfer_s = max(0.0, _median(small, "synchronous") - _median(small, STEP_ALONE))
    large, large_choice = time_all(as_long_as_the_transfer(transfer_s * 1e3, cell, device))
    return {
        "cell": str(cell),
        "n_ids": cell.n_ids,
        **_summary("small", small, small_choice),
        **_summary("large", large, large_choice),
    }


Times = dict[str, list[float]]
"""Seconds of a step of each contestant, in each round."""


def _median(times: Times, name: str) -> float:
    return statistics.median(times[name])


def _summary(model: str, times: Times, chosen: str) -> dict[str, Any]:
    """Return medians in milliseconds, and ratios to the synchronous loop.

    A ratio is the median of those of the rounds, because a machine may be slower in some rounds.

    Args:
        model: Name of the model.
        times: Times of the contestants.
        chosen: The depth that pinfeed chose in the last round, and why; empty if it did not.
    """
    return {
        f"{model}_ms": {name: round(_median(times, name) * 1e3, 3) for name in times},
        f"{model}_ratio": _to_synchronous(times, "prefetch"),
        f"{model}_chosen_ratio": _to_synchronous(times, CHOSEN),
        f"{model}_choice": chosen,
    }


def _to_synchronous(times: Times, name: str) -> float:
    """Return the time of a contestant relative to the synchronous loop."""
    pairs = zip(times[name], times["synchronous"], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def check_earlier(cell: RowCell, device: str, earlier: Earlier) -> None:
    """Compare the losses of some steps with those of an earlier pinfeed.

    Raises:
        AssertionError: If they are not equal bit for bit.
    """
    expected = rowsteps.losses(rowsteps.prefetched, cell, device)
    for name in ("prefetch", "synchronous"):
        arguments = (name, dataclasses.asdict(cell), device)
        found = earlier.call("benchmarks.rowsteps:first_losses", *arguments)
        rowsteps.compare(name + BEFORE, torch.tensor(found), expected)


def as_long_as_the_transfer(transfer_ms: float, cell: RowCell, device: str) -> int:
    """Return the number of matrix products that take as long as the transfer, at least 0.1 ms."""
    body = Body(cell, device)
    per_product = best(lambda: [body.products(50), wait(body)]) / 50
    return max(1, round(max(0.1, transfer_ms) / 1e3 / per_product))


def hidden(ms: dict[str, float]) -> float:
    """Return the share of the transfer that prefetching hides; nan if no transfer was measured."""
    transfer_ms = ms["synchronous"] - ms[STEP_ALONE]
    return (ms["synchronous"] - ms["prefetch"]) / transfer_ms if transfer_ms > 0 else math.nan


def report(cells: list[dict[str, Any]]) -> str:
    """Return the cells as two tables, and those in which pinfeed is not faster."""
    parts = []
    for model in ("small", "large"):
        parts.append(f"ms per step of a {model} model\n{_table(cells, model)}")
        many = [cell for cell in cells if cell["n_ids"] >= GOAL_IDS]
        parts.append(
            f"{model} model, cells from {GOAL_IDS:,} ids on in which prefetch / synchronous is not "
            f"below 1.0: {_not_below(1.0, many, f'{model}_ratio')}"
        )
        parts.append(
            f"{model} model, cells in which depth chosen / synchronous is not below {NOISE}: "
            f"{_not_below(NOISE, cells, f'{model}_chosen_ratio')}"
        )
        choices = [f"  {cell['cell']}: {cell[f'{model}_choice']}" for cell in cells]
        if any(cell[f"{model}_choice"] for cell in cells):
            parts.append("\n".join([f"{model} model: depth=None chose", *choices]))
    return "\n\n".join(parts)


def _not_below(limit: float, cells: list[dict[str, Any]], ratio: str) -> str:
    """Name the cells whose ratio is at least ``limit``."""
    return "; ".join(f"{c['cell']} ({c[ratio]:.2f})" for c in cells if c[ratio] >= limit) or "none"


def _table(cells: list[dict[str, Any]], model: str) -> str:
    names = list(dict.fromkeys(name for cell in cells for name in cell[f"{model}_ms"]))
    body = []
    for cell in cells:
        ms = cell[f"{model}_ms"]
        times = [f"{ms[name]:.2f}" if name in ms else "" for name in names]
        ratios = [f"{cell[f'{model}_{ratio}']:.2f}" for ratio in ("ratio", "chosen_ratio")]
        body.append([cell["cell"], *times, *ratios, f"{hidden(ms):.2f}"])
    headers = ["", *(name.replace(", ", ",\n").replace(" (", "\n(") for name in names)]
    headers += ["prefetch /\nsynchronous", "depth chosen /\nsynchronous", "hidden"]
    align = ("left", *["right"] * (len(names) + 3))
    return tabulate(body, headers, disable_numparse=True, colalign=align)


def _line(cell: dict[str, Any]) -> str:
    parts = []
    for model in ("small", "large"):
        times = ", ".join(f"{name} {value:.2f}" for name, value in cell[f"{model}_ms"].items())
        ratios = f"prefetch / synchronous {cell[f'{model}_ratio']:.2f}"
        ratios += f", depth chosen / synchronous {cell[f'{model}_chosen_ratio']:.2f}"
        parts.append(f"{times}; {ratios}")
    return f"{cell['cell']}: {' | '.join(parts)}"


if __name__ == "__main__":
    main()
