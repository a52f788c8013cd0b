"""The overhead of pinfeed per batch: the time between two batches, and the cost of write-backs.

Run it from the root:

    python -m benchmarks.overhead                       (four minutes)
    python -m benchmarks.overhead --before CHECKOUT     (an earlier pinfeed, too, in turn)
    python -m benchmarks.overhead --parts loops         (half a minute)
    python -m benchmarks.overhead --parts write-backs --rows 1024 65536

The first part is ``benchmarks/handover.py``: loops that do nothing, over sources that do nothing.
The same run measures a bare executor that hands over nothing. The second part is
``benchmarks/forwarding.py``.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import forwarding, handover
from benchmarks.earlier import Earlier, add_before, opened
from benchmarks.environment import environment, save


def loops(earlier: Earlier | None, n_rounds: int) -> None:
    """Measure, print and save the cost of a batch on every device."""
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    results = handover.measure(devices, earlier, n_rounds)
    tables = handover.report(results)
    print(f"{tables}\n\n{handover.goals(results)}\n")
    path = save("overhead-loops", results)
    path.with_suffix(".md").write_text(handover.report({"after": results["after"]}) + "\n")
    print(path)


def write_backs(earlier: Earlier | None, sizes: list[int], route: str) -> None:
    """Measure, print and save the cost of write-backs."""
    results = forwarding.measure(sizes, earlier, direct=route == "direct")
    print(forwarding.report(results))
    is_whole = tuple(sizes) == forwarding.SIZES
    print(save("overhead-write-backs" if is_whole else "overhead-write-backs-part", results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["loops", "write-backs"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument(
        "--rounds", type=int, default=handover.N_ROUNDS, help="rounds of the part loops"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(forwarding.SIZES))
    parser.add_argument("--route", default="direct", choices=["direct", "staged"])
    add_before(parser)
    arguments = parser.parse_args()
    print(environment())
    with opened(arguments.before) as earlier:
        if "loops" in arguments.parts:
            loops(earlier, arguments.rounds)
        if "write-backs" in arguments.parts:
            write_backs(earlier, arguments.rows, arguments.route)


if __name__ == "__main__":
    main()
