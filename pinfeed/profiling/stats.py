"""What a feeder measured: totals, their rates and differences, and the sentence that says what held the loop up."""

from __future__ import annotations

import dataclasses
import html
import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from pinfeed.memory.buffer_pool import locked_bytes
from pinfeed.memory.host import resident_bytes
from pinfeed.memory.units import human, human_rate

Bottleneck = Literal[
    "computing", "reading", "copying", "writing", "unevenness", "start", "loop", "depth"
]
"""What the others wait for.

``start``: loops are short, and nothing is read ahead of their first batch. ``loop``: it does next
to nothing, behind which nothing can hide. ``depth``: nothing is read ahead at all.
"""

WORTH_A_WORD, STARVED = 0.05, 0.2
"""Shares of the time: a loop that waits less than the first computes as fast as it can; one that waits more than the second starves."""
LIGHT_LOOP = 0.1
"""A loop that works for less than this share of the time leaves nothing that reading could hide behind."""
BUSY_READERS = 0.6
"""Readers that are busy for less than this share of the time would keep up, if batches came evenly."""

_SENTENCES: dict[Bottleneck, str] = {
    "computing": "computing is the bottleneck",
    "reading": "reading is the bottleneck",
    "copying": "copying to the device is the bottleneck",
    "writing": "writing back is the bottleneck",
    "unevenness": "batches come unevenly, though reading fits on average",
    "start": "mostly for the first batch of a loop, ahead of which nothing is read",
    "loop": "it does almost nothing that reading could hide behind",
    "depth": "nothing is read ahead (depth=0)",
}

T = TypeVar("T", bound="Totals")


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of the process, pinfeed's and that of all other code, in bytes.

    None for what the system does not tell.
    """

    anonymous: int | None
    """Neither mapped from a file, nor shared, nor page-locked by pinfeed."""
    file: int | None
    """Mapped from files: libraries, and memory maps as far as they were touched. pinfeed maps no data."""
    shared: int | None
    """Shared memory: the batches that the worker processes of a DataLoader hand over, above all.

    The kernel also counts as shared what CUDA allocates page-locked (torch's ``pin_memory``).
    """
    pinned: int
    """Page-locked by pinfeed."""
    peak: int | None
    """The most that the sum has been since the process began."""

    @classmethod
    def now(cls) -> ProcessMemory:
        """Measure it."""
        found, locked = resident_bytes(), locked_bytes()
        anonymous = None if found["anonymous"] is None else max(0, found["anonymous"] - locked)
        return cls(anonymous, found["file"], found["shared"], locked, found["peak"])

    def __str__(self) -> str:
        found = dataclasses.asdict(self).items()
        return ", ".join(
            f"{name} {'unknown' if nbytes is None else human(nbytes)}" for name, nbytes in found
        )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What was counted over some time within loops. ``later - earlier`` is what came between."""

    batches: int = 0
    rows: int = 0
    bytes: int = 0
    """Bytes lent to the loop."""
    seconds: float = 0.0
    """Time within loops."""
    wait_s: float = 0.0
    """Time from when a loop asked for a batch to when it had it."""
    starved_s: float = 0.0
    """Of it, for batches that were not ready, where the device had nothing left to do by then (the CPU never has)."""
    start_s: float = 0.0
    """Of that, for the first batch of each loop."""
    land_s: float = 0.0
    """Time in which ``write_back`` waited for earlier ones to land, while the device had nothing to do."""
    read_s: float = 0.0
    """Time in which readers read, the sum over the threads."""
    draw_s: float = 0.0
    """Of it, time in which the source was asked what comes next: a DataLoader, say, for its batch."""
    held_s: float = 0.0
    """Time in which readers waited for the device to copy earlier batches, the sum over the threads."""
    write_s: float = 0.0
    """Time in which the writer wrote rows back."""
    late: int = 0
    """Batches that were not ready when the loop asked for them."""
    depth: int = 0
    """Batches ahead of the loop."""
    n_readers: int = 1
    """Threads that read."""
    asynchronous: bool = False
    """Whether the loop only queues work for a device: how long that takes is not in ``compute_s``."""

    watched: Literal["loop", "device"] = "loop"
    """Whose waiting was counted: the device's own, where a timeline has seen it work."""

    @property
    def compute_s(self) -> float:
        """Time of the loop's own work."""
        return max(0.0, self.seconds - self.wait_s - self.land_s)

    @property
    def starved(self) -> float:
        """Share of the time in which the loop waited, for a batch or for write-backs, and the device had nothing to do."""
        return (self.starved_s + self.land_s) / self.seconds if self.seconds else 0.0

    @property
    def readers_busy(self) -> float:
        """Share of the readers' time in which they read."""
        return self.read_s / self.seconds / self.n_readers if self.seconds else 0.0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes per second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def rates(self) -> str:
        """Rows and bytes per second as people read them; rows alone where no bytes were moved."""
        moved = f", {human_rate(1e9 * self.gb_per_s)}" if self.bytes else ""
        return f"{self.rows_per_s:,.0f} rows/s{moved}"

    @property
    def bottleneck(self) -> Bottleneck:
        """What the others wait for."""
        if self.starved < WORTH_A_WORD:
            return "computing"
        if self.depth == 0:
            return "depth"
        if self.land_s > self.starved_s:
            return "writing"
        if self.start_s > self.starved_s / 2:
            return "start"
        if self.held_s > self.read_s:
            return "copying"
        if self.compute_s < LIGHT_LOOP * self.seconds and not self.asynchronous:
            return "loop"
        return "reading" if self.readers_busy >= BUSY_READERS else "unevenness"

    @property
    def verdict(self) -> str:
        """One sentence: how long the loop waited, and for what."""
        if not self.seconds:
            return "no loop has run"
        because = _SENTENCES[self.bottleneck]
        if self.bottleneck == "reading" and self.starved < STARVED:
            because = "reading takes about as long as computing"
        return f"the {self.watched} waited {self.starved:.0%} of the time: {because}"

    def as_dict(self) -> dict[str, float]:
        """Flat numbers, their units in their names, for a logger."""
        return {
            "batches": self.batches,
            "rows": self.rows,
            "bytes": self.bytes,
            "late_batches": self.late,
            **{
                f"{name}_s": getattr(self, f"{name}_s")
                for name in (
                    "wait",
                    "starved",
                    "start",
                    "land",
                    "compute",
                    "read",
                    "draw",
                    "held",
                    "write",
                )
            },
            "loop_s": self.seconds,
            "rows_per_s": self.rows_per_s,
            "gb_per_s": self.gb_per_s,
            "starved_percent": 100 * self.starved,
            "readers_busy_percent": 100 * self.readers_busy,
        }

    def __sub__(self: T, earlier: Totals) -> T:
        return dataclasses.replace(
            self, **{name: getattr(self, name) - getattr(earlier, name) for name in _COUNTED}
        )

    def __add__(self: T, other: Totals) -> T:
        return dataclasses.replace(
            self, **{name: getattr(self, name) + getattr(other, name) for name in _COUNTED}
        )

    def __str__(self) -> str:
        seconds = f"{self.seconds:.2f} s" if self.seconds >= 0.1 else f"{1e3 * self.seconds:.1f} ms"
        return (
            f"{self.batches} batches, {self.rows} rows in {seconds}: {self.rates}; {self.verdict}"
        )


_COUNTED = [
    field.name
    for field in dataclasses.fields(Totals)
    if field.name not in ("depth", "n_readers", "asynchronous", "watched")
]


@dataclass(frozen=True, kw_only=True)
class FeederStats(Totals):
    """Totals since the feeder was made; or, as ``later - earlier``, between two moments."""

    memory: ProcessMemory
    """When this was asked for."""

    def as_dict(self) -> dict[str, float]:
        """Flat numbers, their units in their names, for a logger; not a number (nan) for memory that the system does not tell."""
        memory = {
            name: math.nan if nbytes is None else nbytes
            for name, nbytes in dataclasses.asdict(self.memory).items()
        }
        return {
            **super().as_dict(),
            **{f"memory_{name}_bytes": nbytes for name, nbytes in memory.items()},
        }

    def __str__(self) -> str:
        return f"{super().__str__()}; memory: {self.memory}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the verdict, and a table of the numbers behind it."""
        from tabulate import tabulate

        memory = dataclasses.asdict(self.memory)
        rows = [
            ("batches", f"{self.batches:,}, {self.late:,} of them late"),
            ("rows", f"{self.rows:,}, {self.rows_per_s:,.0f} a second"),
            *(
                [("bytes", f"{human(self.bytes)}, {human_rate(1e9 * self.gb_per_s)}")]
                if self.bytes
                else []
            ),
            ("seconds within loops", f"{self.seconds:.3f}"),
            (f"the {self.watched} waited", f"{self.starved:.0%}"),
            (
                "readers were busy",
                f"{self.readers_busy:.0%} of {self.n_readers} thread{'s' * (self.n_readers != 1)}",
            ),
            *(
                (f"memory, {name}", "unknown" if nbytes is None else human(nbytes))
                for name, nbytes in memory.items()
            ),
        ]
        return f"<p>{html.escape(self.verdict)}</p>{tabulate(rows, tablefmt='html', disable_numparse=True)}"
