"""Trial: contestants that stream the same batches one after the other, compared and timed."""

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
from pinfeed.cli.terminal.output import saying
from pinfeed.cli.terminal.sources import row_nbytes_of, source_of
from pinfeed.devices import resolve
from pinfeed.errors import ArgumentError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.units import human
from pinfeed.rows.batches import OrderBatches
from pinfeed.stores.sharded_file import AnyShardedStore

# Longest time of reading files into the page cache; after that they are timed cold.
_WARM_S = 10.0
# Batches that are compared.
_CHECKED = 4
# The first epoch may take so many times as long as later ones.
_FIRST = 4
_COPIED_BYTES = 256 << 20

Epochs = Callable[[int], Iterable[Any]]
"""Returns the batches of an epoch by its number: a tensor each, or one tensor of each source."""


@dataclass(frozen=True)
class Rate:
    """Rows that were streamed in some time."""

    rows: int
    seconds: float
    row_nbytes: int
    complete: bool
    """Whether the epoch ended before the time was over."""

    @property
    def rows_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9 bytes) per second."""
        return self.rows_per_s * self.row_nbytes / 1e9

    @property
    def values(self) -> dict[str, Any]:
        """The rate for scripts."""
        return {**asdict(self), "rows_per_s": self.rows_per_s, "gb_per_s": self.gb_per_s}


@dataclass(frozen=True)
class Timing:
    """The result of a contestant.

    Attributes:
        name: Name of the contestant.
        first: Rate of its first epoch, including the time to start.
        later: Rate of later epochs; None for cold files, which are warm by then.
        problem: The reason why it could not be timed; empty if it could.
        equal: Whether the compared batches are the rows of the files.
    """

    name: str
    first: Rate | None = None
    later: Rate | None = None
    problem: str = ""
    equal: bool = True

    @property
    def rate(self) -> Rate | None:
        """The rate that counts: that of later epochs if there are any."""
        return self.later or self.first


class Trial:
    """Contestants that stream the same batches, one after the other.

    Args:
        stores: The sources, which have equally many rows.
        order: The order of the rows.
        batch_size: Rows of a batch.
        device: Device of the batches.
        seconds: Time for the later epochs of each contestant; the first epoch may take 4 times
            that.
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
        # Share of the files that could not be dropped from the page cache; None if the kernel does
        # not report it.
        self.left: float | None = 0.0
        self.batches = OrderBatches(order, self.n_rows, self.batch_size, False)
        self.warm = True

    @property
    def paths(self) -> list[str]:
        """Paths of the files of all sources."""
        return list(itertools.chain.from_iterable(self.sources))

    def prepare(self, warm: bool | None) -> None:
        """Read the files into the page cache, or decide that every contestant begins cold.

        Args:
            warm: Whether the files must be in the page cache; None reads them if they fit.

        Raises:
            ArgumentError: If ``warm`` is True and the files do not fit into memory.
        """
        nbytes = self.n_rows * self.row_nbytes
        free = free_host_bytes()
        if warm and nbytes > free // 2:
            raise ArgumentError(
                f"--warm: the files have {human(nbytes)}; {human(free)} of memory are free, "
                "half of which they may take"
            )
        self.warm = nbytes <= free // 2 if warm is None else warm
        if self.warm:
            with saying("reading the files"):
                self.warm = read_through(self.paths, _WARM_S if warm is None else math.inf)

    @property
    def page_cache(self) -> str:
        """The state of the page cache before each contestant, in words."""
        if self.warm:
            return "warm: the files were read once before, and fit the page cache"
        text = (
            "cold: dropped from the page cache before each contestant, "
            "and read for one epoch at most"
        )
        if self.left is None:
            text += "; whether they were, the kernel does not tell"
        elif self.left > 0.01:
            text += f"; up to {self.left:.0%} stayed there: they are not on a disk, or in use"
        return text

    def ceilings(self) -> dict[str, float]:
        """Measure the rates, in GB/s without a loader, that bound every contestant."""
        with saying("measuring what the machine does at best"):
            found = {"copy in memory": memory_rate()}
            if not self.warm:
                found["disk, in sequence"] = max(self._disk_rate(1), self._disk_rate(4))
            if self.device != "cpu":
                rates = link_rates(self.device, _COPIED_BYTES)
                found["link to the GPU"] = rates["to_device_pinned"]
        return found

    def _disk_rate(self, n_threads: int) -> float:
        self._drop()
        largest = max(self.paths, key=os.path.getsize)
        return sequential_rate(largest, n_threads, seconds=self.seconds)

    def timings(self, workers: Sequence[int]) -> Iterator[Timing]:
        """Time pinfeed, and a DataLoader for each number of workers and kind of item.

        The errors of a DataLoader are reported in its timing. Those of pinfeed are raised.
        """
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
                    # Workers may lack shared memory, a dtype may not be stackable, and so on.
                    message = " ".join(str(error).split())
                    yield Timing(name, problem=f"{type(error).__name__}: {message}")

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
        """Compare a contestant's first batches; then make it again and time its epochs."""
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
        """Return whether a contestant's first batches are those that numpy reads.

        No file stays mapped, because the kernel does not drop mapped pages.
        """
        expected = [Rows(paths) for paths in self.sources]
        with make() as epochs:
            draws = itertools.islice(self.batches.epoch(0), _CHECKED)
            for draw, batch in zip(draws, epochs(0), strict=False):
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
        n_rows = 0
        complete = True
        for batch in batches:
            n_rows += len(parts_of(batch)[0])
            if time.perf_counter() - begin > seconds:
                complete = False
                break
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        return Rate(n_rows, time.perf_counter() - begin, self.row_nbytes, complete)


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether arrays are equal bit for bit, so that NaN equals itself."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    )
