"""Trial: contestants that stream the same batches one after the other, compared and timed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from pinfeed.cli.conditions import (
    ComputingStep,
    cached_share,
    drop,
    memory_by_kind,
    read_through,
    touch_memory,
)
from pinfeed.cli.dataloader import Rows, loader_epochs, parts_of
from pinfeed.cli.report import saying
from pinfeed.cli.sources import row_nbytes_of, source_of
from pinfeed.devices import resolve
from pinfeed.errors import ArgumentError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.units import human
from pinfeed.rows.batches import OrderBatches
from pinfeed.stores import NpyStore

# Longest time of reading files into the page cache; after that they are timed cold.
_WARM_S = 10.0
# Batches that are compared.
_CHECKED = 4
# Fewer batches than these say little about a rate, so a slow contestant takes longer than asked.
_LEAST_TIMED = 8
# The first epoch may take this many times as long as later ones.
_FIRST = 4
# Memory to touch before each contestant, in sizes of the files: for batches, and for a copy of the
# files that a contestant may make; for cold files, for the page cache as well.
_TOUCHED_WARM = 1.25
_TOUCHED_COLD = 2.0
_TOUCH_S = 10.0


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
    waited_s: float = 0.0
    """Part of ``seconds`` in which the loop waited for batches, by its own clock."""

    @property
    def rows_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9 bytes) per second."""
        return self.rows_per_s * self.row_nbytes / 1e9

    @property
    def waited(self) -> float:
        """Share of the time in which the loop waited for a batch."""
        return self.waited_s / self.seconds

    @property
    def values(self) -> dict[str, Any]:
        """The rate for scripts."""
        derived = ("rows_per_s", "gb_per_s", "waited")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Timing:
    """The result of a contestant.

    Attributes:
        name: Name of the contestant.
        first: Rate of its first epoch, including the time to start.
        later: Rate of later epochs; None for cold files, which are warm by then.
        with_step: Rate of later epochs of a loop with a training step; None if there are none.
        memory: Growth of memory by kind, in bytes; empty where the kernel does not report it.
        problem: The reason why it could not be timed; empty if it could.
        equal: Whether the compared batches are the rows of the files.
    """

    name: str
    first: Rate | None = None
    later: Rate | None = None
    with_step: Rate | None = None
    memory: dict[str, int] = field(default_factory=dict)
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
        seconds: Time for the later epochs of each contestant, and for those with a step; the first
            epoch may take 4 times that. At least 8 batches are timed, or the whole first epoch.
        step_s: Approximate duration of a training step in seconds; 0 leaves the step out.
    """

    def __init__(
        self,
        stores: Sequence[NpyStore],
        order: Any,
        batch_size: int,
        device: str,
        seconds: float,
        step_s: float = 0.0,
    ) -> None:
        self.stores = stores
        self.order = order
        self.seconds = seconds
        self.n_rows = stores[0].n_rows
        self.row_nbytes = row_nbytes_of(stores)
        self.nbytes = self.n_rows * self.row_nbytes
        self.batch_size = min(batch_size, self.n_rows)
        with contextlib.closing(resolve(device, n_spare=0)) as found:
            self.device = found.name
        self.sources = [store.paths for store in stores]
        # Largest share of the files in the wrong state before a contestant: missing from the page
        # cache if warm, or cached if cold. None if the kernel does not report it.
        self.misplaced: float | None = 0.0
        self.batches = OrderBatches(order, self.n_rows, self.batch_size, False)
        self.warm = True
        self.step = None
        if step_s:
            with _one_thread():
                self.step = ComputingStep.lasting(step_s, self.device)

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
        free = free_host_bytes()
        if warm and self.nbytes > free // 2:
            raise ArgumentError(
                f"--warm: the files have {human(self.nbytes)}, but they may fill only half of the "
                f"free memory ({human(free)}); use --cold"
            )
        self.warm = self.nbytes <= free // 2 if warm is None else warm
        if self.warm:
            with saying("reading the files"):
                self.warm = read_through(self.paths, _WARM_S if warm is None else math.inf)

    @property
    def page_cache(self) -> str:
        """The state of the page cache before each contestant, in words."""
        if self.warm:
            text = "warm: the files are in the OS page cache before each loader starts"
            stray = "were not, because other programs need the memory"
        else:
            text = (
                "cold: the files are dropped from the OS page cache before each loader starts, "
                "and read for at most one epoch"
            )
            stray = "stayed in it, because they are in use or not on a disk"
        if self.misplaced is None:
            text += "; the kernel does not report whether this succeeded"
        elif self.misplaced > 0.01:
            text += f"; up to {self.misplaced:.0%} {stray}"
        return text

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
            return Timing(
                name, problem="its batches differ from the rows of the files", equal=False
            )
        self._settle()
        before = memory_by_kind()
        begin = time.perf_counter()
        with make() as epochs:
            first = self._rate(epochs(0), begin, _FIRST * self.seconds)
            later = None
            with_step = None
            if self.warm:
                batches = itertools.chain.from_iterable(map(epochs, itertools.count(1)))
                # If the first epoch was left before its end, a DataLoader first waits for all
                # batches that its workers have begun to read.
                next(batches)
                later = self._rate(batches, time.perf_counter(), self.seconds)
                if self.step is not None:
                    with _one_thread():
                        with_step = self._rate(
                            batches, time.perf_counter(), self.seconds, self.step
                        )
            after = memory_by_kind()
        memory = {kind: after[kind] - before[kind] for kind in before if kind in after}
        return Timing(name, first, later, with_step, memory)

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

    def _settle(self) -> None:
        """Set the page cache and the free memory to the same state for each contestant."""
        if not self.warm:
            drop(self.paths)
        elif cached_share(self.paths) != 1:
            read_through(self.paths, _WARM_S)
        share = cached_share(self.paths)
        if share is None or self.misplaced is None:
            self.misplaced = None
        else:
            self.misplaced = max(self.misplaced, 1 - share if self.warm else share)
        factor = _TOUCHED_WARM if self.warm else _TOUCHED_COLD
        touch_memory(round(factor * self.nbytes), _TOUCH_S)

    def _rate(
        self,
        batches: Iterable[Any],
        begin: float,
        seconds: float,
        step: Callable[[], object] | None = None,
    ) -> Rate:
        n_rows = 0
        complete = True
        waited_s = 0.0
        asked = begin
        for n_batches, batch in enumerate(batches, 1):
            waited_s += time.perf_counter() - asked
            n_rows += len(parts_of(batch)[0])
            if step is not None:
                step()
            asked = time.perf_counter()
            if asked - begin > seconds and n_batches >= _LEAST_TIMED:
                complete = False
                break
        # The loop also waits for the end of the last epoch.
        waited_s += time.perf_counter() - asked
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        taken_s = time.perf_counter() - begin
        return Rate(n_rows, taken_s, self.row_nbytes, complete, waited_s)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in one thread, so that the loader has the other cores."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether arrays are equal bit for bit, so that NaN equals itself."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    )
