"""``pinfeed bench``: a Feeder and plain DataLoaders over the user's files, and their ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinfeed.cli.bench.trial import Timing, Trial
from pinfeed.cli.terminal.options import order_of
from pinfeed.cli.terminal.output import Report, sections, table, wrapped
from pinfeed.cli.terminal.sources import (
    all_described,
    open_sources,
    row_nbytes_of,
    sources_values,
    usual_batch,
)
from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human, human_rate
from pinfeed.stores import MmapStore


def bench(
    files: Sequence[str],
    *,
    others: Sequence[str],
    batch_size: int | None,
    shuffle: bool,
    block_rows: int | None,
    seed: int | None,
    seconds: float,
    workers: Sequence[int],
    warm: bool | None,
    device: str,
) -> Report:
    """Time a feeder and DataLoaders over files.

    The first epoch of each is timed for up to ``4 * seconds``, later ones for ``seconds``. The
    arguments are the options of the command.

    Returns:
        The rates; with a finding if batches are not the rows of the files.
    """
    order, order_name = order_of(shuffle, block_rows, seed)
    with open_sources(files, others) as stores:
        for store in stores:
            if not isinstance(store, MmapStore):
                raise ArgumentError(
                    f"{store.paths[0]} is elsewhere; "
                    "numpy.load, which is timed as well, reads local files"
                )
            if not store.row_nbytes:
                raise ArgumentError(f"{store.paths[0]}: rows of no bytes; there is nothing to time")
        size = batch_size or usual_batch(row_nbytes_of(stores))
        trial = Trial(stores, order, size, device, seconds)
        trial.prepare(warm)
        ceilings = trial.ceilings()
        timings = list(trial.timings(workers))
    return _report(trial, order_name, ceilings, timings)


def _report(
    trial: Trial, order_name: str, ceilings: dict[str, float], timings: Sequence[Timing]
) -> Report:
    size = trial.batch_size
    best = min(ceilings.values())
    values = {
        **sources_values(trial.stores),
        "batch_size": size,
        "order": order_name,
        "device": trial.device,
        "warm": trial.warm,
        "page_cache": trial.page_cache,
        "ceilings_gb_per_s": ceilings,
        "contestants": [_values(timing, timings[0]) for timing in timings],
    }
    batches = f"batches of {size:,} rows ({human(size * trial.row_nbytes)})"
    head = f"{batches}, {order_name}, on {trial.device}"
    columns = ("rows/s", "1st epoch", "later", "rate", "best", "x")
    shown = table([_columns(timing, timings[0], best) for timing in timings], columns, "lrrrrr")
    failures = [
        f"{timing.name}: {timing.problem}" for timing in timings if timing.problem and timing.equal
    ]
    reached = ", ".join(f"{what} {human_rate(1e9 * rate)}" for what, rate in ceilings.items())
    legend = f"x: how many times as fast pinfeed is; best: the share of {reached}"
    conditions = [wrapped(text, "  ", "  ") for text in (head, trial.page_cache)]
    parts = {
        all_described(trial.stores): "\n".join(conditions),
        shown: "\n".join(map(wrapped, (legend, *failures))),
    }
    findings = tuple(f"{timing.name}: {timing.problem}" for timing in timings if not timing.equal)
    return Report(values, f"{sections(parts)}\n\n{wrapped(_verdict(timings))}".rstrip(), findings)


def _values(timing: Timing, ours: Timing) -> dict[str, Any]:
    """Describe a contestant's result for scripts."""
    return {
        "name": timing.name,
        "first_epoch": timing.first and timing.first.values,
        "later_epochs": timing.later and timing.later.values,
        "pinfeed_ratio": _ratio(timing, ours),
        "problem": timing.problem,
    }


def _columns(timing: Timing, ours: Timing, best: float) -> tuple[str, ...]:
    if timing.rate is None:
        return timing.name, "failed", "", "", "", ""
    rates = (f"{rate.rows_per_s:,.0f}" if rate else "" for rate in (timing.first, timing.later))
    ratio = _ratio(timing, ours)
    reached = human_rate(1e9 * timing.rate.gb_per_s), f"{timing.rate.gb_per_s / best:.0%}"
    return timing.name, *rates, *reached, "" if ratio is None else f"{ratio:.2f}"


def _ratio(timing: Timing, ours: Timing) -> float | None:
    """Return how many times as fast pinfeed is; None if one of the two was not timed."""
    if ours.rate is None or timing.rate is None or not timing.rate.rows:
        return None
    return ours.rate.rows_per_s / timing.rate.rows_per_s


def _verdict(timings: Sequence[Timing]) -> str:
    """Compare pinfeed with the fastest of the others, in a sentence."""
    ratios = [(_ratio(timing, timings[0]), timing.name) for timing in timings[1:]]
    ratio, name = min(((ratio, name) for ratio, name in ratios if ratio), default=(0.0, ""))
    if not name:
        return ""
    if 0.9 <= ratio <= 1.1:
        return f"pinfeed is about as fast as the fastest other ({name})."
    comparison = f"has {ratio:.0%} of the rate of"
    if ratio > 1:
        comparison = f"is {ratio:.1f} times as fast as"
    return (
        f"pinfeed {comparison} the fastest other ({name}). "
        "feeder.stats tells how much of that a training step hides."
    )
