"""Tests and measurements for a machine with a CUDA device. Run it from the root of the source tree:

    python -m benchmarks.gpu --short                  (what decides most, 570 s at most)
    python -m benchmarks.gpu                          (all other parts, half an hour)
    python -m benchmarks.gpu --parts link             (one group, less than ten minutes)
    python -m benchmarks.gpu --parts rows overlap --seconds 300

It first builds pinfeed's compiled part. Every part runs in a process of its own and writes one JSON
file, which is up to date after each of its cells, and says what it was measured with. ``--device
cpu`` runs the same measurements without a GPU, on small sizes, to check that they work.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from benchmarks.environment import commit
from benchmarks.gpu.packing import packed
from benchmarks.gpu.processes import ROOT, Part, machine, run_parts
from pinfeed.native.build import compile_library

SHORT = "short"
SHORT_S = 570.0
_GROUP_S = 560.0

# Shares are seconds. The parts of the short run are in the order in which they decide.
PARTS = (
    Part("prices", SHORT, 15, "benchmarks.gpu.prices:prices"),
    Part("ceilings", SHORT, 15, "benchmarks.gpu.link:ceilings"),
    Part("host-work", SHORT, 22, "benchmarks.gpu.host_work:host_work"),
    Part("saved-tensors", SHORT, 75, "benchmarks.gpu.correctness:saved_tensors"),
    Part("decisive-tables", SHORT, 70, "benchmarks.gpu.tables:decisive_tables"),
    Part("row-kernel", SHORT, 45, "benchmarks.gpu.rows:rows"),
    Part("gathers", SHORT, 25, "benchmarks.gpu.gathers:gathers"),
    Part("in-loop", SHORT, 55, "benchmarks.gpu.in_loop:in_loop"),
    Part("loops", SHORT, 25, "benchmarks.gpu.loops:loops"),
    Part("graphs", SHORT, 12, "benchmarks.gpu.graphs:graphs"),
    Part("limits", SHORT, 55, "benchmarks.gpu.limits:limits"),
    Part("peaks", SHORT, 18, "benchmarks.gpu.peaks:peaks"),
    Part("large-batches", SHORT, 55, "benchmarks.gpu.large_batches:large_batches"),
    Part("slowdown", SHORT, 45, "benchmarks.gpu.slowdown:slowdowns"),
    Part("samples", SHORT, 20, "benchmarks.gpu.samples:samples"),
    Part("environment", "correctness", 30, "benchmarks.gpu.system:system"),
    Part("direct-tests", "correctness", 80, "benchmarks.gpu.correctness:direct_tests"),
    Part("tests", "correctness", 280, "benchmarks.gpu.correctness:tests"),
    Part("compute-sanitizer", "correctness", 110, "benchmarks.gpu.correctness:compute_sanitizer"),
    Part("overlap", "link", 260, "benchmarks.gpu.overlap:overlaps"),
    Part("movers", "link", 60, "benchmarks.gpu.movers:movers"),
    Part("tables", "training", 240, "benchmarks.gpu.tables:tables"),
    Part("cache", "training", 120, "benchmarks.gpu.cache:caches"),
)


def parse() -> argparse.Namespace:
    groups = list(dict.fromkeys(part.group for part in PARTS))
    names = [*groups, *(part.name for part in PARTS)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help=f"the short run: --parts {SHORT} in {SHORT_S:.0f} s"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"groups or parts: {', '.join(names)}",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"time of the whole call, with its start (default: {_GROUP_S:.0f} for each group)",
    )
    parser.add_argument(
        "--commit",
        default=commit(),
        help="commit of the source tree, for the results (default: %(default)s, as git says)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results"
    )
    parser.add_argument(
        "--pack",
        type=Path,
        metavar="FILE",
        help="tar file that gets the folder of the results every 15 s, and at the end",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no usable GPU; expected one, or --device cpu")
    return arguments


def chosen_parts(names: list[str] | None) -> list[Part]:
    """Return the parts of these names and groups; by default all that the short run leaves."""
    if names:
        return [part for part in PARTS if part.name in names or part.group in names]
    return [part for part in PARTS if part.group != SHORT]


def main() -> None:
    arguments = parse()
    names = [SHORT] if arguments.short else arguments.parts
    chosen = chosen_parts(names)
    most_s = SHORT_S if arguments.short else _GROUP_S * len({part.group for part in chosen})
    seconds = arguments.seconds or most_s
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() - _age_s() + seconds
    with packed(out, arguments.pack.resolve()) if arguments.pack else contextlib.nullcontext():
        build()
        measure(chosen, out, arguments.device, arguments.commit, end_s)


def build() -> None:
    """Build pinfeed's compiled part, and say so if that fails. Rates without it decide nothing."""
    try:
        compile_library()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"THE COMPILED PART WAS NOT BUILT: {error}", flush=True)


def _age_s() -> float:
    """Return the seconds since this process began; importing torch may take many."""
    return time.time() - psutil.Process().create_time()


def measure(chosen: list[Part], out: Path, device: str, commit: str, end_s: float) -> None:
    """Run parts until ``end_s``, a time of ``time.monotonic()``."""
    begin = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    written = run_parts(
        chosen,
        seconds=end_s - time.monotonic(),
        out=out,
        header={"device": device, "command": command, "commit": commit},
        prefix=f"gpu-{machine()}" if device == "cuda" else "gpu-dry-run",
    )
    print(f"{time.monotonic() - begin:.0f} s in all", *written, sep="\n", flush=True)


if __name__ == "__main__":
    main()
