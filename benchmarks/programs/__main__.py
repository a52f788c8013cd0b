"""Programs by others in their original form and with pinfeed: equal results, time and memory.

Run it from the root:

    python -m benchmarks.programs                  (all programs)
    python -m benchmarks.programs --quick          (small sizes, in a few minutes)
    python -m benchmarks.programs --only nanogpt   (programs whose name contains this, in a file
                                                    of their own)

Every way of a program runs in a process of its own. First, the batches of a run and the losses of
another run are compared. They must be equal bit for bit. Then the ways run in turn, without a
training step and with one. The figures are medians of the rounds. The time is that between two
batches on warm files, with one torch thread. Memory is the peak growth of a new process and its
worker processes in a run without a training step. It is divided into the processes' own memory and
mapped pages of files, which the kernel may drop.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.environment import environment, save
from benchmarks.programs.compare import compare, table
from benchmarks.programs.program import NAMES


def main() -> None:
    """Compare the programs, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement of time")
    parser.add_argument("--dir", type=Path, help="folder for the files")
    arguments = parser.parse_args()
    names = [name for name in NAMES if arguments.only in name]
    if not names:
        sys.exit(
            f"--only {arguments.only!r}: no program has this name; expected a part of one of "
            f"{', '.join(NAMES)}"
        )
    print(environment(), flush=True)
    size = "quick" if arguments.quick else "full"
    results = []
    for name in names:
        results.append(compare(name, size, arguments.rounds or 3, arguments.dir))
        print(table(results[-1:]), flush=True)
    print(table(results))
    if not arguments.quick:
        # Programs that are measured alone have a file of their own.
        path = save("-".join(filter(None, ("programs", arguments.only))), results)
        path.with_suffix(".md").write_text(table(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
