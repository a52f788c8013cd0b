"""``pinfeed doctor``: what this machine can do and, given a file, how the file would be read."""

from __future__ import annotations

import contextlib
import glob
from dataclasses import asdict
from typing import Any

from pinfeed.cli.machine import gpu_values, host_values, package_of
from pinfeed.cli.parts import source_of
from pinfeed.cli.plan import described, usual_batch
from pinfeed.cli.read_rates import ReadRates
from pinfeed.cli.report import Report, facts, in_words
from pinfeed.errors import PinfeedError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.units import human, human_rate
from pinfeed.stores.paths import has_protocol
from pinfeed.validation.suggestions import install_line


def doctor(file: str | None) -> Report:
    """Report on the machine and, if it is given, on a file."""
    gpu = gpu_values()
    host = host_values(gpu["torch_cuda"] if gpu["name"] else None)
    values: dict[str, Any] = {"host": host, "gpu": gpu, "file": None}
    texts = [_machine_text(host, gpu)]
    errors = []
    if file is not None:
        try:
            values["file"], text = _file(file)
            texts.append(text)
        except (PinfeedError, OSError) as error:
            errors.append(in_words(error))
    return Report(values, "\n\n".join(texts), errors)


def _file(file: str) -> tuple[dict[str, Any], str]:
    """Describe a file for scripts and for people."""
    part = source_of([file])
    reads: dict[str, list[str]] = {}
    with contextlib.closing(part.open()) as store:
        for name, shuffle in {"in order": False, "shuffled": True}.items():
            with Feeder(store, batch_size=usual_batch(store), shuffle=shuffle) as feeder:
                reads[name] = list(feeder.plan.notes)
    rates = None
    if isinstance(part.path, str) and not has_protocol(part.path):
        rates = ReadRates.measured(next(iter(sorted(glob.glob(part.path))), part.path))
    pairs = [("source", described(part).removeprefix(f"{part}: "))]
    is_same = reads["in order"] == reads["shuffled"]
    shown = {"read": reads["in order"]} if is_same else reads
    for name, notes in shown.items():
        pairs += [("" if i else name, note) for i, note in enumerate(notes)]
    if rates is not None:
        cold = "not measured, because the file stays in memory"
        if rates.cold is not None:
            cold = f"{human_rate(rates.cold)} for the first {human(rates.nbytes)} in sequence"
        warm = human_rate(rates.warm)
        if rates.cached is not None:
            warm += f"; it had {rates.cached:.0%} of these bytes"
        pairs += [("disk", cold), ("page cache", warm)]
    values = {**part.values, "reads": reads, "rates": rates and asdict(rates)}
    return values, facts(str(part), pairs)


def _machine_text(host: dict[str, Any], gpu: dict[str, Any]) -> str:
    cores = str(host["cores"])
    if host["core_quota"] is not None:
        cores += f", limited to the CPU time of {host['core_quota']:g} (control group)"
    locked = "no limit"
    if host["lock_limit"] is not None:
        locked = f"limit {human(host['lock_limit'])} (ulimit -l; the CUDA driver may exceed it)"
    built = f"for CUDA {gpu['torch_cuda']}" if gpu["torch_cuda"] else "without CUDA"
    driver = f"driver for CUDA {gpu['driver_cuda']}" if gpu["driver_cuda"] else "no NVIDIA driver"
    device = "none that torch can use"
    if gpu["name"]:
        several = f" (one of {gpu['count']})" * (gpu["count"] > 1)
        device = f"{gpu['name']}{several}, {human(gpu['total'])}, {human(gpu['free'])} free"
    packages = host["packages"]
    found = [f"{package_of(extra)} {version}" for extra, version in packages.items() if version]
    missing = [package_of(extra) for extra, version in packages.items() if not version]
    why = host["compiled_problem"]
    limits = [
        ("", f"{one['name']}: {human(one['total'])}, {human(max(0, one['free']))} free")
        for one in host["limits"]
    ]
    pairs = [
        ("compiled part", f"not used, because {why}" if why else "used"),
        ("cores", cores),
        ("memory", f"{human(host['memory'])}; a feeder may use {human(host['free'])}"),
        *limits,
        ("pinned memory", locked),
        ("torch", f"{gpu['torch']}, {built}; {driver}"),
        ("GPU", device),
        ("", gpu["problem"]),
        ("packages", ", ".join(found) or "none of the optional ones"),
        ("missing", install_line(*missing) if missing else ""),
    ]
    return facts("This machine", pairs)
