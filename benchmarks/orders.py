"""Rows ordered per second by each order, next to the rows that a loop needs.

    python -m benchmarks.orders

Each order computes runs of 16,384 positions of an epoch over 100 million rows, as a feeder does.
The need is that of a loop which gathers rows of 4 KiB at 10 GB/s.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.environment import environment, save
from pinfeed.rows import block_shuffled, drawn, mixed, sequential, shuffled, split, where

N_ROWS = 100_000_000
RUN = 1 << 14
N_RUNS = 100
NEED = 10e9 / 4096


def orders() -> dict[str, Any]:
    """Return the orders by name; all are orders of ``N_ROWS`` rows."""
    two = {"a": N_ROWS // 2, "b": N_ROWS // 2}
    eight = {str(i): N_ROWS // 8 for i in range(8)}
    mask = np.random.default_rng(0).random(N_ROWS) < 0.3
    train, _ = split([0.9, 0.1])
    return {
        "sequential": sequential(),
        "shuffled": shuffled(1),
        "block_shuffled": block_shuffled(1, block_rows=64),
        "drawn": drawn(N_ROWS, 1),
        "mixed, 2 sequential sources": mixed(two, {"a": 0.7, "b": 0.3}, order=sequential()),
        "mixed, 2 shuffled sources": mixed(two, {"a": 0.7, "b": 0.3}),
        "mixed, 8 shuffled sources": mixed(eight),
        "mixed, 2 shuffled sources, randomly": mixed(two, {"a": 0.7, "b": 0.3}, randomly=True),
        "where, mask of 30 %": where(mask),
        "where, mask of 30 %, shuffled": where(mask, shuffled(1)),
        "split": train,
        "split, shuffled": where(train, shuffled(1)),
    }


def measure() -> dict[str, float]:
    """Return the rows ordered per second by each order."""
    rates = {}
    for name, order in orders().items():
        at = order.bind(N_ROWS, 0)
        # The machine may be busy with other work, so the fastest run counts.
        spent = []
        for i in range(N_RUNS):
            begin = time.perf_counter()
            at(np.arange(i * RUN, (i + 1) * RUN))
            spent.append(time.perf_counter() - begin)
        rates[name] = RUN / min(spent)
    return rates


def report(rates: dict[str, float]) -> str:
    """Return the rates as a table in Markdown."""
    lines = [
        [name, f"{rate / 1e6:.1f}", f"{1e9 / rate:.0f}", f"{rate / NEED:.1f}"]
        for name, rate in rates.items()
    ]
    headers = ["order", "million rows/s", "ns per row", "times the need of a loop"]
    align = ("left", "right", "right", "right")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=align)


def main() -> None:
    print(environment())
    rates = measure()
    print(report(rates))
    path = save("orders", rates)
    path.with_suffix(".md").write_text(report(rates) + "\n")
    print(path)


if __name__ == "__main__":
    main()
