"""Tests and measurements for a machine with a CUDA device. Run it from the root of the source tree:

    python -m benchmarks.gpu                          (all of it, 38 minutes)
    python -m benchmarks.gpu --parts link             (one group, less than ten minutes)
    python -m benchmarks.gpu --parts rows overlap --seconds 300

Every part runs in a process of its own and writes one JSON file, which is up to date after each of
its cells. ``--device cpu`` runs the same measurements without a GPU, on small sizes, to check that
they work.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from pathlib import Path

import psutil
import torch

from benchmarks.gpu.packing import packed
from benchmarks.gpu.pictures import draw
from benchmarks.gpu.processes import ROOT, Part, machine, run_parts

_GROUP_S = 560.0
_PICTURES_S = 15.0

# The first three groups fit three calls of ten minutes. Shares are seconds of such a call.
PARTS = (
    Part("environment", "correctness", 30, "benchmarks.gpu.system:system"),
    Part("direct-tests", "correctness", 80, "benchmarks.gpu.correctness:direct_tests"),
    Part("tests", "correctness", 280, "benchmarks.gpu.correctness:tests"),
    Part("ceilings", "correctness", 55, "benchmarks.gpu.link:ceilings"),
    Part("rows", "correctness", 110, "benchmarks.gpu.rows:sweep"),
    Part("slowdown", "link", 60, "benchmarks.gpu.slowdown:products_during_transfers"),
    Part("overlap", "link", 260, "benchmarks.gpu.overlap:overlaps"),
    Part("routes", "link", 100, "benchmarks.gpu.link:routes"),
    Part("movers", "link", 60, "benchmarks.gpu.movers:movers"),
    # Some drivers crash or hang in these copies, so they are the last part of the link.
    Part("batch-copies", "link", 70, "benchmarks.gpu.movers:batch_copies"),
    Part("tables", "training", 240, "benchmarks.gpu.tables:tables"),
    Part("cache", "training", 120, "benchmarks.gpu.cache:caches"),
    Part("estimate", "training", 80, "benchmarks.gpu.loops:estimate"),
    Part("large-batches", "training", 50, "benchmarks.gpu.large_batches:large_batches"),
    Part("fetch", "training", 30, "benchmarks.gpu.fetch:fetches"),
    Part("compute-sanitizer", "details", 110, "benchmarks.gpu.correctness:compute_sanitizer"),
    Part("profile", "details", 90, "benchmarks.gpu.profiling:profile"),
    Part("loops", "details", 90, "benchmarks.gpu.loops:loops"),
    Part("files", "details", 70, "benchmarks.gpu.files:files"),
    Part("transforms", "details", 40, "benchmarks.gpu.transforms:transforms"),
    Part("samples", "details", 40, "benchmarks.gpu.samples:samples"),
    Part("doctor", "details", 40, "benchmarks.gpu.loops:doctor"),
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
        help=f"time of the whole call, with its start (default: {_GROUP_S:.0f} for each group)",
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


def main() -> None:
    arguments = parse()
    chosen = [
        part
        for part in PARTS
        if not arguments.parts or part.name in arguments.parts or part.group in arguments.parts
    ]
    seconds = arguments.seconds or _GROUP_S * len({part.group for part in chosen})
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with packed(out, arguments.pack.resolve()) if arguments.pack else contextlib.nullcontext():
        measure(chosen, out, arguments.device, time.monotonic() - _age_s() + seconds)


def _age_s() -> float:
    """Return the seconds since this process began; importing torch may take many."""
    return time.time() - psutil.Process().create_time()


def measure(chosen: list[Part], out: Path, device: str, end_s: float) -> None:
    """Run parts and draw pictures until ``end_s``, a time of ``time.monotonic()``."""
    begin = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    prefix = f"gpu-{machine()}" if device == "cuda" else "gpu-dry-run"
    left_s = end_s - time.monotonic()
    # Some of the time is reserved for the pictures.
    written = run_parts(
        chosen,
        seconds=left_s - min(_PICTURES_S, 0.1 * left_s),
        out=out,
        device=device,
        command=command,
        prefix=prefix,
    )
    written += draw(written, out, prefix)
    print(f"{time.monotonic() - begin:.0f} s in all", *written, sep="\n", flush=True)


if __name__ == "__main__":
    main()
