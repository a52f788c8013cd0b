"""``pinfeed bench``: files of the user's, streamed by a Feeder and by plain DataLoaders, beside what the machine does at best."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.cli.bench.dataloader import Rows, loader_epochs, parts_of
from pinfeed.cli.measure.bandwidth import link_rates, memory_rate, sequential_rate
from pinfeed.cli.measure.page_cache import cached_share, drop, read_through
from pinfeed.cli.terminal.options import order_of
from pinfeed.cli.terminal.output import Report, saying, sections, table, wrapped
from pinfeed.cli.terminal.sources import (
    all_described,
    open_sources,
    row_nbytes_of,
    source_of,
    sources_values,
    usual_batch,
)
from pinfeed.devices import resolve
from pinfeed.errors import ArgumentError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.units import human, human_rate
from pinfeed.rows.batches import OrderBatches
from pinfeed.stores import MmapStore
from pinfeed.stores.sharded_file import AnyShardedStore

# In which a file is brought into the page cache, or else it is timed cold.
_WARM_S = 10.0
# Batches that are compared.
_CHECKED = 4
# Times as long as others may the first epoch take.
_FIRST = 4
_COPIED_BYTES = 256 << 20

Epochs = Callable[[int], Iterable[Any]]
"""Batches of an epoch, by its number: a tensor each, or several of several sources."""


@dataclass(frozen=True)
class Rate:
    """Rows in some time."""

    rows: int
    seconds: float
    row_nbytes: int
    complete: bool
    """Whether the epoch was ended, and not stopped."""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes a second."""
        return self.rows_per_s * self.row_nbytes / 1e9

    @property
    def values(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "rows_per_s": self.rows_per_s, "gb_per_s": self.gb_per_s}


@dataclass(frozen=True)
class Timing:
    """What a contestant showed.

    Attributes:
        name: Of the contestant.
        first: Its first epoch, with what it takes to begin.
        later: Those after it; none of cold files, which are warm by then.
        problem: Why it could not be timed; empty if it could.
        equal: Whether the batches that were compared are the rows of the files.
    """

    name: str
    first: Rate | None = None
    later: Rate | None = None
    problem: str = ""
    equal: bool = True

    @property
    def rate(self) -> Rate | None:
        """What counts: later epochs where there are some."""
        return self.later or self.first


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
    """Time them: the first epoch for up to ``4 * seconds``, later ones for ``seconds``; a finding, if a batch is not what it should be."""
    order, order_name = order_of(shuffle, block_rows, seed)
    with open_sources(files, others) as stores:
        for store in stores:
            if not isinstance(store, MmapStore):
                raise ArgumentError(
                    f"{store.paths[0]} is elsewhere; numpy.load, which is timed as well, reads local files"
                )
            if not store.row_nbytes:
                raise ArgumentError(f"{store.paths[0]}: rows of no bytes; there is nothing to time")
        trial = Trial(
            stores, order, batch_size or usual_batch(row_nbytes_of(stores)), device, seconds
        )
        trial.prepare(warm)
        ceilings = trial.ceilings()
        timings = list(trial.timings(workers))
    return _report(trial, order_name, ceilings, timings)


class Trial:
    """Contestants on the same batches, one after the other.

    Args:
        stores: The sources, of equally many rows.
        order: The order of the rows.
        batch_size: Rows of a batch.
        device: Where the batches go.
        seconds: For the later epochs of each contestant; the first one may take some times as long.
    """

    def __init__(
        self,
        stores: Sequence[AnyShardedStore],
        order: Any,
        batch_size: int,
        device: str,
        seconds: float,
    ) -> None:
        self.stores = stores
        self.order = order
        self.seconds = seconds
        self.n_rows = stores[0].n_rows
        self.row_nbytes = row_nbytes_of(stores)
        self.batch_size = min(batch_size, self.n_rows)
        with contextlib.closing(resolve(device, n_spare=0)) as found:
            self.device = found.name
        self.sources = [store.paths for store in stores]
        # Share of the files that could not be dropped from the page cache; None where nobody knows.
        self.left: float | None = 0.0
        self.batches = OrderBatches(order, self.n_rows, self.batch_size, False)
        self.warm = True

    @property
    def paths(self) -> list[str]:
        """The files of all sources."""
        return list(itertools.chain.from_iterable(self.sources))

    def prepare(self, warm: bool | None) -> None:
        """Bring the files into the page cache, or decide that each contestant begins without.

        Raises:
            ArgumentError: They are to be there, and do not fit.
        """
        nbytes, free = self.n_rows * self.row_nbytes, free_host_bytes()
        if warm and nbytes > free // 2:
            raise ArgumentError(
                f"--warm: the files have {human(nbytes)}; {human(free)} of memory are free, half of which they may take"
            )
        self.warm = nbytes <= free // 2 if warm is None else warm
        if self.warm:
            with saying("reading the files"):
                self.warm = read_through(self.paths, _WARM_S if warm is None else math.inf)

    @property
    def page_cache(self) -> str:
        """What of the files was there, in words."""
        if self.warm:
            return "warm: the files were read once before, and fit the page cache"
        said = "cold: dropped from the page cache before each contestant, and read for one epoch at most"
        if self.left is None:
            return f"{said}; whether they were, the kernel does not tell"
        return (
            f"{said}; up to {self.left:.0%} stayed there: they are not on a disk, or in use"
            if self.left > 0.01
            else said
        )

    def ceilings(self) -> dict[str, float]:
        """GB/s without a loader, of what every batch goes through."""
        with saying("measuring what the machine does at best"):
            found = {"copy in memory": memory_rate()}
            if not self.warm:
                for n_threads in (1, 4):
                    self._drop()
                    rate = sequential_rate(
                        max(self.paths, key=os.path.getsize), n_threads, seconds=self.seconds
                    )
                    found["disk, in sequence"] = max(rate, found.get("disk, in sequence", 0.0))
            if self.device != "cpu":
                found["link to the GPU"] = link_rates(self.device, _COPIED_BYTES)[
                    "to_device_pinned"
                ]
        return found

    def timings(self, workers: Sequence[int]) -> Iterator[Timing]:
        """Time every contestant. A DataLoader that fails says why; pinfeed's errors are raised."""
        with saying("timing pinfeed"):
            yield self._timed("pinfeed", self._feeder)
        for by_row, n_workers in itertools.product((False, True), workers):
            name = f"DataLoader, {'rows' if by_row else 'batches'}, {n_workers} workers"
            make = functools.partial(
                loader_epochs,
                self.sources,
                self.batches,
                self.device,
                n_workers=n_workers,
                by_row=by_row,
            )
            with saying(f"timing {name}"):
                try:
                    yield self._timed(name, make)
                except Exception as error:
                    # Workers without shared memory, a dtype that cannot be stacked, whatever else
                    # there is.
                    yield Timing(
                        name, problem=f"{type(error).__name__}: {' '.join(str(error).split())}"
                    )

    @contextlib.contextmanager
    def _feeder(self) -> Iterator[Epochs]:
        with Feeder(
            source_of(self.stores), batch_size=self.batch_size, rows=self.order, device=self.device
        ) as feeder:

            def epochs(number: int) -> Iterable[Any]:
                feeder.set_epoch(number)
                return feeder

            yield epochs

    def _timed(self, name: str, make: Callable[[], AbstractContextManager[Epochs]]) -> Timing:
        """A contestant: its first batches compared; made anew, its first epoch, and then later ones."""
        if not self._gives_the_rows(make):
            return Timing(name, problem="its batches are not the rows of the files", equal=False)
        if not self.warm:
            self._drop()
        begin = time.perf_counter()
        with make() as epochs:
            first = self._rate(epochs(0), begin, _FIRST * self.seconds)
            later = None
            if self.warm:
                batches = itertools.chain.from_iterable(map(epochs, itertools.count(1)))
                later = self._rate(batches, time.perf_counter(), self.seconds)
        return Timing(name, first, later)

    def _gives_the_rows(self, make: Callable[[], AbstractContextManager[Epochs]]) -> bool:
        """Whether its first batches are those that numpy reads.

        Nothing stays mapped: pages that are could not be dropped.
        """
        expected = [Rows(paths) for paths in self.sources]
        with make() as epochs:
            for draw, batch in zip(
                itertools.islice(self.batches.epoch(0), _CHECKED), epochs(0), strict=False
            ):
                rows = draw.rows()
                for part, source in zip(parts_of(batch), expected, strict=True):
                    if not _is_equal(part.cpu().numpy(), source.gather(rows)):
                        return False
        return True

    def _drop(self) -> None:
        drop(self.paths)
        left = cached_share(self.paths)
        self.left = None if left is None or self.left is None else max(left, self.left)

    def _rate(self, batches: Iterable[Any], begin: float, seconds: float) -> Rate:
        n_rows, complete = 0, True
        for batch in batches:
            n_rows += len(parts_of(batch)[0])
            if time.perf_counter() - begin > seconds:
                complete = False
                break
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        return Rate(n_rows, time.perf_counter() - begin, self.row_nbytes, complete)


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit: not a number is equal to itself."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    )


def _report(
    trial: Trial, order_name: str, ceilings: dict[str, float], timings: Sequence[Timing]
) -> Report:
    size, best = trial.batch_size, min(ceilings.values())
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
    head = f"batches of {size:,} rows ({human(size * trial.row_nbytes)}), {order_name}, on {trial.device}"
    columns = ("rows/s", "1st epoch", "later", "rate", "best", "x")
    shown = table([_columns(timing, timings[0], best) for timing in timings], columns, "lrrrrr")
    failures = [
        f"{timing.name}: {timing.problem}" for timing in timings if timing.problem and timing.equal
    ]
    reached = ", ".join(f"{what} {human_rate(1e9 * rate)}" for what, rate in ceilings.items())
    parts = {
        all_described(trial.stores): "\n".join(
            wrapped(text, "  ", "  ") for text in (head, trial.page_cache)
        ),
        shown: "\n".join(
            map(
                wrapped,
                (f"x: how many times as fast pinfeed is; best: the share of {reached}", *failures),
            )
        ),
    }
    findings = tuple(f"{timing.name}: {timing.problem}" for timing in timings if not timing.equal)
    return Report(values, f"{sections(parts)}\n\n{wrapped(_verdict(timings))}".rstrip(), findings)


def _values(timing: Timing, ours: Timing) -> dict[str, Any]:
    """For scripts."""
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
    """How many times as fast pinfeed is."""
    return (
        ours.rate.rows_per_s / timing.rate.rows_per_s
        if ours.rate and timing.rate and timing.rate.rows
        else None
    )


def _verdict(timings: Sequence[Timing]) -> str:
    """Beside the fastest of the others."""
    ratio, name = min(
        ((ratio, timing.name) for timing in timings[1:] if (ratio := _ratio(timing, timings[0]))),
        default=(0.0, ""),
    )
    if not name:
        return ""
    if 0.9 <= ratio <= 1.1:
        return f"pinfeed is about as fast as the fastest other ({name})."
    comparison = (
        f"is {ratio:.1f} times as fast as" if ratio > 1 else f"has {ratio:.0%} of the rate of"
    )
    return f"pinfeed {comparison} the fastest other ({name}). How much of that a training step beside it hides, feeder.stats tells."
