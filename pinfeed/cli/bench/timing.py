"""Timing: the result of a contestant of ``pinfeed bench``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
        return {
            **asdict(self),
            "rows_per_s": self.rows_per_s,
            "gb_per_s": self.gb_per_s,
            "waited": self.waited,
        }


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
