"""``pinfeed bench``: a Feeder and plain DataLoaders over the user's files, and their ceilings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pinfeed.cli.bandwidth import gather_rate, link_rates, memory_rate, sequential_rates
from pinfeed.cli.conditions import touch_memory
from pinfeed.cli.orders import OrderOptions
from pinfeed.cli.report import Report, saying, sections, table
from pinfeed.cli.sources import (
    all_described,
    open_sources,
    row_nbytes_of,
    sources_values,
    usual_batch,
)
from pinfeed.cli.trial import Rate, Timing, Trial
from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human
from pinfeed.rows.batches import OrderBatches
from pinfeed.stores import NpyStore
from pinfeed.stores.paths import has_protocol
from pinfeed.validation.wrapping import wrapped

if TYPE_CHECKING:
    from pinfeed.cli.sources import OpenedFile

_LEGEND = (
    "1st, later: the rate in the first epoch, and in later epochs. The last row shows the highest "
    "rate that this machine allows, and what limits it. batches: the dataset returns whole "
    "batches. rows: it returns single rows, which the loader stacks. x: pinfeed is this many times "
    "as fast. waits: share of time that a loop with a training step waits for data in later "
    "epochs. own, file: growth of the process's own memory, and of mapped file pages, which the "
    "kernel may drop."
)

# In a shorter epoch, the one to two milliseconds in which pinfeed begins and ends it count.
_FEW_BATCHES = 64
# Bytes that are copied, gathered and touched to measure the highest rates of the machine.
_COPIED_BYTES = 256 << 20
_GATHERED_BYTES = 1 << 30
_READ_BYTES = 4 << 30


def bench(
    files: Sequence[str],
    *,
    others: Sequence[str],
    batch_size: int | None,
    shuffle: bool,
    block_rows: int | None,
    seed: int | None,
    seconds: float,
    step_ms: float,
    workers: Sequence[int],
    warm: bool | None,
    device: str,
) -> Report:
    """Time a feeder and DataLoaders over files.

    The first epoch of each is timed for up to ``4 * seconds``, later ones for ``seconds``, and for
    as long again with a training step. At least 8 batches are timed. The arguments are the options
    of the command.

    Returns:
        The rates; with a finding if batches are not the rows of the files.
    """
    options = OrderOptions(shuffle=shuffle, block_rows=block_rows, seed=seed)
    options.check()
    with open_sources(files, others) as stores:
        local = list(map(_local, stores))
        size = batch_size or usual_batch(row_nbytes_of(local))
        trial = Trial(local, options.order, size, device, seconds, step_ms / 1e3)
        trial.prepare(warm)
        ceilings = _ceilings(trial)
        timings = list(trial.timings(workers))
    return _report(trial, options.order_name, ceilings, timings)


def _local(store: OpenedFile) -> NpyStore:
    """Return a store, if numpy can read its files as well.

    Raises:
        ArgumentError: If its files are elsewhere, of another format, or have rows of no bytes.
    """
    if not isinstance(store, NpyStore):
        problem = "is a remote file" if has_protocol(store.paths[0]) else "is not a .npy file"
        raise ArgumentError(
            f"{store.paths[0]} {problem}; expected a local .npy file, because bench also times "
            "numpy.load"
        )
    if not store.row_nbytes:
        raise ArgumentError(f"{store.paths[0]}: its rows have 0 bytes; expected rows to read")
    return store


def _ceilings(trial: Trial) -> dict[str, float]:
    """Measure the rates, in GB/s without a loader, that bound every contestant."""
    path = max(trial.paths, key=os.path.getsize)
    with saying("measuring the highest rates of the machine"):
        touch_memory(_COPIED_BYTES)
        found = {"copy in memory": memory_rate()}
        if trial.warm:
            rows = np.load(path, mmap_mode="r")
            batches = OrderBatches(trial.order, len(rows), min(trial.batch_size, len(rows)), False)
            n_batches = max(1, _GATHERED_BYTES // (batches.batch_size * rows[0].nbytes))
            indices = [draw.rows() for draw in itertools.islice(batches.epoch(0), n_batches)]
            found["gather from the page cache"] = gather_rate(path, indices, trial.seconds)
        else:
            touched = min(_READ_BYTES, os.path.getsize(path))
            rates = sequential_rates(path, touched=touched, seconds=trial.seconds)
            found["disk, in sequence"] = max(rates.values())
        if trial.device != "cpu":
            link = link_rates(trial.device, _COPIED_BYTES)
            found["link to the GPU"] = link["to_device_pinned"]
    return found


def _report(
    trial: Trial, order_name: str, ceilings: dict[str, float], timings: Sequence[Timing]
) -> Report:
    size = trial.batch_size
    values = {
        **sources_values(trial.stores),
        "batch_size": size,
        "order": order_name,
        "device": trial.device,
        "warm": trial.warm,
        "page_cache": trial.page_cache,
        "step_products": trial.step and trial.step.n_products,
        "ceilings_gb_per_s": ceilings,
        "contestants": [_values(timing, timings[0]) for timing in timings],
    }
    batches = f"batches of {size:,} rows ({human(size * trial.row_nbytes)})"
    head = f"{batches}, {order_name}, on {trial.device}"
    texts = [head, trial.page_cache]
    n_batches = -(-trial.n_rows // size)
    if n_batches < _FEW_BATCHES:
        texts.append(
            f"an epoch has only {n_batches} batches, so the time to start it lowers the rates"
        )
    conditions = [wrapped(text, "  ", "  ") for text in texts]
    failures = [
        f"{timing.name}: {timing.problem}" for timing in timings if timing.problem and timing.equal
    ]
    parts = {
        all_described(trial.stores): "\n".join(conditions),
        _table(trial, timings, ceilings): "\n".join(map(wrapped, (_LEGEND, *failures))),
    }
    findings = tuple(f"{timing.name}: {timing.problem}" for timing in timings if not timing.equal)
    return Report(values, f"{sections(parts)}\n\n{wrapped(_verdict(timings))}".rstrip(), findings)


def _table(trial: Trial, timings: Sequence[Timing], ceilings: dict[str, float]) -> str:
    """Show the rates of each contestant, and in the last row the machine's limit."""
    what, best = min(ceilings.items(), key=lambda item: item[1])
    limit = [what, "", ""]
    limit[2 if trial.warm else 1] = f"{best:.3g}"
    columns = ("GB/s; memory in MiB", "1st", "later", "x", "waits", "own", "file")
    rows = [_columns(timing, timings[0]) for timing in timings]
    return table([*rows, (*limit, "", "", "", "")], columns, "lrrrrrr")


def _values(timing: Timing, ours: Timing) -> dict[str, Any]:
    """Describe a contestant's result for scripts."""
    return {
        "name": timing.name,
        "first_epoch": timing.first and timing.first.values,
        "later_epochs": timing.later and timing.later.values,
        "with_step": timing.with_step and timing.with_step.values,
        "memory_bytes": timing.memory,
        "pinfeed_ratio": _ratio(ours.rate, timing.rate),
        "problem": timing.problem,
    }


def _columns(timing: Timing, ours: Timing) -> tuple[str, ...]:
    if timing.rate is None:
        return timing.name, "failed", "", "", "", "", ""
    rates = [f"{rate.gb_per_s:.3g}" if rate else "" for rate in (timing.first, timing.later)]
    ratio = _ratio(ours.rate, timing.rate)
    waited = timing.with_step and f"{timing.with_step.waited:.0%}"
    memory = [
        f"{max(0, timing.memory[kind]) / (1 << 20):,.0f}" if kind in timing.memory else ""
        for kind in ("anonymous", "file")
    ]
    return timing.name, *rates, "" if ratio is None else f"{ratio:.2f}", waited or "", *memory


def _ratio(ours: Rate | None, other: Rate | None) -> float | None:
    """Return how many times as fast pinfeed is; None if one of the two was not timed."""
    if ours is None or other is None or not other.rows:
        return None
    return ours.rows_per_s / other.rows_per_s


def _verdict(timings: Sequence[Timing]) -> str:
    """Compare pinfeed with the fastest of the others, in a sentence for each kind of epoch."""
    ours, *others = timings
    first = {timing.name: _ratio(ours.first, timing.first) for timing in others}
    later = {timing.name: _ratio(ours.later, timing.later) for timing in others}
    sentences = (_comparison("In the first epoch", first), _comparison("In later epochs", later))
    return " ".join(filter(None, sentences))


def _comparison(when: str, ratios: Mapping[str, float | None]) -> str:
    """Compare pinfeed with the other against which it has the lowest ratio."""
    known = {name: ratio for name, ratio in ratios.items() if ratio}
    if not known:
        return ""
    name = min(known, key=known.__getitem__)
    ratio = known[name]
    if 0.9 <= ratio <= 1.1:
        return f"{when}, pinfeed is about as fast as the fastest other ({name})."
    comparison = f"has {ratio:.0%} of the rate of"
    if ratio > 1:
        comparison = f"is {ratio:.1f} times as fast as"
    return f"{when}, pinfeed {comparison} the fastest other ({name})."
