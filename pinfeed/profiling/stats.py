"""FeederStats: counts and times of a feeder's loops, their rates, and the verdict on the loop."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from pinfeed.memory.host import ProcessMemory
from pinfeed.memory.units import duration, human, human_rate
from pinfeed.validation.messages import wrapped

Stage = Literal["reading", "host_transform", "copying", "device_transform"]
"""Work on a batch before the loop receives it."""

Bottleneck = Literal[Stage, "computing", "writing", "overhead", "unevenness", "start"]
"""The part of the pipeline that the others wait for.

``overhead``: batches are ready in time, but pinfeed takes long to hand them over. ``unevenness``:
some batches take longer than others. ``start``: loops are short, and their first batch cannot be
prefetched.
"""

_STAGES: dict[Stage, str] = {
    "reading": "read_s",
    "host_transform": "host_transform_s",
    "copying": "copy_wait_s",
    "device_transform": "device_transform_s",
}
"""Field of ``FeederStats`` with the time of each stage."""

_NOTABLE = 0.05
"""Share of the time; a loop that waits for less computes as fast as it can."""

VERDICTS: dict[Bottleneck, str] = {
    "computing": "computing is the bottleneck; faster data would gain nothing",
    "reading": "reading is the bottleneck; read fewer bytes, read files in blocks of rows, or use "
    "more threads; threads take turns in Python code, which holds the interpreter's lock, so use "
    "worker processes of a DataLoader for it",
    "host_transform": "host_transform is the bottleneck; make it cheaper, raise transform_threads, "
    "or do its work before training",
    "copying": "copying to the device is the bottleneck; copy fewer bytes, for example uint8 that "
    "device_transform converts, or make a device_transform cheaper, because copies wait for it",
    "device_transform": "device_transform is the bottleneck; make it cheaper, or do its work "
    "before training",
    "writing": "writing back is the bottleneck; write fewer values, or keep the rows in memory "
    "instead of a file",
    "overhead": "pinfeed's own work on each batch is the bottleneck; use larger batches",
    "unevenness": "some batches are late, although reading is fast enough on average; raise depth, "
    "which keeps more batches ready",
    "start": "the first batch of each loop cannot be prefetched; run longer loops, or let the next "
    "epoch begin early with continuous=True",
}
"""Cause and advice for each bottleneck, with a semicolon between them."""

_WITHOUT_PREFETCHING = "compare depth=2, which does this work during the training step"
"""Advice for a loop with ``depth=0`` that waits for a stage."""


@dataclass(kw_only=True, repr=False)
class FeederStats:
    """Counts and times since the feeder was made, or between two moments as ``later - earlier``.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100)
        >>> earlier = feeder.stats
        >>> for batch in feeder:
        ...     loss = batch.mean()
        >>> print(feeder.stats)
        10 batches, 1000 rows in ...
        >>> epoch = feeder.stats - earlier
        >>> epoch.batches, epoch.rows
        (10, 1000)

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
        copy_wait_s: Time in which reader threads waited for copies of earlier batches, summed over
            the threads.
        write_s: Time in which the writer thread wrote rows back; 0 for tables whose rows a GPU
            writes itself. A timeline has these writes.
        late: Batches that were not ready when the loop requested them.
        cache_lookups: Distinct rows per batch of tables with a cache on the device, summed over the
            batches.
        cache_hits: Looked-up rows that were in a cache; the others were read from their stores.
        cache_rows_written: Rows of tables with a cache that were written to their stores.
        cache_bytes_read: Bytes of rows of tables with a cache that were read from their stores.
        cache_bytes_written: Bytes of rows of tables with a cache that were written to their stores.
        depth: Number of batches that are prefetched.
        n_readers: Number of reader threads.
        n_transform_threads: Number of threads that call ``host_transform``. For a loader, these are
            reader threads.
        asynchronous: Whether the loop only queues work for a device; ``compute_s`` excludes the
            time of that work.
        memory: Memory of the process when ``feeder.stats`` was read.
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
    cache_lookups: int = 0
    cache_hits: int = 0
    cache_rows_written: int = 0
    cache_bytes_read: int = 0
    cache_bytes_written: int = 0
    depth: int = 0
    n_readers: int = 1
    n_transform_threads: int = 1
    asynchronous: bool = False
    memory: ProcessMemory = field(default_factory=ProcessMemory.now)

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
            f"batch read {read / n:,.0f} rows ({human(self.cache_bytes_read / n)}) and wrote "
            f"{self.cache_rows_written / n:,.0f} ({human(self.cache_bytes_written / n)})"
        )

    @property
    def bottleneck(self) -> Bottleneck:
        """The part of the pipeline that the others wait for."""
        if self.starved < _NOTABLE:
            return "computing"
        if self.write_wait_s > self.wait_s + self.overhead_s:
            return "writing"
        if self.depth and self.first_batch_s > self.starved_s / 2:
            return "start"
        if self.overhead_s > self.wait_s:
            return "overhead"
        threads = {"host_transform": self.n_transform_threads, "device_transform": 1}
        # Seconds of a thread that does nothing else.
        taken = {
            stage: getattr(self, name) / threads.get(stage, self.n_readers)
            for stage, name in _STAGES.items()
        }
        if self.depth and sum(taken.values()) < self.seconds - self.starved_s:
            return "unevenness"
        return max(taken, key=lambda stage: taken[stage])

    @property
    def verdict(self) -> str:
        """A sentence that says how long the loop waited, for which stage, and what to change."""
        if not self.seconds:
            return "no loop has run"
        text = VERDICTS[self.bottleneck]
        if self.bottleneck in _STAGES and not self.depth:
            cause, _, _ = text.partition("; ")
            text = f"{cause}; {_WITHOUT_PREFETCHING}"
        return f"the loop waited {self.starved:.0%} of the time: {text}"

    def as_dict(self) -> dict[str, float]:
        """Return numbers for a logger, with the units in their names.

        Memory that the system does not report is NaN.
        """
        names = {"late": "late_batches", "seconds": "loop_s"}
        found: dict[str, float] = {
            names.get(name, name): getattr(self, name)
            for name in COUNTED
            if not name.startswith("cache_")
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
                "cache_read_rows": self.cache_lookups - self.cache_hits,
                "cache_written_rows": self.cache_rows_written,
                "cache_read_bytes": self.cache_bytes_read,
                "cache_written_bytes": self.cache_bytes_written,
            }
        for name, nbytes in dataclasses.asdict(self.memory).items():
            found[f"memory_{name}_bytes"] = math.nan if nbytes is None else nbytes
        return found

    def __sub__(self, earlier: FeederStats) -> FeederStats:
        changed = {name: getattr(self, name) - getattr(earlier, name) for name in COUNTED}
        return dataclasses.replace(self, **changed)

    def __repr__(self) -> str:
        n = max(1, self.batches)
        seconds = f"{self.seconds:.2f} s" if self.seconds >= 0.1 else f"{1e3 * self.seconds:.1f} ms"
        moved = f", {human_rate(1e9 * self.gb_per_s)}" if self.bytes else ""
        rates = f"{self.rows_per_s:,.0f} rows/s{moved}"
        text = f"{self.batches} batches, {self.rows} rows in {seconds}: {rates}"
        transforms = {
            "host_transform": self.host_transform_s,
            "device_transform": self.device_transform_s,
        }
        if found := ", ".join(f"{name} {duration(s / n)}" for name, s in transforms.items() if s):
            text += f"; transforms, per batch: {found}"
        if self.cache_lookups:
            text += f"; cache: {self.cache_in_words}"
        return wrapped(f"{text}; memory of the process: {self.memory}; {self.verdict}", rest="  ")


_UNCOUNTED = ("depth", "n_readers", "n_transform_threads", "asynchronous", "memory")
COUNTED = [one.name for one in dataclasses.fields(FeederStats) if one.name not in _UNCOUNTED]
"""Fields of ``FeederStats`` that count, so that two of them can be subtracted."""
