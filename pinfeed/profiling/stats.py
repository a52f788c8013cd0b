"""FeederStats: totals of a feeder, their rates and differences, and the bottleneck of the loop."""

from __future__ import annotations

import dataclasses
import html
import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from pinfeed.memory.host import resident_bytes
from pinfeed.memory.page_locked import locked_bytes
from pinfeed.memory.units import duration, human, human_rate
from pinfeed.profiling.bottleneck import Bottleneck, bottleneck_of, verdict_of
from pinfeed.validation.safe_repr import safe_repr, wrapped

T = TypeVar("T", bound="Totals")


@dataclass(frozen=True, repr=False)
class ProcessMemory:
    """Resident memory of the process in bytes, by kind, for pinfeed and all other code together.

    A kind that the system does not report is None.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100)
        >>> memory = feeder.stats.memory
        >>> memory.pinned >= 0
        True

    Attributes:
        anonymous: Bytes that are neither mapped from a file, nor shared, nor page-locked by
            pinfeed.
        file: Bytes mapped from files: libraries, and touched pages of memory maps, including
            pinfeed's. The kernel may drop such pages at any time.
        shared: Bytes of shared memory, mostly batches from the worker processes of a DataLoader.
            The kernel also counts memory that CUDA allocates page-locked (torch's ``pin_memory``).
        pinned: Bytes that pinfeed page-locked (pinned).
        peak: Largest sum of all kinds since the process began, in bytes.
    """

    anonymous: int | None
    file: int | None
    shared: int | None
    pinned: int
    peak: int | None

    @classmethod
    def now(cls) -> ProcessMemory:
        """Return the current memory of this process."""
        resident = resident_bytes()
        locked = locked_bytes()
        anonymous = resident["anonymous"]
        if anonymous is not None:
            anonymous = max(0, anonymous - locked)
        return cls(anonymous, resident["file"], resident["shared"], locked, resident["peak"])

    @safe_repr
    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in self._texts())

    def _texts(self) -> list[tuple[str, str]]:
        """Return the name of each kind with its readable size."""
        kinds = dataclasses.asdict(self).items()
        return [(name, "unknown" if nbytes is None else human(nbytes)) for name, nbytes in kinds]


@dataclass(frozen=True, kw_only=True, repr=False)
class Totals:
    """Counts and times of a feeder's loops; ``later - earlier`` counts the time between the two.

    ``FeederStats`` describes the fields.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100)
        >>> earlier = feeder.stats
        >>> for batch in feeder:
        ...     loss = batch.mean()
        >>> epoch = feeder.stats - earlier
        >>> epoch.batches, epoch.rows
        (10, 1000)
    """

    batches: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    overhead_s: float = 0.0
    write_wait_s: float = 0.0
    starved_s: float = 0.0
    first_batch_s: float = 0.0
    read_s: float = 0.0
    source_s: float = 0.0
    host_transform_s: float = 0.0
    device_transform_s: float = 0.0
    copy_wait_s: float = 0.0
    write_s: float = 0.0
    late: int = 0
    late_host_transform_s: float = 0.0
    late_device_transform_s: float = 0.0
    cache_lookups: int = 0
    cache_hits: int = 0
    cache_evictions: int = 0
    cache_rows_written: int = 0
    cache_bytes_read: int = 0
    cache_bytes_written: int = 0
    depth: int = 0
    n_readers: int = 1
    n_transform_threads: int = 1
    asynchronous: bool = False
    measures_depth: bool = False
    is_measured: bool = False
    watched: Literal["loop", "device"] = "loop"

    @property
    def compute_s(self) -> float:
        """Time in which the training steps ran: all time within loops except waits."""
        return max(0.0, self.seconds - self.wait_s - self.overhead_s - self.write_wait_s)

    @property
    def starved(self) -> float:
        """Share of the time in which the loop waited and the device was idle, from 0 to 1."""
        return self.starved_s / self.seconds if self.seconds else 0.0

    @property
    def readers_busy(self) -> float:
        """Share of the time in which reader threads read, from 0 to 1.

        Readers also work between loops, and a batch counts when a loop receives it.
        """
        return min(1.0, self.read_s / self.seconds / self.n_readers) if self.seconds else 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9 bytes) per second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the looked-up rows that were in a cache on the device; 0 without a cache."""
        return self.cache_hits / self.cache_lookups if self.cache_lookups else 0.0

    @property
    def cache_in_words(self) -> str:
        """Hit rate of the caches, and average traffic per batch; empty without a cache."""
        if not self.cache_lookups:
            return ""
        n = max(1, self.batches)
        read = self.cache_lookups - self.cache_hits
        return (
            f"{self.cache_hit_rate:.0%} of the rows of batches were in the cache; on average, a "
            f"batch read {read / n:,.0f} rows ({human(self.cache_bytes_read / n)}), wrote "
            f"{self.cache_rows_written / n:,.0f} ({human(self.cache_bytes_written / n)}) and "
            f"evicted {self.cache_evictions / n:,.0f}"
        )

    @property
    def transforms_in_words(self) -> str:
        """Time per batch of each transform; empty without a transform."""
        n = max(1, self.batches)
        times = {
            "host_transform": self.host_transform_s,
            "device_transform": self.device_transform_s,
        }
        return ", ".join(f"{name} {duration(s / n)}" for name, s in times.items() if s)

    @property
    def rates(self) -> str:
        """Readable rows and bytes per second; rows alone if the bytes are unknown."""
        moved = f", {human_rate(1e9 * self.gb_per_s)}" if self.bytes else ""
        return f"{self.rows_per_s:,.0f} rows/s{moved}"

    @property
    def depth_in_words(self) -> str:
        """The depth, and how it was chosen: ``depth=2`` or ``depth=0, by measurement``."""
        return f"depth={self.depth}" + ", by measurement" * self.is_measured

    @property
    def bottleneck(self) -> Bottleneck:
        """The part of the pipeline that the others wait for."""
        return bottleneck_of(self)

    @property
    def verdict(self) -> str:
        """A sentence that says how long the loop waited, and why."""
        return verdict_of(self)

    def as_dict(self) -> dict[str, float]:
        """Return numbers for a logger, with the units in their names."""
        names = {"late": "late_batches", "seconds": "loop_s"}
        found: dict[str, float] = {
            names.get(name, name): getattr(self, name)
            for name in COUNTED
            if not name.startswith(("late_", "cache_"))
        }
        found |= {
            "compute_s": self.compute_s,
            "rows_per_s": self.rows_per_s,
            "gb_per_s": self.gb_per_s,
            "starved_percent": 100 * self.starved,
            "readers_busy_percent": 100 * self.readers_busy,
        }
        if self.cache_lookups:
            found |= {
                "cache_hit_percent": 100 * self.cache_hit_rate,
                "cache_evicted_rows": self.cache_evictions,
                "cache_read_rows": self.cache_lookups - self.cache_hits,
                "cache_written_rows": self.cache_rows_written,
                "cache_read_bytes": self.cache_bytes_read,
                "cache_written_bytes": self.cache_bytes_written,
            }
        return found

    def __sub__(self: T, earlier: Totals) -> T:
        changed = {name: getattr(self, name) - getattr(earlier, name) for name in COUNTED}
        return dataclasses.replace(self, **changed)

    def __add__(self: T, other: Totals) -> T:
        changed = {name: getattr(self, name) + getattr(other, name) for name in COUNTED}
        return dataclasses.replace(self, **changed)

    @safe_repr
    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        seconds = f"{self.seconds:.2f} s" if self.seconds >= 0.1 else f"{1e3 * self.seconds:.1f} ms"
        transforms = self.transforms_in_words
        per_batch = f"; transforms, per batch: {transforms}" if transforms else ""
        cache = f"; cache: {self.cache_in_words}" if self.cache_lookups else ""
        return wrapped(
            f"{self.batches} batches, {self.rows} rows in {seconds}: {self.rates}; {self.verdict}"
            f"{per_batch}{cache}{self._memory_in_words}",
            rest="  ",
        )

    @property
    def _memory_in_words(self) -> str:
        """End of the text that describes memory; totals of a loop have none."""
        return ""


_UNCOUNTED = {
    *("depth", "n_readers", "n_transform_threads"),
    *("asynchronous", "measures_depth", "is_measured", "watched"),
}
COUNTED = [field.name for field in dataclasses.fields(Totals) if field.name not in _UNCOUNTED]
"""Fields of ``Totals`` that count, so that two totals can be added."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FeederStats(Totals):
    """Totals since the feeder was made, or between two moments as ``later - earlier``.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100)
        >>> for batch in feeder:
        ...     loss = batch.mean()
        >>> feeder.stats.batches
        10
        >>> print(feeder.stats)
        10 batches, 1000 rows in ...

    Attributes:
        batches: Batches that the loop has received.
        rows: Rows of these batches.
        bytes: Bytes of these batches, without rows that were in a cache on the device. An object
            that is no dense tensor counts 0, because its size is unknown. With
            ``device_transform``, these are the bytes that the function takes.
        seconds: Time within loops, in seconds, like all times in this class.
        wait_s: Time in which loops waited for data: from the request for a batch until it was
            ready.
        overhead_s: Time in which loops waited for pinfeed's own work in their thread. It
            begins with the request for a batch and ends when the loop receives it, without
            ``wait_s``. pinfeed reserves memory for later batches, hands the batch over, and frees
            earlier ones. Starting and joining the threads of a loop is included.
        write_wait_s: Time in which ``write_back``, or the end of a loop, waited for earlier writes
            while the device was idle.
        starved_s: Time in which the loop waited, for any reason, and the device was idle. It is the
            sum of ``write_wait_s`` and parts of ``wait_s`` and ``overhead_s``. On the CPU, it is
            the sum of all three, because the CPU as a device is idle while the loop waits.
        first_batch_s: Part of ``starved_s`` for the first batch of each loop.
        read_s: Time in which reader threads read, summed over the threads.
        source_s: Part of ``read_s`` that the source takes to decide what to read next. For a
            DataLoader, it is the time that the loader took for its batch.
        host_transform_s: Time in which ``host_transform`` ran, summed over the threads.
        device_transform_s: Time in which ``device_transform`` ran. On a GPU, the function only
            queues its work. A timeline shows the time of that work.
        copy_wait_s: Time in which reader threads waited for copies of earlier batches and for the
            work of ``device_transform`` on them, summed over the threads.
        write_s: Time in which the writer threads wrote rows back.
        late: Batches that were not ready when the loop requested them.
        late_host_transform_s: Time in which loops waited for late batches that spent most of their
            time in ``host_transform``.
        late_device_transform_s: The same for ``device_transform``.
        cache_lookups: Distinct rows per batch of tables with a cache on the device, summed over the
            batches.
        cache_hits: Looked-up rows that were in a cache; the others were read from their stores.
        cache_evictions: Rows that left a cache to make room for others.
        cache_rows_written: Rows of tables with a cache that were written to their stores.
        cache_bytes_read: Bytes of rows of tables with a cache that were read from their stores.
        cache_bytes_written: Bytes of rows of tables with a cache that were written to their stores.
        depth: Number of batches that are prefetched.
        n_readers: Number of reader threads.
        n_transform_threads: Number of threads that call ``host_transform``. For a loader, these are
            reader threads.
        asynchronous: Whether the loop only queues work for a device; ``compute_s`` excludes the
            time of that work.
        measures_depth: Whether pinfeed chooses the depth by measurement.
        is_measured: Whether it has chosen ``depth``.
        watched: ``"device"`` if a timeline has recorded the device's work, whose gaps count as
            waits; ``"loop"`` otherwise.
        memory: Memory of the process when ``feeder.stats`` was read.
    """

    memory: ProcessMemory

    def as_dict(self) -> dict[str, float]:
        """Return numbers for a logger, with the units in their names.

        Memory that the system does not report is NaN.
        """
        numbers = super().as_dict()
        for name, nbytes in dataclasses.asdict(self.memory).items():
            numbers[f"memory_{name}_bytes"] = math.nan if nbytes is None else nbytes
        return numbers

    @property
    def _memory_in_words(self) -> str:
        return f"; memory: {self.memory}"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the verdict, and a table of the numbers."""
        from tabulate import tabulate

        threads = f"{self.n_readers} thread{'s' * (self.n_readers != 1)}"
        rows = [
            ("batches", f"{self.batches:,}, {self.late:,} late"),
            ("rows", f"{self.rows:,}, {self.rows_per_s:,.0f} per second"),
        ]
        if self.bytes:
            rows.append(("bytes", f"{human(self.bytes)}, {human_rate(1e9 * self.gb_per_s)}"))
        rows += [
            ("seconds within loops", f"{self.seconds:.3f}"),
            (f"the {self.watched} waited", f"{self.starved:.0%}"),
            ("seconds of waiting for data", f"{self.wait_s:.3f}"),
            ("seconds of overhead", f"{self.overhead_s:.3f}"),
            ("reader threads busy", f"{self.readers_busy:.0%} of {threads}"),
            ("prefetching", self.depth_in_words),
        ]
        if self.transforms_in_words:
            rows.append(("transforms, per batch", self.transforms_in_words))
        if self.cache_lookups:
            rows.append(("cache", self.cache_in_words))
        rows += [(f"memory, {name}", text) for name, text in self.memory._texts()]
        table = tabulate(rows, tablefmt="html", disable_numparse=True)
        return f"<p>{html.escape(self.verdict)}</p>{table}"
