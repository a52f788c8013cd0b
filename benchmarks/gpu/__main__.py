"""Tests and measurements for a machine with a CUDA device. Run it from the root of the source tree:

    python -m benchmarks.gpu                          (all of it, 27 minutes)
    python -m benchmarks.gpu --parts link             (one group, nine minutes)
    python -m benchmarks.gpu --parts rows overlap --seconds 300

Every part runs in a process of its own and writes one JSON file, which is up to date after each of
its cells. ``--device cpu`` runs the same measurements without a GPU, on small sizes, to check that
they work.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.pictures import draw
from benchmarks.gpu.processes import ROOT, Part, machine, run_parts

_GROUP_S = 540.0
_PICTURES_S = 15.0

PARTS = (
    Part("tests", "correctness", 430, "benchmarks.gpu.correctness:tests"),
    Part("compute-sanitizer", "correctness", 110, "benchmarks.gpu.correctness:compute_sanitizer"),
    Part("overlap", "link", 170, "benchmarks.gpu.overlap:overlaps"),
    Part("movers", "link", 50, "benchmarks.gpu.movers:movers"),
    Part("ceilings", "link", 50, "benchmarks.gpu.link:ceilings"),
    Part("routes", "link", 60, "benchmarks.gpu.link:routes"),
    Part("files", "link", 50, "benchmarks.gpu.files:files"),
    Part("rows", "link", 160, "benchmarks.gpu.rows:sweep"),
    Part("tables", "training", 220, "benchmarks.gpu.tables:tables"),
    Part("cache", "training", 100, "benchmarks.gpu.cache:caches"),
    Part("large-batches", "training", 80, "benchmarks.gpu.large_batches:large_batches"),
    Part("profile", "training", 60, "benchmarks.gpu.profiling:profile"),
    Part("loops", "training", 60, "benchmarks.gpu.loops:loops"),
    Part("fetch", "training", 40, "benchmarks.gpu.fetch:fetches"),
    Part("transforms", "training", 20, "benchmarks.gpu.transforms:transforms"),
    Part("doctor", "training", 30, "benchmarks.gpu.loops:doctor"),
    Part("estimate", "training", 90, "benchmarks.gpu.loops:estimate"),
)


def parse() -> argparse.Namespace:
    groups = list(dict.fromkeys(part.group for part in PARTS))
    names = [*groups, *(part.name for part in PARTS)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
        help=f"time of the whole call (default: {_GROUP_S:.0f} for each group)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no usable GPU; expected one, or --device cpu")
    return arguments


def main() -> None:
    arguments = parse()
    chosen = [
        part
        for part in PARTS
        if not arguments.parts or part.name in arguments.parts or part.group in arguments.parts
    ]
    seconds = arguments.seconds or _GROUP_S * len({part.group for part in chosen})
    out = arguments.out.resolve()
    begin = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    prefix = f"gpu-{machine()}" if arguments.device == "cuda" else "gpu-dry-run"
    # Some of the time is reserved for the pictures.
    written = run_parts(
        chosen,
        seconds=seconds - min(_PICTURES_S, 0.1 * seconds),
        out=out,
        device=arguments.device,
        command=command,
        prefix=prefix,
    )
    written += draw(written, out, prefix)
    print(f"{time.monotonic() - begin:.0f} s in all", *written, sep="\n", flush=True)


if __name__ == "__main__":
    main()
